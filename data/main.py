"""Stage 1: conversations -> tokenized prompts with loss mask, and the counts for a draft vocabulary.

python data/main.py target=smollm2_135m conversations=FILE.jsonl out=DIR
"""

import sys, pathlib  # noqa: E401

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from data.config import DataConfig, stage  # noqa: E402
from data.prepare import prepare  # noqa: E402


@stage("data")
def main(config: DataConfig) -> dict:
    return prepare(config)


if __name__ == "__main__":
    main()

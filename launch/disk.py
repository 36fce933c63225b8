"""Prints what extraction takes on disk, by target and codec: the table of docs/extraction.md.

python launch/disk.py
"""

import sys, pathlib  # noqa: E401

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from data.codecs import Codec  # noqa: E402
from extract.preflight import TOKEN_BYTES, size  # noqa: E402

TARGETS = {"8B": 4096, "70B": 8192, "Kimi-K2.5": 7168}  # hidden size
CODECS = ("bf16", "fp8+bf16", "fp8", "fp8+topk64")
TOKENS = 2 * 10**9  # a million conversations of 2,000
NUM_BOUNDARIES = 3


def bytes_per_token(codec: str, hidden_size: int, *, num_boundaries: int = NUM_BOUNDARIES) -> int:
    """Of a record on disk: states, token and mask. Raises ValueError for a codec that is none."""
    return Codec.parse(codec).bytes_per_token(num_boundaries=num_boundaries, hidden_size=hidden_size) + TOKEN_BYTES


def table() -> str:
    """In Markdown."""
    lines = ["| target | codec | bytes a token | of bf16 | 2 billion tokens |", "|---|---|---|---|---|"]
    for target, hidden_size in TARGETS.items():
        for codec in CODECS:
            count = bytes_per_token(codec, hidden_size)
            share = count / bytes_per_token("bf16", hidden_size)
            lines.append(f"| {target} (hidden {hidden_size}) | `{codec}` | {count:,} | {share:.0%} | {size(count * TOKENS)} |".replace("%", " %"))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

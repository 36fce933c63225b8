"""Stage 1: conversations -> tokenized prompts with loss mask, and the counts for a draft vocabulary.

python data/main.py target=smollm2_135m conversations=FILE.jsonl out=DIR
"""

import sys, pathlib  # noqa: E401

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from dataclasses import asdict  # noqa: E402
from pathlib import Path  # noqa: E402

from tqdm import tqdm  # noqa: E402

from data.boundaries import text_config  # noqa: E402
from data.config import DataConfig, fingerprint, finished, stage  # noqa: E402
from data.conversations import count_rows, read_rows  # noqa: E402
from data.embedded import ensure_target  # noqa: E402
from data.fingerprints import chat_template_hash, tokenizer_hash  # noqa: E402
from data.prompts import PromptSet  # noqa: E402
from data.tokenizing import Tokenizing, load_tokenizer  # noqa: E402
from data.vocab import Vocabulary  # noqa: E402

FORMAT_VERSION = 1  # raise it when the same conversations give other prompts


@stage("data")
def main(config: DataConfig) -> dict:
    out, conversations = Path(config.out), Path(config.conversations)
    num_rows = count_rows(conversations)
    target = ensure_target(config.target)
    limits = text_config(target)
    hashes = {"tokenizer_hash": tokenizer_hash(target), "chat_template_hash": chat_template_hash(target)}

    options = {key: value for key, value in asdict(config).items() if key not in ("out", "target", "conversations")}
    inputs = fingerprint(FORMAT_VERSION, options, hashes, config.target.name, conversations.name, conversations)
    if done := finished(out, inputs):
        return {**done, "line": f"nothing to do, {out} holds the {done['kept']} prompts of these conversations"}
    (out / "summary.json").unlink(missing_ok=True)  # until the new one is complete, there is none

    tokenizing = Tokenizing(
        load_tokenizer(target, trust_remote_code=config.target.trust_remote_code),
        vocab_size=limits["vocab_size"],
        max_tokens=config.max_tokens or limits.get("max_position_embeddings") or sys.maxsize,
        cut_long=config.cut_long,
        min_supervised=config.min_supervised,
        validation_fraction=config.validation_fraction,
        rewritten_history=config.rewritten_history,
        template_options=config.template_options,
    )
    rows = tqdm(read_rows(conversations), desc="tokenize", unit=" rows", total=num_rows, delay=2)
    prompts = PromptSet.collect(tokenizing.run(rows, file_name=conversations.stem))
    account = tokenizing.account
    for line in account.lines():
        print(line, file=sys.stderr)
    if account.kept == 0:
        raise ValueError(f"none of {account.rows} rows of {conversations} can be used, see the reasons above")

    vocabulary = Vocabulary.count(
        prompts, tokenizing.tokenizer, vocab_size=limits["vocab_size"], tokenizer_hash=hashes["tokenizer_hash"]
    )
    prompts.save(out)
    vocabulary.save(out)
    num_supervised = int(prompts.loss_mask.sum())
    return {
        "target": config.target.name,
        "conversations": str(conversations),
        "fingerprint": inputs,
        "rows": account.rows,
        "kept": account.kept,
        "refused": account.num_refused,
        "refused_by_reason": account.refused,
        "cut": account.cut,
        "train": prompts.splits.count("train"),
        "validation": prompts.splits.count("validation"),
        "tokens": len(prompts.tokens),
        "supervised_tokens": num_supervised,
        "distinct_supervised_tokens": int((vocabulary.counts > 0).sum()),
        **hashes,
        "line": f"{account.rows} rows = {account.kept} kept + {account.num_refused} refused, "
        f"{len(prompts.tokens)} tokens, {num_supervised} supervised",
    }


if __name__ == "__main__":
    main()

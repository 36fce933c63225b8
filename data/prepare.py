"""Stage 1 as a function: a conversation file -> prompts and the counts for a draft vocabulary, in one folder."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from tqdm import tqdm

from data.boundaries import text_config
from data.config import DataConfig, TargetConfig, as_json, finished, fingerprint, typed, write_atomically
from data.conversations import count_rows, read_rows
from data.embedded import ensure_target
from data.fingerprints import chat_template_hash, tokenizer_hash
from data.prompts import NOT_SERVED, PromptSet
from data.tokenizing import Tokenizing, load_tokenizer
from data.vocab import FILE, Vocabulary

CONF = Path(__file__).resolve().parent.parent / "conf"
FORMAT_VERSION = 2  # raise it when the same conversations give other prompts


def prepare(config: DataConfig) -> dict[str, Any]:
    """Writes prompts and vocabulary into `config.out` and returns the summary; what is there already is left.

    Raises ValueError if no row of the file can be used.
    """
    out, conversations = Path(config.out), Path(config.conversations)
    num_rows = count_rows(conversations)
    target = ensure_target(config.target)
    limits = text_config(target)
    context = limits.get("max_position_embeddings")
    hashes = {"tokenizer_hash": tokenizer_hash(target), "chat_template_hash": chat_template_hash(target)}

    options = {key: value for key, value in asdict(config).items() if key not in ("out", "target", "conversations")}
    inputs = fingerprint(FORMAT_VERSION, options, hashes, config.target.name, conversations.name, conversations)
    if done := finished(out, inputs):
        return {**done, "line": f"nothing to do, {out} holds the {done['kept']} prompts of these conversations"}
    (out / "summary.json").unlink(missing_ok=True)  # until the new one is complete, there is none

    tokenizing = Tokenizing(
        load_tokenizer(target, trust_remote_code=config.target.trust_remote_code),
        vocab_size=limits["vocab_size"],
        max_tokens=config.max_tokens or (context - NOT_SERVED if context else sys.maxsize),
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
        unanswered = "no assistant turn" in account.refused
        hint = "; the target answers questions with python extract/main.py mode=generate" if unanswered else ""
        raise ValueError(f"none of {account.rows} rows of {conversations} can be used, see the reasons above{hint}")

    vocabulary = Vocabulary.count(
        prompts, tokenizing.tokenizer, vocab_size=limits["vocab_size"], tokenizer_hash=hashes["tokenizer_hash"]
    )
    for earlier in ("prompts.safetensors", FILE):  # killed, it leaves none, not ids of these and tokens of those
        (out / earlier).unlink(missing_ok=True)
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


def prepare_answers(target: TargetConfig, conversations: Path, out: Path) -> dict[str, Any]:
    """`prepare` with the defaults of conf/data.yaml; leaves a summary.json in `out` as the stage does."""
    yaml = OmegaConf.to_container(OmegaConf.load(CONF / "data.yaml"))
    defaults = {key: value for key, value in yaml.items() if key not in ("defaults", "hydra", "conversations", "out")}
    config = typed(DataConfig, OmegaConf.create({
        **defaults, "target": asdict(target), "conversations": str(conversations), "out": str(out),
    }))  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    summary = {"stage": "data", **prepare(config)}
    write_atomically(out / "summary.json", as_json(summary))
    print(f"data: {summary['line']}", flush=True)
    return summary

"""From an exported drafter's folder to what a server is told about it, after everything that can be checked was."""

from __future__ import annotations

import json
from pathlib import Path

from data.boundaries import LAYER_IDS, architecture_of, engine_layer_ids, text_config
from data.config import TargetConfig
from extract.command import Drafting
from train.export import check_export


def checked_drafting(
    drafter: Path, *, target: TargetConfig, target_path: Path, num_drafts: int | None, engine_version: str
) -> Drafting:
    """How to serve `drafter` with this target on this SGLang.

    num_drafts  drafts a step; None: as many depths as it was trained for

    Raises ValueError if a key or shape does not fit, the drafter belongs to another target, or its layer ids
    mean other boundaries to this SGLang than those it was trained at.
    """
    config = check_export(drafter)
    trained = config["eyas"]
    if trained["target"] != target.name:
        raise ValueError(f"{drafter} was trained for {trained['target']}, this run serves {target.name}: set target=")
    if trained["engine"] != "sglang":
        raise ValueError(f"{drafter} was exported for {trained['engine']}: export its checkpoint again with engine=sglang")
    sizes = text_config(target_path)
    for key in ("hidden_size", "vocab_size"):
        if config[key] != sizes[key]:
            raise ValueError(
                f"{drafter} has {key} {config[key]}, the target in {target_path} has {sizes[key]}: another model stands "
                f"there under the name {target.name}"
            )
    found = config["eagle_config"][LAYER_IDS]
    expected = engine_layer_ids(
        trained["boundaries"],
        architecture=architecture_of(target_path),
        engine="sglang",
        engine_version=engine_version,
        num_layers=sizes["num_hidden_layers"],
    )
    if found != expected:
        raise ValueError(
            f"{drafter} was trained at boundaries {trained['boundaries']}, which SGLang {engine_version} is told by "
            f"layer ids {expected}; its config.json says {found}: export the checkpoint again with "
            f"engine_version={engine_version}"
        )
    return Drafting(
        path=drafter.resolve(), num_steps=num_drafts or trained["depths"], unquantized=_is_quantized(target_path)
    )


def _is_quantized(target_path: Path) -> bool:
    config = json.loads((target_path / "config.json").read_text())
    return "quantization_config" in config or "quantization_config" in text_config(target_path)

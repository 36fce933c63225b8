"""What a run starts from: random weights and a map made from its shards' tokens, or a published drafter with its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from data.boundaries import LAYER_IDS, architecture_of, engine_layer_ids, text_config
from data.storage import local_folder
from data.vocab import Vocabulary, draft_vocabulary
from train.checkpoint import load_weights
from train.config import TrainConfig
from train.export import trained_name
from train.layers import Rotary
from train.model import Drafter
from train.shape import DrafterShape, rope_scaling_of
from train.target import Target

# What the tensors' shapes do not tell
SETTINGS = ("rope_theta", "rms_norm_eps", "head_dim", "num_attention_heads", "num_key_value_heads")
ENGINES = {"sglang": "0.5.23", "vllm": "0.11"}  # whose layer ids a published drafter may name
SWITCHES = ("fc_norm", "norm_before_fc", "norm_output")  # absent means off


def first_drafter(config: TrainConfig, shape: DrafterShape, *, target: Target, target_path: Path) -> Drafter:
    """The drafter of step 0, of the shape that `config` resolves to."""
    if config.init_from is not None:
        return published_drafter(
            Path(config.init_from), shape, boundaries=config.target.boundaries, target_path=target_path
        )
    vocabulary = Vocabulary.load(local_folder(config.shards))
    d2t, t2d = draft_vocabulary(vocabulary.counts, size=shape.draft_vocab_size, special_ids=vocabulary.special_ids)
    drafter = Drafter(shape, d2t=d2t, t2d=t2d)
    drafter.initialize(
        target, std=config.drafter.init_std, head_from_target=config.drafter.init_head_from_target, seed=config.seed
    )
    return drafter


def published_drafter(folder: Path, shape: DrafterShape, *, boundaries: list[int], target_path: Path) -> Drafter:
    """The drafter in `folder`, in the format that SGLang or vLLM serves, in float32 and with its own vocabulary map.

    Raises ValueError where it is not the drafter that this run describes: both shapes, or both settings.
    """
    config, tensors = _read(folder)
    _check_settings(config, shape, where=folder)
    drafter = Drafter(
        shape,
        d2t=torch.zeros(shape.draft_vocab_size, dtype=torch.int64),
        t2d=torch.zeros(shape.vocab_size, dtype=torch.bool),
    )
    if "d2t" not in tensors and shape.draft_vocab_size < shape.vocab_size:
        raise ValueError(
            f"{folder} has no d2t: without its vocabulary map its head means nothing, and no other one fits"
        )
    found = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    found.setdefault("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))  # it says every token
    target_ids = found["d2t"].long() + torch.arange(found["d2t"].shape[0])
    _check_map(target_ids, found.get("t2d"), vocab_size=shape.vocab_size, where=folder)
    found.setdefault("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill_(0, target_ids, True))
    load_weights(drafter, found, where=folder)
    _check_boundaries(config, boundaries, target_path=target_path, where=folder)
    return drafter


def _read(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    """Its config.json, and its tensors under training's names, without the target's embedding, which some carry."""
    files = sorted(folder.glob("*.safetensors"))
    try:
        config = json.loads((folder / "config.json").read_text())
        tensors = {trained_name(name): tensor for file in files for name, tensor in load_file(file).items()}
        if not isinstance(config, dict):
            raise ValueError("config.json is not a JSON object")
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"init_from={folder} is no drafter ({error}): give a folder as SGLang serves it") from error
    if not files:
        raise ValueError(f"init_from={folder} has no .safetensors file: convert the drafter's weights first")
    return config, {name: tensor for name, tensor in tensors.items() if not name.endswith("embed_tokens.weight")}


def _check_map(target_ids: Tensor, t2d: Tensor | None, *, vocab_size: int, where: Path) -> None:
    """As the export at the end of the run will: the order is free, the tokens are not."""
    named = target_ids.sort().values
    valid = bool(((0 <= named) & (named < vocab_size)).all()) and bool((named.diff() > 0).all())
    if not valid or (t2d is not None and not torch.equal(named, t2d.nonzero().flatten())):
        raise ValueError(
            f"init_from={where}: d2t and t2d do not name the same tokens below {vocab_size}, each of them once: d2t must "
            "hold offsets (target id = i + d2t[i])"
        )


def _check_settings(config: dict, shape: DrafterShape, *, where: Path) -> None:
    mine = shape.as_dict()
    found = {name: config[name] for name in SETTINGS if config.get(name) is not None}
    found |= {name: bool(config.get(name, False)) for name in SWITCHES}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # Transformers 5 writes the first
    found |= {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    wrong = [f"{name} is {value} there, {mine[name]} here" for name, value in found.items() if value != mine[name]]
    scaling = rope_scaling_of(config)
    if not _same_rope(config, scaling, shape):
        wrong.append(f"rope_scaling is {scaling} there, {shape.rope_scaling} here (drafter.inherit_rope_scaling)")
    if wrong:
        raise ValueError(f"init_from={where} is another drafter: {'; '.join(wrong)}: set drafter.* as it has them")


def _same_rope(config: dict, scaling: dict, shape: DrafterShape) -> bool:
    """It is said in many ways: what counts is what comes of it. mrope's three positions of a token are one in text."""
    scaling = {} if "mrope" in (scaling.get("rope_type"), scaling.get("type")) else scaling
    longest = config.get("max_position_embeddings", shape.max_position_embeddings)
    try:
        there = Rotary(replace(shape, rope_scaling=scaling, max_position_embeddings=longest))
    except ValueError:  # of a kind that is not known here
        return False
    here = Rotary(shape)
    return there.scale == here.scale and torch.equal(there.frequencies, here.frequencies)


def _check_boundaries(config: dict, boundaries: list[int], *, target_path: Path, where: Path) -> None:
    """Off by one costs half of what it learned. Exports of Eyas name the boundaries, others an engine's layer ids."""
    captured = config.get("eyas", {}).get("boundaries")
    if captured is not None and list(captured) != list(boundaries):
        raise ValueError(
            f"init_from={where}: its boundaries are {captured} there, {list(boundaries)} here: set "
            f"target.boundaries={str(list(captured)).replace(' ', '')}, with shards to match"
        )
    ids = config.get("eagle_config", {}).get(LAYER_IDS)
    if captured is not None or ids is None:
        return
    architecture, num_layers = architecture_of(target_path), text_config(target_path)["num_hidden_layers"]
    expected = {
        engine: engine_layer_ids(
            boundaries, architecture=architecture, engine=engine, engine_version=version, num_layers=num_layers
        )
        for engine, version in ENGINES.items()
    }
    if list(ids) not in expected.values():
        named = ", ".join(f"{found} in {engine}" for engine, found in expected.items())
        raise ValueError(
            f"init_from={where} was made for layer ids {list(ids)}; boundaries {list(boundaries)} are {named}: set "
            "target.boundaries to what it was trained at, with shards to match"
        )

"""Export: a checkpoint of a run becomes the folder that SGLang or vLLM serves.

    python train/export.py target=smollm2_135m checkpoint=RUN/checkpoints/step-000519 out=DIR [engine=vllm]

Also run at the end of training. The servers drop names they do not know without a word, and read null as
a value: so every key and every shape is checked here, both ways, before and after the folder is written.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import json
import shutil

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from data.boundaries import LAYER_IDS, architecture_of, engine_layer_ids, text_config
from data.config import stage
from data.embedded import ensure_target
from train.checkpoint import check_fit, read_served, read_state, save_tensors
from train.config import ExportConfig
from train.model import Drafter
from train.shape import DrafterShape

ARCHITECTURE = "LlamaForCausalLMEagle3"
WRITTEN = {"config.json", "model.safetensors", "summary.json"}  # in an exported folder


def export(
    weights: dict[str, Tensor],
    *,
    shape: DrafterShape,
    boundaries: list[int],
    depths: int,
    target_name: str,
    target_path: Path,
    out: Path,
    engine: str,
    engine_version: str,
) -> dict:
    """Write config.json and model.safetensors (bf16) to `out`; returns the config.

    weights  the state dict of a Drafter of this shape. Raises ValueError when it is not, when the engine
    cannot be told these boundaries, or when `out` holds what no export wrote: it is replaced as a whole.
    """
    _check(weights, shape, where="the checkpoint")
    check_replaceable(out, engine=engine)
    ids = layer_ids(boundaries, target_path, engine=engine, engine_version=engine_version)
    config = _config(shape, text_config(target_path), layer_ids=ids, engine=engine)
    config["eyas"] = {"boundaries": list(boundaries), "depths": depths, "target": target_name, "engine": engine}
    partial = out.with_name(f".partial-{out.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        tensors = {
            _served_name(name, engine): tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            for name, tensor in weights.items()
        }
        save_tensors(
            {n: t.cpu().contiguous() for n, t in tensors.items()}, partial / "model.safetensors", {"format": "pt"}
        )
        (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ValueError(
            f"could not write {out}: {error}: free some space and export again, the checkpoint is safe"
        ) from error
    check_export(partial)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)
    return config


def check_replaceable(out: Path, *, engine: str) -> None:
    """Raises ValueError when `out` holds what no export wrote, or an export for another engine."""
    others = sorted({path.name for path in out.iterdir()} - WRITTEN) if out.exists() else []
    if others:
        raise ValueError(
            f"{out} holds {', '.join(others[:3])}, and an export replaces all of it: move that, or choose another out="
        )
    try:
        found = json.loads((out / "config.json").read_text())["eyas"]["engine"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if found != engine:
        raise ValueError(f"{out} holds an export for {found}, which one for {engine} would replace: choose another out=")


def layer_ids(boundaries: list[int], target_path: Path, *, engine: str, engine_version: str) -> list[int]:
    """What the engine is told. Raises ValueError when it cannot serve a drafter of these boundaries."""
    if engine == "sglang" and len(boundaries) == 1:
        raise ValueError(
            f"boundaries {boundaries}: SGLang projects features that are wider than the target's hidden size, so a drafter "
            "of a single boundary would be served without its fc: set target.boundaries to two or more"
        )
    return engine_layer_ids(
        boundaries,
        architecture=architecture_of(target_path),
        engine=engine,
        engine_version=engine_version,
        num_layers=text_config(target_path)["num_hidden_layers"],
    )


def load_drafter(folder: Path) -> tuple[Drafter, dict]:
    """An exported drafter as a module in float32, and its config.

    Raises ValueError when a key is missing or unknown, a shape does not fit, or the folder is no drafter.
    """
    config = check_export(folder)
    shape = _shape(config, folder)
    tensors = {trained_name(n): t for n, t in load_file(folder / "model.safetensors").items()}
    drafter = Drafter(shape, d2t=tensors["d2t"], t2d=tensors["t2d"])
    drafter.load_state_dict({n: t.float() if t.is_floating_point() else t for n, t in tensors.items()})
    return drafter, config


def check_export(folder: Path) -> dict:
    """The folder's config.json, after every key, shape and id was checked. Raises ValueError naming what is wrong."""
    try:
        config = json.loads((folder / "config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError("config.json is not a JSON object")
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            shapes = {trained_name(name): file.get_slice(name).get_shape() for name in file.keys()}
            d2t = file.get_tensor("d2t") if "d2t" in file.keys() else None
            t2d = file.get_tensor("t2d") if "t2d" in file.keys() else None
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"{folder} is no exported drafter ({error}): give a folder that train/export.py wrote"
        ) from error
    nulls = [key for key, value in config.items() if value is None]
    if nulls:
        raise ValueError(f"{folder}/config.json has null for {nulls}: servers take null as a value; export again")
    if config.get("architectures") != [ARCHITECTURE]:
        raise ValueError(
            f"{folder}/config.json names architectures {config.get('architectures')}, expected [{ARCHITECTURE}]"
        )
    if "eyas" not in config:
        raise ValueError(
            f"{folder}/config.json has no section eyas: it does not say which boundaries the drafter was trained at"
        )
    told = config["eyas"] | (config.get("eagle_config") or {})
    missing = [key for key in ("boundaries", "depths", "target", "engine", LAYER_IDS) if key not in told]
    if missing:
        raise ValueError(f"{folder}/config.json has no {', '.join(missing)} in eyas or eagle_config: export the checkpoint again")
    shape = _shape(config, folder)
    _check({name: torch.empty(size, device="meta") for name, size in shapes.items()}, shape, where=str(folder))
    target_ids = d2t + torch.arange(shape.draft_vocab_size)
    if not torch.equal(target_ids.sort().values, t2d.nonzero().flatten()):  # in any order
        raise ValueError(f"{folder}: d2t and t2d name different tokens: d2t must hold offsets (target id = i + d2t[i])")
    return config


def _check(weights: dict[str, Tensor], shape: DrafterShape, *, where: str) -> None:
    with torch.device("meta"):
        expected = Drafter(
            shape, d2t=torch.empty(shape.draft_vocab_size), t2d=torch.empty(shape.vocab_size)
        ).state_dict()
    check_fit(weights, expected, where=where)


def _served_name(name: str, engine: str) -> str:
    return name.replace("midlayer.", "layers.0.") if engine == "vllm" else name


def trained_name(name: str) -> str:
    """A parameter's name in training, from its name in an exported folder."""
    return name.replace("layers.0.", "midlayer.")


def _config(shape: DrafterShape, target: dict, *, layer_ids: list[int], engine: str) -> dict:
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "num_aux_hidden_states": shape.num_boundaries,
        "fc_norm": shape.fc_norm,
        "norm_before_fc": shape.norm_before_fc,
        "norm_output": shape.norm_output,
        "eagle_config": {
            LAYER_IDS: layer_ids,
            "use_aux_hidden_state": True,
            "norm_before_fc": shape.norm_before_fc,
        },
    }
    if shape.rope_scaling:
        config["rope_scaling"] = shape.rope_scaling
    if engine == "vllm":  # which looks beside eagle_config, not into it
        config[LAYER_IDS] = layer_ids
    for key in ("bos_token_id", "eos_token_id"):
        if target.get(key) is not None:
            config[key] = target[key]
    return config


def _shape(config: dict, folder: Path) -> DrafterShape:
    try:
        return DrafterShape(
            num_boundaries=config["num_aux_hidden_states"],
            rope_scaling=config.get("rope_scaling", {}),
            **{
                key: config[key]
                for key in DrafterShape.__dataclass_fields__
                if key not in ("num_boundaries", "rope_scaling")
            },
        )
    except KeyError as error:
        raise ValueError(f"{folder}/config.json lacks {error}: export the checkpoint again") from error


@stage("export")
def main(config: ExportConfig) -> dict:
    checkpoint, target_path = Path(config.checkpoint), ensure_target(config.target)
    state = read_state(checkpoint)
    if state.target != config.target.name:
        raise ValueError(
            f"{checkpoint} was trained for {state.target}, not {config.target.name}: set target={state.target}"
        )
    written = export(
        read_served(checkpoint),
        shape=DrafterShape(**state.shape),
        boundaries=state.boundaries,
        depths=state.depths,
        target_name=state.target,
        target_path=target_path,
        out=Path(config.out),
        engine=config.engine,
        engine_version=config.engine_version,
    )
    ids = written["eagle_config"][LAYER_IDS]
    return {
        "step": state.step,
        "boundaries": state.boundaries,
        "engine": config.engine,
        "engine_ids": ids,
        "line": f"step {state.step}, boundaries {state.boundaries}, {config.engine} layer ids {ids}",
    }


if __name__ == "__main__":
    main()

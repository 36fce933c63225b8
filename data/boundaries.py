"""Boundaries: the one convention for layers, and its translation into engine layer ids.

Boundary b is the residual stream after b decoder blocks, 0 <= b <= num_layers. For b < num_layers it
equals Hugging Face's `hidden_states[b]`. Standard library only: runs in any engine's environment.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Sequence

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"  # what SGLang and vLLM call them in a drafter's config.json
# Architectures whose SGLang class takes DeepSeek-V2's `set_eagle3_layers_to_capture`, or an equal copy.
DEEPSEEK_FAMILY = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "MistralLarge3ForCausalLM",
        "GlmMoeDsaForCausalLM",
        "Glm4MoeLiteForCausalLM",
    }
)
# sgl-project/sglang#25454: add 1 only where the first id is 1. Absent in 0.5.12.post1, in since this one.
DEEPSEEK_IDS_AS_IS = (0, 5, 13)


def default_boundaries(num_layers: int) -> list[int]:
    """[2, N // 2, N - 3], the field's choice: early, middle, late.

    Raises ValueError below 7 layers, where these three are not ascending.
    """
    if num_layers < 7:
        raise ValueError(f"a target of {num_layers} layers has no default boundaries: set target.boundaries")
    return [2, num_layers // 2, num_layers - 3]


def check_boundaries(boundaries: Sequence[int], num_layers: int) -> None:
    """Raises ValueError unless `boundaries` ascend strictly within 0 .. num_layers."""
    ascending = all(a < b for a, b in zip(boundaries, boundaries[1:]))
    if not boundaries or not ascending or boundaries[0] < 0 or boundaries[-1] > num_layers:
        raise ValueError(
            f"boundaries {list(boundaries)} do not fit a target of {num_layers} layers: expected ascending numbers "
            f"within 0 .. {num_layers}; set target.boundaries"
        )


def engine_layer_ids(
    boundaries: Sequence[int], *, architecture: str, engine: str, engine_version: str, num_layers: int | None = None
) -> list[int]:
    """What an engine must be told (config key LAYER_IDS) to capture `boundaries`.

    architecture    the target's, as in its config.json
    engine          sglang | vllm
    engine_version  like 0.5.23
    num_layers      of the target, where known: the last boundary can then be refused by name

    Raises ValueError for a boundary that this engine cannot be asked for.
    Source: `set_eagle3_layers_to_capture` in sglang/srt/models (llama, qwen*, deepseek_v2, ...), read at
    0.5.12 to 0.5.23; vLLM's `set_aux_hidden_state_layers`. Nothing trusts this table: see the wiring probe.
    """
    if engine == "vllm":
        return list(boundaries)  # vLLM counts as Eyas does
    if engine != "sglang":
        raise ValueError(f"engine={engine}: expected sglang or vllm")
    if num_layers is not None and num_layers in boundaries:
        raise ValueError(
            f"SGLang captures before a block, so boundary {num_layers} (after the last block) cannot be asked for: "
            f"set target.boundaries below {num_layers}"
        )
    if boundaries[0] == 0:
        raise ValueError("SGLang cannot be asked for boundary 0 (the embedding): set target.boundaries from 1")
    if architecture in DEEPSEEK_FAMILY and _version(engine_version) >= DEEPSEEK_IDS_AS_IS:
        if boundaries[0] == 1:
            raise ValueError(
                f"SGLang {engine_version} reads a first layer id of 1 as boundary 2 for {architecture}, so a first "
                f"boundary of 1 cannot be said: set target.boundaries from 2"
            )
        return list(boundaries)
    return [boundary - 1 for boundary in boundaries]  # the engine adds 1


def text_config(path: Path | str) -> dict[str, Any]:
    """The target's config.json as a dict; for a multimodal target the part of its language model.

    Raises ValueError if the file is missing, is not JSON, or names no number of layers.
    """
    config = _read_config(path)
    for key in ("text_config", "llm_config", "language_config"):
        if "num_hidden_layers" not in config and isinstance(config.get(key), dict):
            config = config[key]
    for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if not isinstance(config.get(key), int):
            raise ValueError(f"{Path(path) / 'config.json'} has no {key}: is this the Hugging Face folder of a target?")
    return config


def logits_factor(config: dict[str, Any]) -> float:
    """What a target multiplies the product of its head with (Cohere, Granite), from its config.json; 1 for most."""
    return (config.get("logit_scale") or 1.0) / (config.get("logits_scaling") or 1.0)


def logits_cap(config: dict[str, Any]) -> float | None:
    """The bound that a target's logits are bent to (Gemma): cap * tanh(logits / cap); None for most."""
    cap = config.get("final_logit_softcapping")
    return cap if cap and cap > 0 else None  # as SGLang reads it


def architecture_of(path: Path | str) -> str:
    """The target's architecture, like LlamaForCausalLM; the outer one of a multimodal target."""
    names = _read_config(path).get("architectures")
    if not names:
        raise ValueError(f"{Path(path) / 'config.json'} names no architectures: is this the folder of a target?")
    return names[0]


def _read_config(path: Path | str) -> dict[str, Any]:
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"{file} is missing: set target.path to the Hugging Face folder of the target") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error}): download the target again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not a JSON object: download the target again")
    return config


def _version(text: str) -> tuple[int, ...]:
    """(0, 5, 13) for 0.5.13.post1; a development build without numbers counts as newest."""
    numbers = re.match(r"v?(\d+(?:\.\d+)*)", text)
    return tuple(int(n) for n in numbers[1].split(".")) if numbers else (10**6,)

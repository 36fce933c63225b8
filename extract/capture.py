"""What is captured, and the Hugging Face reference it is checked against: the same states from another program."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from safetensors import safe_open
from torch import Tensor

from data.boundaries import logits_cap, logits_factor, text_config
from data.codecs import TeacherHead

MEMORY_SHARE = 0.6  # of the free memory, that the reference's weights may take


@dataclass(frozen=True)
class Captured:
    """One token sequence as the server saw it.

    tokens [T] int32   aux [T, A, H] at the boundaries, in the server's dtype
    last [T, H]        after the final norm; None for what a drafter is fed
    next_token         the server's own greedy choice after the sequence; None where it was not asked
    """

    tokens: Tensor
    aux: Tensor
    last: Tensor | None
    next_token: int | None = None


@dataclass(frozen=True)
class States:
    """One token sequence as the reference computes it.

    residual  boundary -> [T, H] the residual stream there, before any norm
    last      [T, H] after the final norm
    """

    residual: dict[int, Tensor]
    last: Tensor


class Reference:
    """The target in Hugging Face transformers, by default on the CPU in float32.

    Raises ValueError if transformers cannot load it.
    """

    def __init__(
        self,
        target: Path,
        *,
        trust_remote_code: bool = False,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        from data.hugging_face import transformers

        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                target, dtype=dtype, trust_remote_code=trust_remote_code
            )
        except (ValueError, OSError, ImportError, KeyError, AttributeError) as error:
            raise ValueError(
                f"transformers cannot load {target} as a reference ({error}): set probe.reference=off to go without"
            ) from error
        self._model, self._device = model.eval().to(device), device
        decoder = model.get_decoder()
        self._body, self._norm = decoder, decoder.norm
        self.num_layers = len(decoder.layers)
        self.head = model.get_output_embeddings().weight.detach()  # [V, H]

    @torch.no_grad()
    def states(self, tokens: Tensor) -> States:
        """tokens [T] -> the residual stream at every boundary 0 .. num_layers, and last."""
        before_norm: list[Tensor] = []
        hook = self._norm.register_forward_pre_hook(lambda module, inputs: before_norm.append(inputs[0][0]))
        try:
            output = self._body(tokens.long()[None].to(self._device), output_hidden_states=True, use_cache=False)
        finally:
            hook.remove()
        # hidden_states[b] is boundary b, but for the last: that one is normed
        residual = {boundary: output.hidden_states[boundary][0] for boundary in range(self.num_layers)}
        residual[self.num_layers] = before_norm[-1]
        return States(residual=residual, last=output.last_hidden_state[0])


def reference_fits(target: Path) -> bool:
    """Whether the target's weights in float32 take less than MEMORY_SHARE of the free memory."""
    num_elements = 0
    for file in target.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():
                part = weights.get_slice(name)
                count = 1
                for size in part.get_shape():
                    count *= size
                num_elements += count * (8 if part.get_dtype() in ("I32", "U32") else 1)  # 8 packed 4-bit weights
    return num_elements * 4 < MEMORY_SHARE * psutil.virtual_memory().available


def head_weight(target: Path) -> Tensor:
    """The target's output head [V, H], as it is on disk, times its logits' factor; the embedding where they are tied.

    Raises ValueError if the checkpoint has neither.
    """
    files, config = _weight_files(target), text_config(target)
    suffixes, factor = ["lm_head.weight"], logits_factor(config)
    if config.get("tie_word_embeddings") or not any(name.endswith(suffixes[0]) for name in files):
        suffixes = ["embed_tokens.weight"]
    for name, file in files.items():
        if name.endswith(suffixes[0]):
            with safe_open(file, framework="pt") as weights:
                head = weights.get_tensor(name)
            return head if factor == 1.0 else (head.float() * factor).to(head.dtype)
    raise ValueError(f"{target} has no {suffixes[0]} in its safetensors: download the target again")


def teacher_head(target: Path, *, device: str) -> TeacherHead:
    """The target's head with the cap of its logits. device: auto | cpu | cuda

    Raises ValueError as `head_weight` and TeacherHead do, torch.OutOfMemoryError if it does not fit.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return TeacherHead(head_weight(target), device=device, cap=logits_cap(text_config(target)))


def _weight_files(target: Path) -> dict[str, Path]:
    """Name of every weight -> the file that holds it."""
    index = target / "model.safetensors.index.json"
    if index.exists():
        return {name: target / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    names = {}
    for file in sorted(target.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            names |= dict.fromkeys(weights.keys(), file)
    return names

"""The target's embedding, final norm and head, read straight from its safetensors files.

Nothing else of the target is needed to train a drafter, so nothing else is loaded: 2 x 2.3 GB for
Kimi-K2.5 in place of 600 GB. The names are found by their endings, because wrappers prefix them
(`language_model.model.embed_tokens.weight`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from data.boundaries import logits_cap, logits_factor, text_config
from data.schema import Provenance, check_same
from data.shards import ShardReader

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Target:
    """The frozen ends of a target LLM.

    embedding   [vocab, H]  input embedding
    final_norm  [H]         weight of the norm in front of the head
    head        [vocab, H]  output projection, times what the target multiplies its logits with (Cohere, Granite); the
                            embedding itself when the two are tied and there is no such factor
    config      dict        the (text part of the) target's config.json
    """

    embedding: Tensor
    final_norm: Tensor
    head: Tensor
    config: dict

    @property
    def vocab_size(self) -> int:
        return self.head.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.head.shape[1]

    @property
    def logits_cap(self) -> float | None:
        """See data/boundaries.py."""
        return logits_cap(self.config)

    @classmethod
    def load(cls, path: Path | str, *, device: torch.device | str, dtype: torch.dtype) -> Target:
        """Read the three tensors from the Hugging Face folder `path`.

        Raises ValueError when a tensor is missing, stored quantized or of an unexpected shape.
        """
        path = Path(path)
        config = text_config(path)
        files = _files_by_tensor(path)
        embedding = _read(path, files, _find(files, EMBEDDING, path))
        final_norm = _read(path, files, _find_final_norm(files, path))
        tied = not any(_is(name, HEAD) for name in files)
        if tied and config.get("tie_word_embeddings") is False:
            raise ValueError(f"{path} has no {HEAD}, and its config says that head and embedding are not tied")
        head = embedding if tied else _read(path, files, _find(files, HEAD, path))
        shape = (config["vocab_size"], config["hidden_size"])
        for name, tensor in (("embedding", embedding), ("head", head)):
            # Some targets pad their tables beyond vocab_size; fewer rows can only be a wrong file.
            if tensor.dim() != 2 or tensor.shape[0] < shape[0] or tensor.shape[1] != shape[1]:
                raise ValueError(f"{path}: the {name} is {list(tensor.shape)}, its config says {list(shape)}")
        factor = logits_factor(config)
        if factor != 1.0:
            head, tied = head.float() * factor, False
        embedding, final_norm, head = (
            tensor.to(device=device, dtype=dtype) for tensor in (embedding[: shape[0]], final_norm, head[: shape[0]])
        )
        return cls(embedding=embedding, final_norm=final_norm, head=embedding if tied else head, config=config)


def check_shards(
    reader: ShardReader, target_path: Path, *, name: str, boundaries: list[int], cure: str | None = None
) -> None:
    """Raises ValueError unless the shards were captured from this target, at these boundaries."""
    found = reader.provenance
    expected = Provenance.of_target(
        target_path,
        name=name,
        boundaries=boundaries,
        codec=found.codec,
        engine=found.engine,
        engine_version=found.engine_version,
    )
    check_same(found, expected, where=str(reader.path), cure=cure)


def _files_by_tensor(path: Path) -> dict[str, str]:
    """Tensor name -> file name, for single-file and sharded checkpoints."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        return json.loads(index.read_text())["weight_map"]
    single = path / "model.safetensors"
    if not single.exists():
        raise ValueError(
            f"{path} holds neither {single.name} nor {index.name}: point target.path at a safetensors model"
        )
    with safe_open(single, framework="pt") as file:
        return {name: single.name for name in file.keys()}


def _is(name: str, ending: str) -> bool:
    return name == ending or name.endswith("." + ending)


def _find(files: dict[str, str], ending: str, path: Path) -> str:
    """The one tensor of the language model with this ending: vision towers have embeddings too."""
    found = [name for name in files if _is(name, ending) and "vision" not in name and ".layers." not in name]
    if len(found) != 1:
        raise ValueError(f"{path}: expected one tensor that ends in {ending}, found {sorted(found) or 'none'}")
    return found[0]


def _find_final_norm(files: dict[str, str], path: Path) -> str:
    """The norm beside the embedding: `model.norm.weight` beside `model.embed_tokens.weight`."""
    name = _find(files, EMBEDDING, path).removesuffix(EMBEDDING) + "norm.weight"
    if name not in files:
        raise ValueError(f"{path}: no {name}: this architecture names its final norm differently")
    return name


def _read(path: Path, files: dict[str, str], name: str) -> Tensor:
    try:
        with safe_open(path / files[name], framework="pt") as file:
            tensor = file.get_tensor(name)
    except (OSError, KeyError) as error:
        raise ValueError(f"{path / files[name]}: cannot read {name} ({error}): download the target again") from error
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ValueError(f"{path}: {name} is stored as {tensor.dtype}: Eyas needs an unquantized embedding and head")
    return tensor

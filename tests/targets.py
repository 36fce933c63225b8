"""Tiny targets for tests, a target and a drafter whose acceptance is known by construction, and servers for them."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from data.boundaries import architecture_of, engine_layer_ids
from data.config import TargetConfig, typed
from data.embedded import ensure_target
from extract.command import Capturing, Drafting
from extract.config import EngineConfig, ServerConfig
from extract.server import Server
from tests.warm import warm_python

ROOT = Path(__file__).resolve().parent.parent
SGLANG_VERSION = importlib.metadata.version("sglang")  # 0.5.23, unless PYTHONPATH has another: see docs/extraction.md
VOCAB, HIDDEN = 512, 128


def tiny_target(name: str, folder: Path, **changes: Any) -> TargetConfig:
    """conf/target/<name>.yaml, made below `folder`."""
    yaml = OmegaConf.load(ROOT / "conf/target" / f"{name}.yaml")
    config = typed(TargetConfig, OmegaConf.merge(yaml, {"path": str(folder / name), **changes}))
    ensure_target(config)
    return config


def engine_config(**changes: Any) -> EngineConfig:
    return typed(EngineConfig, OmegaConf.merge(OmegaConf.load(ROOT / "conf/engine/sglang.yaml"), changes))


def server_config(**changes: Any) -> ServerConfig:
    return typed(ServerConfig, OmegaConf.merge(OmegaConf.load(ROOT / "conf/server/local.yaml"), changes))


def layer_ids(target: Path, boundaries: list[int]) -> list[int]:
    return engine_layer_ids(
        boundaries, architecture=architecture_of(target), engine="sglang", engine_version=SGLANG_VERSION
    )


def serve(
    target: Path,
    out: Path,
    *,
    boundaries: list[int] | None = None,
    drafter: Path | None = None,
    num_steps: int = 3,
    feed: bool = False,
    warm: bool = True,
    **engine: Any,
) -> Server:
    """A real server for `with`: capturing at `boundaries`, or drafting, or recording what the drafter is fed.

    warm  forked from a process that has SGLang imported, see tests/warm.py: same server, not started as users do
    """
    if warm:
        engine = {"python": warm_python(), "device": "cpu", **engine}
    capturing = None
    if boundaries or feed:
        capturing = Capturing(out / "spool", layer_ids(target, boundaries) if boundaries else None, feed=feed)
    return Server(
        target,
        engine=engine_config(**{"max_total_tokens": 4096, **engine}),
        config=server_config(ready_timeout_seconds=300),
        out=out,
        capturing=capturing,
        drafting=Drafting(drafter, num_steps) if drafter else None,
    )


# ---- the constructed pair -----------------------------------------------------------------------


@dataclass(frozen=True)
class KnownPair:
    """A target that computes `following` and a drafter that always proposes `following(following(token))`.

    Neither attends to anything: the target's residual stream is the embedding E of the token at every
    boundary, the drafter's feature is E of the token two before the one it predicts, at every depth.
    So where the continuation stands still every draft is right, and where it alternates between two
    tokens the first draft is right and the second is not.
    """

    target: Path
    drafter: Path
    boundaries: tuple[int, ...] = (2, 3, 5)
    prompts: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("stands still", (300, 17, 45, 8)),  # 8 -> 8 -> 8: all drafts right
        ("alternates", (301, 90, 10)),  # 10 -> 14 -> 10: one draft right
    )

    def continuation(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        """The target's greedy answer, by hand."""
        tokens = [following(prompt[-1])]
        while len(tokens) < num_tokens:
            tokens.append(following(tokens[-1]))
        return tokens

    def tokens_per_step(self, name: str, num_steps: int) -> int:
        """What every verified step advances by: the accepted drafts and the target's own token."""
        return {"stands still": num_steps + 1, "alternates": 2}[name]


def following(token: int) -> int:
    """Odd tokens are followed by the next even one; multiples of 4 by themselves; 8n+2 and 8n+6 by one another."""
    if token % 2:
        return (token + 1) % VOCAB
    if token % 4 == 0:
        return token
    return token + 4 if token % 8 == 2 else token - 4


def known_pair(folder: Path) -> KnownPair:
    """Makes the pair below `folder`, from the tiny Llama."""
    base = Path(tiny_target("tiny_llama", folder).path)
    target, drafter = folder / "known-target", folder / "known-drafter"
    shutil.copytree(base, target)
    generator = torch.Generator().manual_seed(0)
    embedding = torch.nn.functional.normalize(torch.randn(VOCAB, HIDDEN, generator=generator), dim=-1)
    head, head_after_next = torch.zeros(VOCAB, HIDDEN), torch.zeros(VOCAB, HIDDEN)
    for token in range(VOCAB):
        head[following(token)] += embedding[token]
        head_after_next[following(following(token))] += embedding[token]
    weights = load_file(target / "model.safetensors")
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()
        elif "norm" in name:
            weight.fill_(1.0)
    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = embedding.clone(), head
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    weights = _drafter_weights(generator)
    weights["midlayer.self_attn.o_proj.weight"].zero_()
    weights["midlayer.mlp.down_proj.weight"].zero_()
    weights["fc.weight"] = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, 2 * HIDDEN)], dim=1)
    weights["lm_head.weight"] = head_after_next[::2].clone()  # all continuations are even
    pair = KnownPair(target=target, drafter=drafter)
    write_drafter(drafter, weights, layer_ids=layer_ids(target, list(pair.boundaries)))
    return pair


def random_drafter(folder: Path, *, layer_ids: list[int]) -> Path:
    """A drafter checkpoint for the tiny targets that SGLang loads; its proposals mean nothing."""
    write_drafter(folder, _drafter_weights(torch.Generator().manual_seed(3)), layer_ids=layer_ids)
    return folder


def _drafter_weights(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random weights under the names that SGLang's llama_eagle3.py loads; the draft vocabulary is the even tokens."""
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.05

    weights = {
        "fc.weight": random(HIDDEN, 3 * HIDDEN),
        "lm_head.weight": random(VOCAB // 2, HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "midlayer.self_attn.q_proj.weight": random(128, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": random(64, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": random(64, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": random(HIDDEN, 128),
        "midlayer.mlp.gate_proj.weight": random(256, HIDDEN),
        "midlayer.mlp.up_proj.weight": random(256, HIDDEN),
        "midlayer.mlp.down_proj.weight": random(HIDDEN, 256),
    }
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        weights[f"midlayer.{norm}.weight"] = torch.ones(HIDDEN)
    token_ids = torch.arange(0, VOCAB, 2)
    weights["d2t"] = token_ids - torch.arange(VOCAB // 2)  # an offset
    weights["t2d"] = torch.arange(VOCAB) % 2 == 0
    return weights


def write_drafter(folder: Path, weights: dict[str, torch.Tensor], *, layer_ids: list[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "num_hidden_layers": 1, "vocab_size": VOCAB, "draft_vocab_size": VOCAB // 2, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 2048, "hidden_act": "silu", "tie_word_embeddings": False,
        "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layer_ids, "use_aux_hidden_state": True},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))

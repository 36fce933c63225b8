"""DrafterShape: every size of a drafter, and how the config and the target decide it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from train.config import DrafterConfig


# Of which SGLang makes the frequencies that Transformers makes. Not dynamic: the one has them for the longest context at
# once, the other as positions come. Nor mrope, which counts positions in three ways.
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


def rope_scaling_of(config: dict) -> dict:
    """What a config.json says of rope scaling, but for what is said or derived elsewhere; empty: none."""
    beside = ("rope_theta", "partial_rotary_factor", "attention_factor")
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaling = {name: value for name, value in found.items() if name not in beside}
    return {} if scaling.get("rope_type", scaling.get("type", "default")) == "default" else scaling


@dataclass(frozen=True)
class DrafterShape:
    """Every size of a drafter, resolved: nothing is null, nothing is inherited any more."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_boundaries: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict  # empty: none
    max_position_embeddings: int
    fc_norm: bool
    norm_before_fc: bool
    norm_output: bool

    @classmethod
    def resolve(cls, config: DrafterConfig, target: dict, *, num_boundaries: int) -> DrafterShape:
        """Fill what `config` leaves to the target from `target`, its config.json.

        Raises ValueError when the sizes do not fit together.
        """
        needed = ("num_attention_heads", "intermediate_size", "max_position_embeddings")
        missing = [f"drafter.{name}" for name in needed if not (getattr(config, name) or target.get(name))]
        if missing:
            raise ValueError(f"the target's config.json does not say what to take for {', '.join(missing)}: set it")
        heads = config.num_attention_heads or target["num_attention_heads"]
        rope = target.get("rope_parameters") or {}
        scaling = rope_scaling_of(target) if config.inherit_rope_scaling else {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ROPE_TYPES:
            raise ValueError(
                f"the target's rope scaling is {kind!r}, which servers read differently than training does (they agree on "
                f"{', '.join(ROPE_TYPES)}): set drafter.inherit_rope_scaling=false"
            )
        shape = cls(
            hidden_size=target["hidden_size"],
            intermediate_size=config.intermediate_size or target["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=config.num_key_value_heads or target.get("num_key_value_heads") or heads,
            head_dim=config.head_dim or target.get("head_dim") or target["hidden_size"] // heads,
            num_boundaries=num_boundaries,
            vocab_size=target["vocab_size"],
            draft_vocab_size=config.draft_vocab_size,
            rms_norm_eps=target.get("rms_norm_eps", 1e-6),
            rope_theta=config.rope_theta or target.get("rope_theta") or rope.get("rope_theta", 10000.0),
            rope_scaling=scaling,
            max_position_embeddings=config.max_position_embeddings or target["max_position_embeddings"],
            fc_norm=config.fc_norm,
            norm_before_fc=config.norm_before_fc,
            norm_output=config.norm_output,
        )
        if shape.num_attention_heads % shape.num_key_value_heads:
            raise ValueError(
                f"drafter.num_attention_heads is {shape.num_attention_heads}: it must be a multiple of "
                f"drafter.num_key_value_heads, {shape.num_key_value_heads}"
            )
        if shape.head_dim % 2:
            raise ValueError(f"drafter.head_dim is {shape.head_dim}: rotary embedding needs an even number")
        if shape.draft_vocab_size > shape.vocab_size:
            raise ValueError(
                f"drafter.draft_vocab_size is {shape.draft_vocab_size}, the target's vocabulary has only "
                f"{shape.vocab_size} tokens: set drafter.draft_vocab_size={shape.vocab_size} or less"
            )
        return shape

    def as_dict(self) -> dict:
        return asdict(self)

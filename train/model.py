"""Drafter: the one-layer EAGLE-3 model, its parameters named as the server loads them.

What the server computes (SGLang srt/models/llama_eagle3.py) in training's shapes: a feature is made
from the target's boundaries by `project`, or is the drafter's own output of the depth before; the
layer reads [norm(embedding), norm(feature)] side by side, and the feature itself, un-normed, is the
residual stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint

from data.hugging_face import transformers
from train.config import DrafterConfig
from train.float8 import Float8Matrix, product
from train.target import Target

# attention(query [R, heads, D], key [T, kv_heads, D], value [T, kv_heads, D]) -> [R, heads, D]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


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
        heads = config.num_attention_heads or target["num_attention_heads"]
        rope = target.get("rope_parameters") or {}
        scaling = dict(target.get("rope_scaling") or rope) if config.inherit_rope_scaling else {}
        scaling.pop("rope_theta", None)
        if scaling.get("rope_type", scaling.get("type", "default")) == "default":
            scaling = {}
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
                f"{shape.num_attention_heads} attention heads do not divide by {shape.num_key_value_heads} key-value heads"
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


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32, returned in x's dtype."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (self._unit(x) * self.weight).to(x.dtype)

    def scaled(self, x: Tensor) -> Tensor:
        """Without the weight, for a product whose matrix has it already."""
        return self._unit(x).to(x.dtype)

    def _unit(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)


class Rotary(nn.Module):
    """Rotary embedding computed from positions each time: no table that a dtype or a length could spoil.

    Frequencies and scaling (llama3, yarn, linear, ...) come from transformers' own functions.
    """

    def __init__(self, shape: DrafterShape):
        super().__init__()
        rope_type = shape.rope_scaling.get("rope_type", shape.rope_scaling.get("type", "default"))
        if rope_type == "default":
            exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
            frequencies, self.scale = 1.0 / shape.rope_theta**exponent, 1.0  # rounded as the servers round it
        else:
            config = transformers.PretrainedConfig(
                hidden_size=shape.hidden_size,
                num_attention_heads=shape.num_attention_heads,
                head_dim=shape.head_dim,
                max_position_embeddings=shape.max_position_embeddings,
            )
            config.rope_parameters = {**shape.rope_scaling, "rope_type": rope_type, "rope_theta": shape.rope_theta}
            frequencies, self.scale = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
        self.register_buffer("frequencies", frequencies.to(torch.float32), persistent=False)  # [D/2]

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cosine and sine [T, 1, D/2], float32."""
        angles = positions[:, None].to(self.frequencies.dtype) * self.frequencies.float()
        return (angles.cos() * self.scale)[:, None], (angles.sin() * self.scale)[:, None]


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the halves of every head: x [T, heads, D], cosine and sine [T, 1, D/2]."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return turned.to(x.dtype)


class SelfAttention(nn.Module):
    """Holds the parameters; Drafter.forward multiplies with their copies of lower precision."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)


class MLP(nn.Module):
    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)


class Layer(nn.Module):
    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = SelfAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)


class Matrices(NamedTuple):
    """The layer's matrices in the dtype that products run in, made once a step for all depths.

    Their gradients are summed over the depths before they reach the masters. What reads the token and what
    reads the feature stand apart, the token's with the weight of its norm multiplied in: see `read_tokens`.
    """

    fc: Tensor  # [H, A*H]
    token: Tensor  # [(heads + 2*kv_heads)*D, H], query, key and value from the normed embedding
    query: Tensor  # [heads*D, H], from the normed feature
    key_value: Tensor  # [2*kv_heads*D, H]
    out: Tensor  # [H, heads*D]
    gate: Tensor | Float8Matrix  # [I, H]; apart from `up`, so that their gradients are written where they are read
    up: Tensor | Float8Matrix  # [I, H]
    down: Tensor | Float8Matrix  # [H, I]


class Drafter(nn.Module):
    """One decoder layer over the target's features, and a head over the draft vocabulary.

    d2t  [V]      int64, target id = i + d2t[i]: an offset, as the servers expect
    t2d  [vocab]  bool, True for the target's tokens that the drafter can say
    """

    def __init__(self, shape: DrafterShape, *, d2t: Tensor, t2d: Tensor):
        super().__init__()
        if d2t.shape != (shape.draft_vocab_size,) or t2d.shape != (shape.vocab_size,):
            raise ValueError(
                f"the vocabulary map has d2t {list(d2t.shape)} and t2d {list(t2d.shape)}, "
                f"expected [{shape.draft_vocab_size}] and [{shape.vocab_size}]"
            )
        self.shape = shape
        self.activation_checkpointing = "none"  # mlp | layer: what the backward pass computes again, see TrainConfig
        width = shape.num_boundaries * shape.hidden_size
        if shape.norm_before_fc:
            self.input_norm = RMSNorm(width, shape.rms_norm_eps)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(shape.hidden_size, shape.rms_norm_eps) for _ in range(shape.num_boundaries)
            )
        self.fc = nn.Linear(width, shape.hidden_size, bias=False)
        self.midlayer = Layer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.rotary = Rotary(shape)
        self.register_buffer("d2t", d2t.to(torch.int64))
        self.register_buffer("t2d", t2d.to(torch.bool))

    @property
    def target_ids(self) -> Tensor:
        """[V] int64, the target's id of every draft token."""
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    def matrices(self, dtype: torch.dtype, *, float8: bool = False) -> Matrices:
        """Differentiable copies of the masters in `dtype`; the masters themselves where it is theirs already.

        float8  rounds the MLP's matrices, half of all the work, further
        """
        layer, attention, mlp = self.midlayer, self.midlayer.self_attn, self.midlayer.mlp
        hidden = self.shape.hidden_size
        query, key, value = attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight  # [., 2H]
        token = torch.cat([w[:, :hidden] for w in (query, key, value)]) * layer.input_layernorm.weight
        in_mlp = Float8Matrix.of if float8 else lambda matrix: matrix
        return Matrices(
            fc=self.fc.weight.to(dtype),
            token=token.to(dtype),
            query=query[:, hidden:].to(dtype),
            key_value=torch.cat([key[:, hidden:].to(dtype), value[:, hidden:].to(dtype)]),
            out=attention.o_proj.weight.to(dtype),
            gate=in_mlp(mlp.gate_proj.weight.to(dtype)),
            up=in_mlp(mlp.up_proj.weight.to(dtype)),
            down=in_mlp(mlp.down_proj.weight.to(dtype)),
        )

    def compile(self, *, backend: str | Callable = "inductor") -> None:
        """Let torch.compile fuse what lies between the matrix products and around attention: no graph breaks."""
        for part in ("project", "read_tokens", "before_attention", "after_attention", "feed_forward"):
            setattr(self, part, torch.compile(getattr(self, part), backend=backend, fullgraph=True))

    def project(self, aux: Tensor, matrices: Matrices) -> Tensor:
        """The target's boundaries aux [T, A*H] -> the drafter's first feature [T, H]."""
        if self.shape.norm_before_fc:
            aux = self.input_norm(aux)
        if self.shape.fc_norm:
            chunks = aux.chunk(self.shape.num_boundaries, dim=-1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return linear(aux, matrices.fc)

    def read_tokens(self, embedding: Tensor, matrices: Matrices) -> Tensor:
        """embedding [T, H] -> what each token gives to query, key and value [T, (heads + 2*kv_heads)*D].

        The layer multiplies [norm(embedding), norm(feature)] with matrices of width 2H: a sum of two products.
        The first reads nothing but the token, and every depth reads the same tokens, one place further on: it is
        made once. With the norm's weight in the matrix, its backward pass needs no gradient of the input either.
        """
        return linear(self.midlayer.input_layernorm.scaled(embedding), matrices.token)

    def before_attention(
        self, from_token: Tensor, feature: Tensor, positions: Tensor, active: Tensor | None, matrices: Matrices
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Every row gives a key and a value [T, kv_heads, D]; the active ones a query [R, heads, D] and a residual [R, H].

        from_token  [T, (heads + 2*kv_heads)*D], of the token that each row reads at this depth
        """
        shape = self.shape
        x, rotary = self.midlayer.hidden_norm(feature), self.rotary(positions)
        width = shape.num_attention_heads * shape.head_dim
        key_value = linear(x, matrices.key_value) + from_token[:, width:]
        key, value = key_value.unflatten(-1, (2, shape.num_key_value_heads, -1)).unbind(1)
        key, from_token = rotate(key, *rotary), from_token[:, :width]
        if active is not None:
            x, feature, from_token = x[active], feature[active], from_token[active]
            rotary = (rotary[0][active], rotary[1][active])
        query = (linear(x, matrices.query) + from_token).unflatten(-1, (shape.num_attention_heads, -1))
        return rotate(query, *rotary), key, value.contiguous(), feature

    def after_attention(self, attended: Tensor, residual: Tensor, matrices: Matrices) -> Tensor:
        """attended [R, heads, D] joins the residual stream [R, H]."""
        return residual + linear(attended.flatten(-2), matrices.out)

    def feed_forward(self, residual: Tensor, matrices: Matrices) -> tuple[Tensor, Tensor]:
        """residual [R, H] -> normed output and next feature [R, H]."""
        mlp = matrices.gate, matrices.up, matrices.down
        if self.activation_checkpointing == "none":
            output = self.mlp(residual, *mlp)
        else:
            output = checkpoint(self.mlp, residual, *mlp, use_reentrant=False, preserve_rng_state=False)
        normed = self.norm(output)
        return normed, normed if self.shape.norm_output else output

    def mlp(
        self, residual: Tensor, gate: Tensor | Float8Matrix, up: Tensor | Float8Matrix, down: Tensor | Float8Matrix
    ) -> Tensor:
        """SwiGLU of the normed residual stream, added to it: [R, H]."""
        x = self.midlayer.post_attention_layernorm(residual)
        return residual + product(silu(product(x, gate)) * product(x, up), down)

    def forward(
        self,
        from_token: Tensor,
        feature: Tensor,
        *,
        positions: Tensor,
        attention: Attention,
        matrices: Matrices,
        active: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One pass of the layer.

        from_token  [T, (heads + 2*kv_heads)*D], from `read_tokens`, of the token that each row reads
        feature     [T, H]
        positions   [T]     int64, rotary
        active      [R]     int64, the rows whose output is wanted; None: all of them

        Returns the normed output [R, H], which `lm_head` reads, the feature [R, H] of the next depth, and this
        depth's key and value [T, kv_heads, D].
        """

        def attend(from_token: Tensor, feature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            query, key, value, residual = self.before_attention(from_token, feature, positions, active, matrices)
            return self.after_attention(attention(query, key, value), residual, matrices), key, value

        if self.activation_checkpointing == "layer":
            residual, key, value = checkpoint(attend, from_token, feature, use_reentrant=False, preserve_rng_state=False)
        else:
            residual, key, value = attend(from_token, feature)
        return *self.feed_forward(residual, matrices), key, value

    @torch.no_grad()
    def initialize(self, target: Target, *, std: float, head_from_target: bool, seed: int) -> None:
        """Fresh weights, the same on every device and process for the same seed: drawn on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * std)
            elif isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
        if head_from_target:
            self.lm_head.weight.copy_(target.head[self.target_ids.to(target.head.device)])
            self.norm.weight.copy_(target.final_norm)

"""Drafter: the one-layer EAGLE-3 model, its parameters named as the server loads them.

What the server computes (SGLang srt/models/llama_eagle3.py) in training's shapes: a feature is made
from the target's boundaries by `project`, or is the drafter's own output of the depth before; the
layer reads [norm(embedding), norm(feature)] side by side, and the feature itself, un-normed, is the
residual stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from train.float8 import Float8Matrix
from train.layers import Layer, Matrix, RMSNorm, Rotary, product, rotate
from train.shape import DrafterShape
from train.target import Target

# attention(query [R, heads, D], key [T, kv_heads, D], value [T, kv_heads, D]) -> [R, heads, D]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Matrices(NamedTuple):
    """The layer's matrices in the dtype that products run in, made once a step for all depths.

    Their gradients are summed over the depths before they reach the masters. What reads the token and what
    reads the feature stand apart, the token's with the weight of its norm multiplied in: see `read_tokens`.
    """

    fc: Matrix  # [H, A*H]
    token: Matrix  # [(heads + 2*kv_heads)*D, H], query, key and value from the normed embedding
    query: Matrix  # [heads*D, H], from the normed feature
    key_value: Matrix  # [2*kv_heads*D, H]
    out: Matrix  # [H, heads*D]
    gate: Matrix  # [I, H]; apart from `up`, so that their gradients are written where they are read
    up: Matrix  # [I, H]
    down: Matrix  # [H, I]


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

        def in_mlp(master: Tensor) -> Matrix:
            return Float8Matrix.of(master.to(dtype)) if float8 else master.to(dtype)

        return Matrices(
            fc=self.fc.weight.to(dtype),
            token=token.to(dtype),
            query=query[:, hidden:].to(dtype),
            key_value=torch.cat([key[:, hidden:], value[:, hidden:]]).to(dtype),
            out=attention.o_proj.weight.to(dtype),
            gate=in_mlp(mlp.gate_proj.weight),
            up=in_mlp(mlp.up_proj.weight),
            down=in_mlp(mlp.down_proj.weight),
        )

    def compile(self, *, backend: str | Callable = "inductor", matrices: bool = False) -> None:
        """Let torch.compile fuse what lies between the matrix products and around attention: no graph breaks.

        matrices  too, once a step: worth it for their roundings to float8, and nothing for their casts alone
        """
        parts = ["project", "read_tokens", "before_attention", "after_attention", "feed_forward"]
        for part in parts + ["matrices"] * matrices:
            setattr(self, part, torch.compile(getattr(self, part), backend=backend, fullgraph=True))

    def project(self, aux: Tensor, matrices: Matrices) -> Tensor:
        """The target's boundaries aux [T, A*H] -> the drafter's first feature [T, H]."""
        if self.shape.norm_before_fc:
            aux = self.input_norm(aux)
        if self.shape.fc_norm:
            chunks = aux.chunk(self.shape.num_boundaries, dim=-1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return product(aux, matrices.fc)

    def read_tokens(self, embedding: Tensor, matrices: Matrices) -> Tensor:
        """embedding [T, H] -> what each token gives to query, key and value [T, (heads + 2*kv_heads)*D].

        The layer multiplies [norm(embedding), norm(feature)] with matrices of width 2H: a sum of two products.
        The first reads nothing but the token, and every depth reads the same tokens, one place further on: it is
        made once. With the norm's weight in the matrix, its backward pass needs no gradient of the input either.
        """
        return product(self.midlayer.input_layernorm.scaled(embedding), matrices.token)

    def before_attention(
        self, from_token: Tensor, feature: Tensor, positions: Tensor, active: Tensor | None, matrices: Matrices
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Every row gives a key and a value [T, kv_heads, D]; the active ones a query [R, heads, D], a residual [R, H].

        from_token  [T, (heads + 2*kv_heads)*D], of the token that each row reads at this depth
        """
        shape = self.shape
        x, rotary = self.midlayer.hidden_norm(feature), self.rotary(positions)
        width = shape.num_attention_heads * shape.head_dim
        key_value = product(x, matrices.key_value) + from_token[:, width:]
        key, value = key_value.unflatten(-1, (2, shape.num_key_value_heads, -1)).unbind(1)
        key, from_token = rotate(key, *rotary), from_token[:, :width]
        if active is not None:
            x, feature, from_token = x[active], feature[active], from_token[active]
            rotary = (rotary[0][active], rotary[1][active])
        query = (product(x, matrices.query) + from_token).unflatten(-1, (shape.num_attention_heads, -1))
        return rotate(query, *rotary), key, value.contiguous(), feature

    def after_attention(self, attended: Tensor, residual: Tensor, matrices: Matrices) -> Tensor:
        """attended [R, heads, D] joins the residual stream [R, H]."""
        return residual + product(attended.flatten(-2), matrices.out)

    def feed_forward(self, residual: Tensor, matrices: Matrices) -> tuple[Tensor, Tensor]:
        """residual [R, H] -> normed output and next feature [R, H]."""
        mlp = matrices.gate, matrices.up, matrices.down
        if self.activation_checkpointing == "none":
            output = self.mlp(residual, *mlp)
        else:
            output = checkpoint(self.mlp, residual, *mlp, use_reentrant=False, preserve_rng_state=False)
        normed = self.norm(output)
        return normed, normed if self.shape.norm_output else output

    def mlp(self, residual: Tensor, gate: Matrix, up: Matrix, down: Matrix) -> Tensor:
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
            residual, key, value = checkpoint(
                attend, from_token, feature, use_reentrant=False, preserve_rng_state=False
            )
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

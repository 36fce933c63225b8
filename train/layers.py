"""What a drafter's layer is made of: norms, rotary embedding, products, and the modules that hold its matrices."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from data.hugging_face import transformers
from train.float8 import Float8Matrix
from train.shape import DrafterShape

Matrix = Tensor | Float8Matrix


def product(x: Tensor, matrix: Matrix) -> Tensor:
    """x [R, I] times the transpose of a matrix [O, I] -> [R, O]."""
    return linear(x, matrix) if isinstance(matrix, Tensor) else matrix.times(x)


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
            try:
                scaled = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope_type]
                frequencies, self.scale = scaled(config, torch.device("cpu"))
            except (KeyError, TypeError, RuntimeError) as error:  # unknown, incomplete, or not as long as half a head
                raise ValueError(
                    f"rope scaling {config.rope_parameters} does not fit heads of {shape.head_dim} ({error}): set "
                    "drafter.inherit_rope_scaling=false"
                ) from error
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

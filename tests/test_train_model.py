"""Sizes of a drafter, its rotary embedding beside transformers' own, its first weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf

from data.hugging_face import transformers
from tests.conftest import CONF
from tests.packs import small_drafter, small_shape, small_target
from train.config import DrafterConfig
from train.layers import Rotary
from train.shape import DrafterShape

TARGET = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip


def drafter_config(**changes) -> DrafterConfig:
    return DrafterConfig(**{**OmegaConf.to_container(OmegaConf.load(CONF / "drafter" / "eagle3.yaml")), **changes})


def test_what_is_null_is_the_targets():
    shape = DrafterShape.resolve(drafter_config(), TARGET, num_boundaries=3)
    assert (shape.hidden_size, shape.intermediate_size, shape.head_dim) == (4096, 14336, 128)
    assert (shape.num_attention_heads, shape.num_key_value_heads) == (32, 8)
    assert (shape.rope_theta, shape.rope_scaling["factor"], shape.max_position_embeddings) == (500000.0, 8.0, 131072)


def test_newer_configs_keep_theta_and_scaling_in_rope_parameters():
    target = {k: v for k, v in TARGET.items() if not k.startswith("rope")}
    target["rope_parameters"] = {**TARGET["rope_scaling"], "rope_theta": 500000.0}
    assert DrafterShape.resolve(drafter_config(), target, num_boundaries=3) == DrafterShape.resolve(
        drafter_config(), TARGET, num_boundaries=3
    )


def test_an_mla_targets_scaling_can_be_left_out():
    shape = DrafterShape.resolve(drafter_config(inherit_rope_scaling=False), TARGET, num_boundaries=3)
    assert shape.rope_scaling == {}


def test_a_size_that_the_target_does_not_tell_is_asked_for():
    target = {name: value for name, value in TARGET.items() if name != "intermediate_size"}
    with pytest.raises(ValueError, match="does not say what to take for drafter.intermediate_size"):
        DrafterShape.resolve(drafter_config(), target, num_boundaries=3)
    assert DrafterShape.resolve(drafter_config(intermediate_size=512), target, num_boundaries=3).intermediate_size == 512


@pytest.mark.parametrize(
    "scaling, words",
    [
        ({"type": "dynamic", "factor": 4.0}, "'dynamic', which servers read differently"),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, "'mrope', which servers read differently"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48}, "does not fit heads of 128"),
    ],
)
def test_rope_scaling_that_cannot_be_taken_over_can_be_left_out(scaling, words):
    target = {**TARGET, "rope_scaling": scaling}
    with pytest.raises(ValueError, match=f"{words}.*drafter.inherit_rope_scaling=false"):
        Rotary(DrafterShape.resolve(drafter_config(), target, num_boundaries=3))
    Rotary(DrafterShape.resolve(drafter_config(inherit_rope_scaling=False), target, num_boundaries=3))


def test_what_only_transformers_reads_of_rope_scaling_is_left_to_its_default():
    """SGLang knows no attention_factor: exported, it would be dropped there and not here."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    shapes = [
        DrafterShape.resolve(drafter_config(), {**TARGET, "rope_scaling": scaling}, num_boundaries=3)
        for scaling in (yarn, {**yarn, "attention_factor": 0.9, "partial_rotary_factor": 0.5})
    ]
    assert shapes[0] == shapes[1] and shapes[0].rope_scaling == yarn


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"draft_vocab_size": 200000}, "has only 128256 tokens: set drafter.draft_vocab_size=128256 or less"),
        ({"num_key_value_heads": 5}, "num_attention_heads is 32: it must be a multiple of drafter.num_key_value_heads, 5"),
        ({"head_dim": 33}, "even number"),
        ({"depths": 0}, "at least one draft"),
        ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        DrafterShape.resolve(drafter_config(**changes), TARGET, num_boundaries=3)


@pytest.mark.parametrize("scaling", [{}, TARGET["rope_scaling"]])
def test_rotary_is_transformers_own_far_beyond_any_table(scaling):
    """transformers' Llama at positions up to 100,000: the same cosines, where a bf16 table is wrong by 1."""
    shape = replace(small_shape(), head_dim=128, rope_theta=500000.0, rope_scaling=scaling, max_position_embeddings=131072)
    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, head_dim=128, max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", **scaling, "rope_theta": 500000.0},
    )  # fmt: skip
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    positions = torch.tensor([0, 1, 77, 8191, 8192, 99999])
    expected, _ = LlamaRotaryEmbedding(config)(torch.zeros(1, 6, 128), positions[None])  # [1, 6, D], halves repeated
    cosine, _ = Rotary(shape)(positions)
    torch.testing.assert_close(cosine[:, 0], expected[0, :, :64], atol=1e-6, rtol=0)


def test_first_weights_depend_on_the_seed_alone_and_the_head_can_be_the_targets():
    target = small_target(dtype=torch.float32)
    same, again, other = small_drafter(target, seed=1), small_drafter(target, seed=1), small_drafter(target, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), again.parameters(), strict=True))
    assert not torch.equal(same.fc.weight, other.fc.weight)
    same.initialize(target, std=0.02, head_from_target=True, seed=1)
    assert torch.equal(same.lm_head.weight, target.head[::2][: same.shape.draft_vocab_size])

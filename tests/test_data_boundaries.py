"""Boundaries and what engines call them."""

from __future__ import annotations

import json

import pytest

from data.boundaries import check_boundaries, default_boundaries, engine_layer_ids, text_config


def test_the_default_is_the_fields_choice():
    """SGLang's own fallback, [2, n // 2, n - 3], for 30 and 61 layers."""
    assert default_boundaries(30) == [2, 15, 27]
    assert default_boundaries(61) == [2, 30, 58]


def test_a_target_too_shallow_for_the_default_must_say_its_boundaries():
    with pytest.raises(ValueError, match="set target.boundaries"):
        default_boundaries(6)


@pytest.mark.parametrize("bad", [[], [3, 3], [5, 2], [-1, 2], [2, 31]])
def test_boundaries_ascend_within_the_target(bad: list[int]):
    with pytest.raises(ValueError, match="30 layers"):
        check_boundaries(bad, 30)


def test_boundary_0_and_the_last_one_exist():
    check_boundaries([0, 30], 30)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_sglang_adds_one_for_the_llama_family(architecture: str):
    """sglang 0.5.23 models/llama.py: layers_to_capture = [val + 1 for val in layer_ids]."""
    ids = engine_layer_ids([2, 15, 27], architecture=architecture, engine="sglang", engine_version="0.5.23")
    assert ids == [1, 14, 26]


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"])
@pytest.mark.parametrize(
    ("version", "ids"),
    [("0.5.11", [2, 30, 58]), ("0.5.12.post1", [2, 30, 58]), ("0.5.13", [3, 31, 59]), ("0.5.23", [3, 31, 59])],
)
def test_sglang_changed_its_mind_about_deepseek(architecture: str, version: str, ids: list[int]):
    """models/deepseek_v2.py in the wheels: always + 1 up to 0.5.12.post1, only after a first id of 1 from 0.5.13."""
    boundaries = [3, 31, 59]
    assert engine_layer_ids(boundaries, architecture=architecture, engine="sglang", engine_version=version) == ids


def test_what_the_ids_make_sglang_capture_is_what_was_meant():
    """Replays `set_eagle3_layers_to_capture` of both families, 0.5.23: the result is the boundaries again."""

    def llama(ids: list[int]) -> list[int]:
        return [i + 1 for i in ids]

    def deepseek(ids: list[int]) -> list[int]:
        return [i + 1 for i in ids] if ids[0] == 1 else list(ids)

    for first in range(2, 6):
        boundaries = [first, 7, 9]
        for architecture, capture in (("LlamaForCausalLM", llama), ("DeepseekV3ForCausalLM", deepseek)):
            ids = engine_layer_ids(boundaries, architecture=architecture, engine="sglang", engine_version="0.5.23")
            assert capture(ids) == boundaries


def test_a_first_boundary_of_1_cannot_be_said_to_deepseek():
    with pytest.raises(ValueError, match="as boundary 2"):
        engine_layer_ids([1, 3], architecture="DeepseekV3ForCausalLM", engine="sglang", engine_version="0.5.23")
    ids = engine_layer_ids([1, 3], architecture="LlamaForCausalLM", engine="sglang", engine_version="0.5.23")
    assert ids == [0, 2]


@pytest.mark.parametrize("boundaries", [[0, 3], [2, 6]])
def test_sglang_has_neither_the_embedding_nor_the_last_block(boundaries: list[int]):
    with pytest.raises(ValueError, match="set target.boundaries"):
        engine_layer_ids(
            boundaries, architecture="LlamaForCausalLM", engine="sglang", engine_version="0.5.23", num_layers=6
        )


def test_vllm_counts_boundaries():
    ids = engine_layer_ids([2, 15, 27], architecture="LlamaForCausalLM", engine="vllm", engine_version="0.20.0")
    assert ids == [2, 15, 27]


def test_an_unknown_engine_is_refused():
    with pytest.raises(ValueError, match="expected sglang or vllm"):
        engine_layer_ids([2], architecture="LlamaForCausalLM", engine="tgi", engine_version="1")


def test_the_language_model_of_a_multimodal_target_is_found(tmp_path):
    inner = {"num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840}
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert text_config(tmp_path) == inner


@pytest.mark.parametrize(
    ("content", "message"), [("{", "cannot be read"), ("[]", "not a JSON object"), ("{}", "has no")]
)
def test_a_damaged_config_is_named(tmp_path, content: str, message: str):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        text_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)

"""Targets that Eyas makes: complete or absent, and what SmolLM2's template really says."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from data.boundaries import architecture_of, text_config
from data.config import TargetConfig, typed
from data.conversations import conversation_of
from data.embedded import ensure_target
from data.hugging_face import transformers
from data.rendering import Renderer
from data.tokenizing import load_tokenizer
from tests.conftest import CONF


def target_config(name: str, **changes) -> TargetConfig:
    return replace(typed(TargetConfig, OmegaConf.load(CONF / "target" / f"{name}.yaml")), **changes)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("tiny_llama", "LlamaForCausalLM"),
        ("tiny_qwen3", "Qwen3ForCausalLM"),
        ("tiny_deepseek", "DeepseekV3ForCausalLM"),
    ],
)
def test_a_tiny_target_runs_and_is_not_trivial(name: str, architecture: str, models: Path):
    path = ensure_target(target_config(name, path=f"{models}/{name}"))
    assert architecture_of(path) == architecture and text_config(path)["num_hidden_layers"] == 6
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = load_tokenizer(path, trust_remote_code=False)("The hawk sees the hare.", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    assert len(states) == 7 and all(s.isfinite().all() for s in states)
    assert all((a - b).norm() / b.norm() > 0.01 for a, b in zip(states, states[1:]))
    assert sorted(p.name for p in models.iterdir() if p.name.startswith(".")) == []


def test_a_tiny_target_is_the_same_every_time(tiny_llama: TargetConfig, tmp_path: Path):
    again = ensure_target(replace(tiny_llama, path=str(tmp_path / "again")))
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (Path(tiny_llama.path) / name).read_bytes()


def test_a_target_that_is_there_is_left_alone(tiny_llama: TargetConfig):
    before = {file.name: file.stat().st_mtime_ns for file in Path(tiny_llama.path).iterdir()}
    ensure_target(tiny_llama)
    assert {file.name: file.stat().st_mtime_ns for file in Path(tiny_llama.path).iterdir()} == before


def test_a_target_that_nobody_can_make_is_asked_for(tmp_path: Path):
    config = target_config("kimi_k25", path=str(tmp_path / "kimi"))
    with pytest.raises(ValueError, match=f"no target at {tmp_path}/kimi: download it there, or set target.path"):
        ensure_target(config)


def test_a_folder_without_weights_is_named(tiny_llama: TargetConfig, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((Path(tiny_llama.path) / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"has a config.json but no \*.safetensors"):
        ensure_target(replace(tiny_llama, path=str(tmp_path)))


def test_boundaries_that_do_not_fit_the_target_are_refused(tiny_llama: TargetConfig):
    with pytest.raises(ValueError, match=r"\[2, 15, 27\] do not fit a target of 6 layers"):
        ensure_target(replace(tiny_llama, boundaries=[2, 15, 27]))


def test_a_failure_leaves_no_half_made_target(tmp_path: Path, monkeypatch):
    def fail(*arguments, **options):
        raise ValueError("on the way")

    monkeypatch.setattr("data.embedded._tiny_tokenizer", fail)
    with pytest.raises(ValueError, match="on the way"):
        ensure_target(target_config("tiny_llama", path=str(tmp_path / "t")))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """Where the quickstart has it: 30 s the first time."""
    root = Path(os.environ.get("EYAS_MODELS", CONF.parent / "outputs" / "models"))
    return ensure_target(target_config("smollm2_135m", path=str(root / "smollm2_135m")))


def test_smollm2_is_bf16_without_traces_of_its_quantization(smollm2: Path):
    config = text_config(smollm2)
    assert "quantization_config" not in config and config["eos_token_id"] == 2 and config["num_hidden_layers"] == 30
    assert {tensor.dtype for tensor in load_file(smollm2 / "model.safetensors").values()} == {torch.bfloat16}


def test_smollm2s_template_opens_with_its_default_system_turn(smollm2: Path):
    """Ids recorded when the model answered this question of MT-bench, with a system turn nobody wrote."""
    question = (
        "Compose an engaging travel blog post about a recent trip to Hawaii, highlighting cultural experiences and "
        "must-see attractions."
    )
    recorded = [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712,
        8182, 2, 198, 1, 4093, 198, 3750, 2594, 354, 4798, 2827, 5862, 1681, 563, 253, 2765, 7022, 288, 14126,
        28, 10775, 2642, 2647, 284, 1251, 29, 4009, 21627, 30, 2, 198, 1, 520, 9531, 198,
    ]  # fmt: skip
    tokenizer = load_tokenizer(smollm2, trust_remote_code=False)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)
    renderer = Renderer(tokenizer, options={}, rewritten_history="refuse")
    messages = conversation_of(1, {"prompt": question}).messages
    text = renderer.text(messages, tools=None, add_generation_prompt=True)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == recorded

"""The benchmarks of the step and of attention run where there is no GPU, say so, and write every figure to a file."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

from benchmarks import attention, memory, step, timing
from data.prompts import Prompt, PromptSet

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU they measure large shapes")


def run(monkeypatch, capsys, module, *arguments) -> str:
    monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, arguments)])
    module.main()
    return capsys.readouterr().out


@pytest.mark.parametrize(("module", "arguments"), [(memory, []), (step, ["--shapes", "8b"])])
def test_what_only_a_gpu_can_measure_is_refused_at_once(monkeypatch, capsys, module, arguments):
    """An 8B shape takes a CPU many minutes and dozens of GB."""
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, capsys, module, *arguments)
    assert "error: there is no GPU here" in capsys.readouterr().err


def test_the_step_is_measured_in_the_variants_that_are_chosen(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(timing, "WARMUP", 0)
    said = run(monkeypatch, capsys, step, "--shapes", "tiny", "--json", tmp_path / "step.json")
    assert "no GPU here" in said
    rows = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert [row["who"] for row in rows] == ["Eyas", "Eyas, MLP in float8"]
    run(monkeypatch, capsys, step, "--variants", "fp8", "mlp-again", "--json", tmp_path / "chosen.json")
    more = json.loads((tmp_path / "chosen.json").read_text())["rows"]
    assert [row["who"] for row in more] == ["Eyas, MLP in float8", "Eyas, MLP again"]
    for row in rows + more:
        assert row["tokens_per_second"] == pytest.approx(128 / (row["ms"] / 1e3)), "two documents of 64 tokens"
        assert 0 < row["share_of_matmul"] and row["tflops"] > 0


def test_a_mix_of_lengths_is_packed_and_its_supervised_tokens_are_counted(monkeypatch, capsys, tmp_path):
    lengths, masks = [40, 25, 64, 30], [20, 5, 60, 0]
    prompts = [
        Prompt(f"p{i}", "test", "train", np.zeros(n, np.int32), np.array([0] * (n - m) + [1] * m, np.uint8))
        for i, (n, m) in enumerate(zip(lengths, masks, strict=True))
    ]
    PromptSet.collect(prompts).save(tmp_path / "prompts")
    monkeypatch.setattr(timing, "WARMUP", 0)
    arguments = ["--shapes", "--prompts", tmp_path / "prompts", "--budget", 160, "--json", tmp_path / "mix.json"]
    run(monkeypatch, capsys, step, *arguments)
    rows = json.loads((tmp_path / "mix.json").read_text())["rows"]
    assert {row["who"].partition(",")[0] for row in rows} == {"Eyas"}
    for row in rows:  # all four fit in one pack: 159 tokens, 85 of them supervised
        assert row["tokens_per_second"] / row["supervised_per_second"] == pytest.approx(159 / 85)


def test_attention_is_measured_beside_a_mask(monkeypatch, capsys, tmp_path):
    said = run(monkeypatch, capsys, attention, "--json", tmp_path / "attention.json")
    assert "no GPU here" in said
    rows = json.loads((tmp_path / "attention.json").read_text())["rows"]
    assert [row["who"] for row in rows] == ["Eyas", "SDPA with a mask"]


def test_every_way_of_attention_computes_the_same():
    """What is compared must be equal: Eyas beside SDPA with the mask that `sees` describes, forward."""
    case = attention.CASES["tiny"]
    inputs = attention.Inputs.random(case)
    ours = attention.attention.choose("dense")(inputs.query, inputs.keys, inputs.values, inputs.documents)
    rows = inputs.query.shape[0]
    mask = attention.sees(inputs.document)(
        None, None, torch.arange(rows)[:, None], torch.arange(len(inputs.keys) * rows)[None]
    )
    joined = [attention.side_by_side(tensors) for tensors in ([inputs.query], inputs.keys, inputs.values)]
    theirs = torch.nn.functional.scaled_dot_product_attention(*joined, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1), rtol=1e-4, atol=1e-5)

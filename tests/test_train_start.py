"""What a run starts from: a published drafter with its own vocabulary map, or an error that names both sides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file, save_file

from data.config import typed
from tests.conftest import CONF
from tests.targets import layer_ids, random_drafter
from train.config import TrainConfig
from train.export import export, load_drafter
from train.shape import DrafterShape
from train.start import first_drafter
from train.target import Target


@pytest.fixture(scope="module")
def target(tiny_llama) -> Target:
    return Target.load(tiny_llama.path, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def published(tmp_path_factory, tiny_llama) -> Path:
    """A drafter as others publish it for SGLang: no word of Eyas, the even tokens as its vocabulary."""
    ids = layer_ids(Path(tiny_llama.path), [2, 3, 5])
    return random_drafter(tmp_path_factory.mktemp("published") / "drafter", layer_ids=ids)


@pytest.fixture
def folder(published, tmp_path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "drafter"))


def config_of(folder: Path, tiny_llama, *overrides: str) -> TrainConfig:
    """A run that would make its vocabulary map from shards, if it made one: there are none."""
    options = [
        "target=tiny_llama", f"target.path={tiny_llama.path}", f"init_from={folder}", "shards=/nowhere", "out=/nowhere",
        "drafter=eagle3", "drafter.draft_vocab_size=256", "drafter.depths=3", "drafter.rope_theta=10000.0", *overrides,
    ]  # fmt: skip
    with initialize_config_dir(str(CONF), version_base=None):
        return typed(TrainConfig, compose("train", overrides=options))


def start(folder: Path, target: Target, tiny_llama, *overrides: str):
    config = config_of(folder, tiny_llama, *overrides)
    shape = DrafterShape.resolve(config.drafter, target.config, num_boundaries=len(config.target.boundaries))
    return first_drafter(config, shape, target=target, target_path=Path(tiny_llama.path))


def change(folder: Path, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_weights_and_vocabulary_map_are_those_of_the_folder(folder, target, tiny_llama):
    drafter, found = start(folder, target, tiny_llama), load_file(folder / "model.safetensors")
    assert all(torch.equal(drafter.state_dict()[name], tensor) for name, tensor in found.items())
    assert torch.equal(drafter.target_ids, torch.arange(0, 512, 2))
    assert all(parameter.dtype == torch.float32 for parameter in drafter.parameters())


def test_vllms_names_a_bf16_file_and_an_embedding_beside_it_are_read(folder, target, tiny_llama):
    tensors = load_file(folder / "model.safetensors")
    other = {name.replace("midlayer.", "layers.0."): t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}
    other["embed_tokens.weight"] = torch.zeros(512, 128)
    del other["t2d"]  # SGLang needs only d2t
    save_file(other, folder / "model.safetensors")
    drafter = start(folder, target, tiny_llama)
    assert torch.equal(drafter.midlayer.mlp.up_proj.weight, tensors["midlayer.mlp.up_proj.weight"].bfloat16().float())
    assert torch.equal(drafter.t2d, tensors["t2d"])


def test_what_does_not_fit_is_named_with_both_shapes(folder, target, tiny_llama):
    with pytest.raises(ValueError, match=r"up_proj.weight: found \[256, 128\], expected \[512, 128\]"):
        start(folder, target, tiny_llama, "drafter.intermediate_size=512")
    with pytest.raises(ValueError, match=r"lm_head.weight: found \[256, 128\], expected \[200, 128\]"):
        start(folder, target, tiny_llama, "drafter.draft_vocab_size=200")
    with pytest.raises(ValueError, match=r"fc.weight: found \[128, 384\], expected \[128, 256\]"):
        start(folder, target, tiny_llama, "target.boundaries=[2,3]")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_theta": 500000.0}, "rope_theta is 500000.0 there, 10000.0 here"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 500000.0}}, "rope_theta is 500000.0 there"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling is {.*linear.*} there, {} here"),
        ({"rope_scaling": {"type": "su", "factor": 4.0}}, "is another drafter: rope_scaling is {.*su.*} there, {} here"),
        ({"norm_output": True}, "norm_output is True there, False here"),
        ({"eyas": {"boundaries": [1, 2, 4]}}, r"boundaries are \[1, 2, 4\] there, \[2, 3, 5\] here"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [7, 8, 9]}}, r"layer ids \[7, 8, 9\]"),
    ],
)
def test_what_shapes_do_not_tell_must_agree_as_well(folder, target, tiny_llama, values, message):
    change(folder, **values)
    with pytest.raises(ValueError, match=message):
        start(folder, target, tiny_llama)


def test_mrope_is_no_other_rope_in_text(folder, target, tiny_llama):
    """As drafters of Qwen2.5-VL have it in their config."""
    change(folder, rope_scaling={"type": "mrope", "rope_type": "mrope", "mrope_section": [4, 6, 6]})
    start(folder, target, tiny_llama)


@pytest.mark.parametrize("spoil", ["absolute", "twice", "t2d"])
def test_a_map_that_does_not_fit_is_refused_before_the_run_and_not_after_it(folder, target, tiny_llama, spoil):
    tensors = load_file(folder / "model.safetensors")
    if spoil == "absolute":
        tensors["d2t"] += torch.arange(256)
    elif spoil == "twice":
        tensors["d2t"][1] = -1
        del tensors["t2d"]
    else:
        tensors["t2d"] = ~tensors["t2d"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="d2t must hold offsets"):
        start(folder, target, tiny_llama)


def test_the_tokens_may_stand_in_any_order(folder, target, tiny_llama, tmp_path):
    """And the export of such a drafter is as good as another."""
    tensors = load_file(folder / "model.safetensors")
    ids = torch.arange(0, 512, 2).flip(0)
    tensors["d2t"], tensors["lm_head.weight"] = ids - torch.arange(256), tensors["lm_head.weight"].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors")
    drafter = start(folder, target, tiny_llama)
    assert torch.equal(drafter.target_ids, ids)
    export(
        drafter.state_dict(), shape=drafter.shape, boundaries=[2, 3, 5], depths=3, target_name="tiny_llama",
        target_path=Path(tiny_llama.path), out=tmp_path / "export", engine="sglang", engine_version="0.5.23",
    )  # fmt: skip
    assert torch.equal(load_drafter(tmp_path / "export")[0].target_ids, ids)


def test_a_drafter_that_says_every_token_needs_no_map(folder, target, tiny_llama):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(512, 128)
    del tensors["d2t"], tensors["t2d"]
    save_file(tensors, folder / "model.safetensors")
    drafter = start(folder, target, tiny_llama, "drafter.draft_vocab_size=512")
    assert torch.equal(drafter.target_ids, torch.arange(512)) and drafter.t2d.all()


def test_a_folder_without_a_map_or_without_weights_is_no_drafter(folder, target, tiny_llama):
    tensors = load_file(folder / "model.safetensors")
    del tensors["d2t"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="has no d2t"):
        start(folder, target, tiny_llama)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no .safetensors file"):
        start(folder, target, tiny_llama)
    with pytest.raises(ValueError, match="is no drafter"):
        start(folder / "nowhere", target, tiny_llama)

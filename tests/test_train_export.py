"""An exported drafter: what the server will read, and what is refused before it can be served."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.packs import BOUNDARIES, DRAFT_VOCAB, HIDDEN, VOCAB, small_drafter, small_target
from train.export import check_export, export, layer_ids, load_drafter


@pytest.fixture
def target_folder(tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def exported(target_folder, out, *, engine="sglang", boundaries=(2, 15, 27), **flags):
    drafter = small_drafter(small_target(dtype=torch.float32), **flags)
    config = export(
        drafter.state_dict(),
        shape=drafter.shape,
        boundaries=list(boundaries),
        depths=3,
        target_name="small",
        target_path=target_folder,
        out=out,
        engine=engine,
        engine_version="0.5.23",
    )
    return drafter, config


def test_names_and_shapes_are_those_of_sglangs_loader(target_folder, tmp_path):
    """Read off sglang/srt/models/llama_eagle3.py: 2H wide attention, an offset d2t, the draft head."""
    exported(target_folder, tmp_path / "out")
    shapes = {name: tuple(t.shape) for name, t in load_file(tmp_path / "out" / "model.safetensors").items()}
    assert shapes == {
        "fc.weight": (HIDDEN, BOUNDARIES * HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "midlayer.self_attn.q_proj.weight": (32, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (16, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (16, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, 32),
        "midlayer.mlp.gate_proj.weight": (40, HIDDEN),
        "midlayer.mlp.up_proj.weight": (40, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, 40),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        "d2t": (DRAFT_VOCAB,),
        "t2d": (VOCAB,),
    }


def test_d2t_is_an_offset(target_folder, tmp_path):
    """small_drafter says the even tokens: draft token 5 is the target's 10, so d2t[5] is 5."""
    exported(target_folder, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["d2t"][5] == 5


def test_engine_ids_come_from_boundaries(target_folder, tmp_path):
    """SGLang's Llama adds 1 to what it is told, vLLM does not."""
    _, sglang = exported(target_folder, tmp_path / "sglang")
    _, vllm = exported(target_folder, tmp_path / "vllm", engine="vllm")
    assert sglang["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 14, 26]
    assert vllm["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert sglang["eyas"]["boundaries"] == vllm["eyas"]["boundaries"] == [2, 15, 27]
    names = load_file(tmp_path / "vllm" / "model.safetensors").keys()
    assert "layers.0.self_attn.q_proj.weight" in names and not any("midlayer" in name for name in names)


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True}])
def test_export_and_load_give_the_same_drafter_in_bf16(target_folder, tmp_path, flags):
    drafter, config = exported(target_folder, tmp_path / "out", **flags)
    loaded, _ = load_drafter(tmp_path / "out")
    assert loaded.shape == drafter.shape
    for name, tensor in drafter.state_dict().items():
        same = tensor.to(torch.bfloat16).float() if tensor.is_floating_point() else tensor
        assert torch.equal(loaded.state_dict()[name], same), name
    assert None not in config.values()
    for flag in flags:
        assert config[flag] is True


def test_a_tensor_of_the_wrong_shape_is_refused_with_both_shapes(target_folder, tmp_path):
    exported(target_folder, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors["fc.weight"] = torch.zeros(HIDDEN, 2 * HIDDEN)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"fc.weight: found \[16, 32\], expected \[16, 48\]"):
        check_export(tmp_path / "out")


def test_an_unknown_or_missing_tensor_is_refused(target_folder, tmp_path):
    """The server would drop the one without a word and serve the other from random memory."""
    exported(target_folder, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors["midlayer.mlp.up_projection.weight"] = tensors.pop("midlayer.mlp.up_proj.weight")
    save_file(tensors, file)
    with pytest.raises(ValueError, match="up_proj.weight: found nothing.*up_projection.weight.*no such tensor"):
        check_export(tmp_path / "out")


def test_absolute_ids_in_d2t_are_refused(target_folder, tmp_path):
    exported(target_folder, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors["d2t"] = tensors["d2t"] + torch.arange(DRAFT_VOCAB)
    save_file(tensors, file)
    with pytest.raises(ValueError, match="offsets"):
        check_export(tmp_path / "out")


def test_a_boundary_that_the_engine_cannot_capture_is_refused(target_folder, tmp_path):
    with pytest.raises(ValueError, match="boundary 30"):
        exported(target_folder, tmp_path / "out", boundaries=(2, 15, 30))
    assert not (tmp_path / "out").exists()


def test_a_single_boundary_is_refused_where_the_server_would_leave_out_its_projection(target_folder):
    """sglang/srt/models/llama_eagle3.py asks for fc by width: `hidden_states.shape[-1] != embeds.shape[-1]`."""
    with pytest.raises(ValueError, match="of a single boundary would be served without its fc"):
        layer_ids([15], target_folder, engine="sglang", engine_version="0.5.23")
    assert layer_ids([15], target_folder, engine="vllm", engine_version="0.11") == [15]


def test_an_export_replaces_an_earlier_one_and_no_other_folder(target_folder, tmp_path):
    """Such as the run's own, with all its checkpoints."""
    exported(target_folder, tmp_path / "run" / "export")
    (tmp_path / "run" / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="run holds checkpoints, export, and an export replaces all of it"):
        exported(target_folder, tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints").exists()
    (tmp_path / "run" / "export" / "summary.json").write_text("{}")
    exported(target_folder, tmp_path / "run" / "export", norm_output=True)
    assert load_drafter(tmp_path / "run" / "export")[1]["norm_output"] is True
    with pytest.raises(ValueError, match="export holds an export for sglang, which one for vllm would replace"):
        exported(target_folder, tmp_path / "run" / "export", engine="vllm")


def test_an_export_may_be_read_by_whom_the_umask_lets(target_folder, tmp_path):
    """Its server may be another user's, or in a container."""
    before = os.umask(0o022)
    try:
        exported(target_folder, tmp_path / "out")
    finally:
        os.umask(before)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in (tmp_path / "out").iterdir()} == {
        "config.json": "0o644", "model.safetensors": "0o644",
    }  # fmt: skip


def test_a_folder_that_is_no_drafter_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no exported drafter"):
        load_drafter(tmp_path)


def test_an_export_whose_copy_was_cut_short_is_refused(target_folder, tmp_path):
    exported(target_folder, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="no exported drafter"):
        load_drafter(tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json is not a JSON object"):
        load_drafter(tmp_path / "out")

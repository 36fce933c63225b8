"""The target's ends, found in every shape that checkpoints come in."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from data.codecs import TeacherHead, capped
from data.hugging_face import transformers
from extract.agreement import likeliest
from extract.capture import head_weight
from train.loss import Teacher
from train.target import Target

CONFIG = {"num_hidden_layers": 4, "hidden_size": 8, "vocab_size": 20}


def write_target(folder, tensors, *, config=CONFIG, shards=1):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    files = {name: f"model-{i % shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def tensors(*, prefix="model.", head="lm_head.weight", rows=20):
    generator = torch.Generator().manual_seed(0)
    found = {
        f"{prefix}embed_tokens.weight": torch.randn(rows, 8, generator=generator),
        f"{prefix}norm.weight": torch.randn(8, generator=generator),
        f"{prefix}layers.0.input_layernorm.weight": torch.ones(8),
    }
    return found | ({head: torch.randn(rows, 8, generator=generator)} if head else {})


def load(folder):
    return Target.load(folder, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("Cohere", {"logit_scale": 0.25}),
        ("Granite", {"logits_scaling": 8.0}),
        ("Gemma2", {"final_logit_softcapping": 3.0, "head_dim": 16}),
    ],
)
def test_the_teacher_is_the_targets_own_distribution_also_where_its_logits_have_a_factor_or_a_cap(tmp_path, name, changes):
    """Transformers' logits are the truth; their argmax alone would not tell."""
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.5)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        tokens = torch.arange(12)[None]
        last, logits = model.model(tokens).last_hidden_state[0], model(tokens).logits[0]
    target = load(tmp_path)
    assert torch.equal(target.embedding, model.get_input_embeddings().weight)
    teacher = Teacher.of(last, target.head, target_ids=torch.arange(64), cap=target.logits_cap)
    found = capped(teacher.logits, teacher.cap) - teacher.log_normalizer[:, None]
    torch.testing.assert_close(found, logits.log_softmax(-1), atol=1e-4, rtol=0)
    head, cap = head_weight(tmp_path), target.logits_cap
    stored = TeacherHead(head, device="cpu", cap=cap).top_k(last, 8)  # by codecs that keep it in place of last
    expected = logits.log_softmax(-1).topk(8).values
    torch.testing.assert_close(stored["top_log_probs"], expected, atol=1e-4, rtol=0)
    probability = likeliest(last, head, cap=cap)[1]  # by which answers are told that are not the target's own
    torch.testing.assert_close(probability, expected[:, 0].exp(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("prefix, head", [("model.", "lm_head.weight"), ("language_model.model.", "language_model.lm_head.weight")])
def test_single_and_sharded_files_with_and_without_a_wrappers_prefix(tmp_path, shards, prefix, head):
    given = tensors(prefix=prefix, head=head) | {"vision_tower.embed_tokens.weight": torch.zeros(3, 8)}
    target = load(write_target(tmp_path / "t", given, shards=shards))
    assert torch.equal(target.embedding, given[f"{prefix}embed_tokens.weight"])
    assert torch.equal(target.final_norm, given[f"{prefix}norm.weight"])
    assert torch.equal(target.head, given[head])


def test_a_tied_head_is_the_embedding_itself(tmp_path):
    target = load(write_target(tmp_path / "t", tensors(head=None), config=CONFIG | {"tie_word_embeddings": True}))
    assert target.head is target.embedding


def test_the_text_part_of_a_wrappers_config_counts(tmp_path):
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": CONFIG}
    assert load(write_target(tmp_path / "t", tensors(), config=config)).hidden_size == 8


def test_rows_beyond_the_vocabulary_are_padding(tmp_path):
    assert load(write_target(tmp_path / "t", tensors(rows=24))).head.shape == (20, 8)


@pytest.mark.parametrize(
    "given, words",
    [
        (tensors(head=None), "head and embedding are not tied"),
        ({k: v for k, v in tensors().items() if "norm.weight" not in k or "layers" in k}, "no model.norm.weight"),
        ({k: v for k, v in tensors().items() if "embed" not in k}, "ends in embed_tokens.weight"),
        (tensors(rows=19), r"the embedding is \[19, 8\], its config says \[20, 8\]"),
        (tensors() | {"lm_head.weight": torch.zeros(20, 8, dtype=torch.int8)}, "unquantized embedding and head"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path, given, words):
    config = CONFIG | {"tie_word_embeddings": False}
    with pytest.raises(ValueError, match=words):
        load(write_target(tmp_path / "t", given, config=config))


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match="holds neither model.safetensors nor"):
        load(tmp_path)

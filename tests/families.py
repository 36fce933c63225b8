"""Tiny random targets of the families people serve, each with what Hugging Face computes the same states from.

Six layers, hidden size 128, 512 tokens. `folder` is what SGLang serves; `reference` what transformers loads: another
folder only for Kimi-K2.5, whose wrapper hands everything to a DeepSeek-V3 language model.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from data.embedded import _TINY_YARN, _tiny_tokenizer

FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "gpt_oss", "glm4_moe",
)  # fmt: skip
HIDDEN, LAYERS, VOCAB = 128, 6, 512
_VOCABULARY = dict(vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, pad_token_id=2)
_COMMON = dict(
    **_VOCABULARY, hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=LAYERS, max_position_embeddings=2048
)
_GROUPED = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32)
_MLA = dict(
    num_attention_heads=4, num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=64, qk_rope_head_dim=16,
    qk_nope_head_dim=32, v_head_dim=32, rope_parameters=_TINY_YARN,
)  # fmt: skip
_EXPERTS = dict(
    moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1
)


@dataclass(frozen=True)
class Family:
    """boundaries: every one that SGLang can be asked for in this family; options: of its server, beside all others."""

    name: str
    folder: Path
    reference: Path
    boundaries: tuple[int, ...]
    options: tuple[str, ...] = ()


def family(name: str, models: Path) -> Family:
    """The tiny target of family `name`, made below `models` where it is not there yet."""
    folder = models / f"family-{name}"
    reference = models / "family-kimi_k2" if name == "kimi_k25" else folder
    if not (folder / "config.json").exists():
        if name == "kimi_k25":
            _wrap_kimi(family("kimi_k2", models).folder, folder)
        else:
            _make(name, folder)
    deepseek = name in ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25")  # cannot say a first boundary of 1
    options = ("--trust-remote-code",) if name == "kimi_k25" else ()
    return Family(name, folder, reference, tuple(range(2 if deepseek else 1, LAYERS)), options)


def _make(name: str, folder: Path) -> None:
    from data.hugging_face import transformers

    model = transformers.AutoModelForCausalLM.from_config(_config(name, transformers))
    generator = torch.Generator().manual_seed(0)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name and parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.data.normal_(0, 0.08, generator=generator)
        if "sinks" in parameter_name:  # SGLang keeps them in bfloat16
            parameter.data = parameter.data.bfloat16().float()
    for buffer_name, buffer in model.named_buffers():
        if "e_score_correction_bias" in buffer_name:
            buffer.zero_()
    model.save_pretrained(folder)
    _tiny_tokenizer().save_pretrained(folder)
    _add(folder, **_UNWRITTEN.get(name, {}))


def _config(name: str, transformers: Any) -> Any:
    if name == "llama":
        return transformers.LlamaConfig(**_GROUPED, **_COMMON)
    if name == "qwen2":
        return transformers.Qwen2Config(num_attention_heads=4, num_key_value_heads=2, **_COMMON)
    if name == "qwen3":
        return transformers.Qwen3Config(**_GROUPED, **_COMMON)
    if name == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, **_GROUPED, **_COMMON
        )
    if name == "gpt_oss":
        return transformers.GptOssConfig(
            num_local_experts=8, num_experts_per_tok=2, sliding_window=16, swiglu_limit=7.0, **_GROUPED,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0), **_COMMON,
        )  # fmt: skip
    if name == "glm4_moe":
        return transformers.Glm4MoeConfig(
            **_EXPERTS, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.5, use_qk_norm=True,
            attention_bias=True, **_GROUPED, **_COMMON,
        )  # fmt: skip
    if name == "deepseek_v2":
        return transformers.DeepseekV2Config(
            **_EXPERTS, **_MLA, n_group=2, topk_group=1, topk_method="group_limited_greedy", **_COMMON
        )
    groups = dict(n_group=1, topk_group=1) if name == "kimi_k2" else dict(n_group=2, topk_group=1)
    return transformers.DeepseekV3Config(
        **_EXPERTS, **_MLA, **groups, routed_scaling_factor=1.5, norm_topk_prob=True, **_COMMON
    )


# SGLang reads these, transformers does not write them.
_V3 = dict(moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid", ep_size=1)
_UNWRITTEN = {
    "deepseek_v2": dict(
        moe_layer_freq=1, topk_method="group_limited_greedy", scoring_func="softmax", ep_size=1, norm_topk_prob=False,
        routed_scaling_factor=1.0,
    ),
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
}  # fmt: skip


def _add(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}, indent=1))


def _wrap_kimi(language_model: Path, folder: Path) -> None:
    """The same weights below `language_model.`, and a config with a vision tower that no test looks through."""
    temporary = folder.with_name(f".{folder.name}")
    shutil.copytree(language_model, temporary)
    weights = load_file(language_model / "model.safetensors")
    save_file(
        {f"language_model.{name}": weight for name, weight in weights.items()}, temporary / "model.safetensors",
        metadata={"format": "pt"},
    )  # fmt: skip
    text = json.loads((language_model / "config.json").read_text())
    sizes = dict(hidden_size=64, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1)
    vision = {**sizes, **{f"vt_{name}": size for name, size in sizes.items()}, "mm_hidden_size": 64, "text_hidden_size": HIDDEN}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text,
        "vision_config": vision, "torch_dtype": "float32", **_VOCABULARY, "media_placeholder_token_id": VOCAB - 1,
    }  # fmt: skip
    del config["vocab_size"]
    (temporary / "config.json").write_text(json.dumps(config, indent=1))
    about = {"processor_class": "TinyProcessor", "auto_map": {"AutoProcessor": "tiny_processor.TinyProcessor"}}
    (temporary / "processor_config.json").write_text(json.dumps(about))
    (temporary / "tiny_processor.py").write_text(_KIMI_PROCESSOR)
    temporary.rename(folder)


# The real one's processor is Python code in its folder too; SGLang asks it for these, before any picture comes.
_KIMI_PROCESSOR = """\
import types

import transformers


class TinyProcessor:
    def __init__(self, tokenizer):
        self.tokenizer, self.image_processor = tokenizer, None
        about = dict(
            patch_size=14, merge_kernel_size=2, in_patch_limit=64, patch_limit_on_one_side=8,
            image_mean=[0.5] * 3, image_std=[0.5] * 3,
        )
        self.media_processor = types.SimpleNamespace(media_proc_cfg=about)

    @classmethod
    def from_pretrained(cls, path, **options):
        return cls(transformers.AutoTokenizer.from_pretrained(path))

    @classmethod
    def register_for_auto_class(cls, name="AutoProcessor"):
        pass
"""

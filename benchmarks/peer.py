"""The peer's own step, driven from outside: SpecForge as PyPI installs it (`pip install --no-deps specforge`)."""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from train.shape import DrafterShape

DEPTH_DECAY = 0.8  # SpecForge's ploss_decay


def step_function(
    shape: DrafterShape, *, depths: int, head: Tensor, embedding: Tensor, attention: str, compact: bool
) -> tuple[Callable[[dict[str, Tensor]], None], list[Tensor]]:
    """A training step (forward, backward, clip, AdamW on float32 masters) and what must stay alive for it.

    attention  flex_attention (its default) | sdpa        compact  its streamed teacher instead of full logits

    The step takes input_ids, loss_mask, target [B, S, H] (after the final norm), hidden_states [B, S, A*H].
    """
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.optimizer import BF16Optimizer
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        num_hidden_layers=1,
        vocab_size=shape.vocab_size,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_position_embeddings,
        rope_theta=shape.rope_theta,
        hidden_act="silu",
        pad_token_id=0,
        torch_dtype="bfloat16",
    )
    config.draft_vocab_size = shape.draft_vocab_size
    with torch.device(head.device):
        draft = LlamaForCausalLMEagle3(config, attention_backend=attention).to(torch.bfloat16)
    draft.embed_tokens.weight.data = embedding
    draft.embed_tokens.weight.requires_grad_(False)
    draft.t2d.zero_()
    draft.t2d[: shape.draft_vocab_size] = True
    model = OnlineEagle3Model(draft_model=draft, length=depths, attention_backend=attention).train()
    optimizer = BF16Optimizer(draft, lr=1e-4, total_steps=1000)

    def step(batch: dict[str, Tensor]) -> None:
        inputs = {key: batch[key] for key in ("input_ids", "hidden_states")}
        if compact:
            teacher = dict(target=None, target_hidden_for_compact=batch["target"], target_head_weight=head)
        else:
            teacher = dict(target=batch["target"] @ head.T)
        losses, *_ = model(
            **inputs, **teacher, attention_mask=batch["attention_mask"], loss_mask=batch["loss_mask"][..., None]
        )
        sum(DEPTH_DECAY**k * loss for k, loss in enumerate(losses)).backward()
        optimizer.step()

    return step, [draft.lm_head.weight]

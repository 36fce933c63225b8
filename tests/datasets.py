"""A small dataset of a tiny target for the tests of train/: real hidden states, computed by Hugging Face."""

from __future__ import annotations

from pathlib import Path

import torch

from data.boundaries import text_config
from data.hugging_face import transformers
from data.schema import Provenance, Record
from data.shards import ShardWriter
from data.vocab import Vocabulary

BOUNDARIES = [2, 3, 5]


def write_dataset(out: Path, target: Path, *, name: str, train: int = 24, validation: int = 6, seed: int = 0) -> Path:
    """Greedy continuations of random prompts by the target itself, their states at BOUNDARIES, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    vocab_size = text_config(target)["vocab_size"]
    provenance = Provenance.of_target(
        target, name=name, boundaries=BOUNDARIES, codec="fp32", engine="huggingface", engine_version=transformers.__version__
    )
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for split, number in (("train", train), ("validation", validation)):
        with ShardWriter(out, provenance=provenance, split=split, shard_bytes=1 << 20) as writer:
            for i in range(number):
                record = _record(model, f"{split}-{i}", split, generator=generator, vocab_size=vocab_size)
                writer.write(record)
                counts += torch.bincount(record.tokens[record.loss_mask == 1], minlength=vocab_size)
    Vocabulary(counts, torch.tensor([0, 1, 2]), tokenizer_hash=provenance.tokenizer_hash, data_hash="test").save(out)
    return out


@torch.no_grad()
def _record(model, id: str, split: str, *, generator: torch.Generator, vocab_size: int) -> Record:
    prompt = torch.randint(3, vocab_size, (1, int(torch.randint(3, 9, (1,), generator=generator))), generator=generator)
    answer = int(torch.randint(4, 20, (1,), generator=generator))
    tokens = model.generate(prompt, max_new_tokens=answer, min_new_tokens=answer, do_sample=False, pad_token_id=2)
    states = model.model(tokens, output_hidden_states=True)
    mask = torch.arange(tokens.shape[1]) >= prompt.shape[1]
    return Record(
        id=id,
        tokens=tokens[0].int(),
        loss_mask=mask.to(torch.uint8),
        aux=torch.stack([states.hidden_states[b][0] for b in BOUNDARIES], 1),
        last=states.last_hidden_state[0],
        source="test",
        split=split,
    )

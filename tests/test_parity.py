"""Train-serve parity: what training computes about a drafter is what a real SGLang server does with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data.packing import Piece, collate
from data.schema import Record
from data.shards import ShardReader
from data.stream import PackDataset, plan_epoch
from extract.capture import Reference
from extract.fetch import read_drafter_feed, rid_of
from tests.datasets import BOUNDARIES, write_dataset
from tests.packs import small_shape
from tests.targets import HIDDEN, VOCAB, known_pair, serve
from tests.test_extract_capture import on
from train.attention import Documents, dense
from train.evaluate import score_batch
from train.export import export, load_drafter
from train.loss import PLAIN
from train.metrics import Walk
from train.model import Drafter
from train.target import Target
from train.unroll import TrainingTimeTest, counted_rows, unroll

DEPTHS = 3
SHAPE = small_shape(
    hidden_size=HIDDEN, intermediate_size=256, head_dim=32, vocab_size=VOCAB, draft_vocab_size=VOCAB // 2,
    max_position_embeddings=2048, fc_norm=True, norm_output=True,
)  # fmt: skip


def as_batch(reference: Reference, prompt: list[int], answer: list[int]):
    """The record that extraction would make of this conversation, as a pack of its own."""
    tokens = torch.tensor([*prompt, *answer], dtype=torch.int32)
    states = reference.states(tokens)
    record = Record(
        id="parity", tokens=tokens, loss_mask=(torch.arange(len(tokens)) >= len(prompt)).to(torch.uint8),
        aux=torch.stack([states.residual[b] for b in BOUNDARIES], 1), last=states.last, source="test", split="train",
    )  # fmt: skip
    return collate([record], [Piece(0, 0, len(tokens))], pad_to=None)


def offline(drafter: Drafter, target: Target, batch, *, depths: int) -> Walk:
    return score_batch(drafter, target, batch, depths=depths, attend=dense)[0].walks[-1]


@pytest.mark.parametrize("name", ["stands still", "alternates"])
def test_offline_tau_is_what_the_pair_was_constructed_for(name, tmp_path):
    """Where all drafts are right a step yields 4 tokens, where one is 2; test_extract_capture reads both off the server."""
    pair = known_pair(tmp_path)
    weights = load_file(pair.drafter / "model.safetensors")
    plain = replace(SHAPE, fc_norm=False, norm_output=False)
    drafter = Drafter(plain, d2t=weights["d2t"], t2d=weights["t2d"])
    drafter.load_state_dict(weights)
    prompt = dict(pair.prompts)[name]
    batch = as_batch(Reference(pair.target), list(prompt), pair.continuation(prompt, 41))
    target = Target.load(pair.target, device="cpu", dtype=torch.float32)
    found = offline(drafter, target, batch, depths=DEPTHS)
    assert found.tokens == 40
    assert found.tau == pair.tokens_per_step(name, DEPTHS)


@pytest.fixture(scope="module")
def served(tmp_path_factory, tiny_llama):
    """A drafter of a few steps, its export, and what a real server did with it: answers, steps and proposals."""
    folder, target_path = tmp_path_factory.mktemp("parity"), Path(tiny_llama.path)
    shards = write_dataset(folder / "shards", target_path, name="tiny_llama", train=48, validation=8)
    target = Target.load(target_path, device="cpu", dtype=torch.float32)
    trained = train_a_little(target, ShardReader(shards, split="train"))
    export(
        trained.state_dict(), shape=SHAPE, boundaries=BOUNDARIES, depths=DEPTHS, target_name="tiny_llama",
        target_path=target_path, out=folder / "export", engine="sglang", engine_version="0.5.23",
    )  # fmt: skip
    reader = ShardReader(shards, split="validation")
    prompts = []
    for i in range(len(reader)):
        record = reader.read(i)
        prompts.append(record.tokens[: int((record.loss_mask == 0).sum())].tolist())
    with serve(target_path, folder, drafter=folder / "export", num_steps=DEPTHS, feed=True) as server:

        async def work(client):
            return [
                await client.generate(prompt, rid=rid_of(f"parity-{i}"), max_new_tokens=33, ignore_eos=True)
                for i, prompt in enumerate(prompts)
            ]

        answers = on(server, work)
        feeds = [read_drafter_feed(server.capturing.spool, rid_of(f"parity-{i}")) for i in range(len(prompts))]
    reference = Reference(target_path)
    batches = [as_batch(reference, p, a.output_ids) for p, a in zip(prompts, answers, strict=True)]
    drafter, config = load_drafter(folder / "export")
    assert json.loads((folder / "export" / "config.json").read_text()) == config
    return drafter, target, batches, answers, feeds


def train_a_little(target: Target, reader: ShardReader) -> Drafter:
    ids = torch.arange(VOCAB // 2) * 2
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    drafter = Drafter(SHAPE, d2t=ids - torch.arange(VOCAB // 2), t2d=t2d)
    drafter.initialize(target, std=0.02, head_from_target=True, seed=0)
    model = TrainingTimeTest(
        drafter, target, depths=DEPTHS, gamma=0.8, attention=dense, head=PLAIN, dtype=torch.float32
    )
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3, weight_decay=0.0)
    for epoch in range(6):
        plan = plan_epoch(
            reader.lengths, seed=0, epoch=epoch, tokens_per_pack=512, conversations_per_step=8, packs_per_step=None
        )
        for batch in (PackDataset(reader, step, pad_to=None)[0] for step in plan):
            counted = counted_rows(batch, depths=DEPTHS)
            loss, _ = model(batch, Documents.of(batch, counted=counted[0]), counted, counted.sum(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return drafter


@torch.no_grad()
def test_every_draft_of_the_server_is_the_trainers_own_at_its_depth(served):
    """Each verification step of each answer: the chain that was proposed is the trainer's top-1 at depths 0, 1, 2."""
    drafter, target, batches, _, feeds = served
    compared = equal = 0
    for batch, feed in zip(batches, feeds, strict=True):
        every_row = Documents.of(batch, counted=torch.ones_like(batch.loss_mask))
        normed = unroll(drafter, target, batch, every_row, depths=DEPTHS, attention=dense, dtype=torch.float32)
        top1 = drafter.target_ids[(normed @ drafter.lm_head.weight.T).argmax(-1)]  # [K, T]
        tokens = batch.tokens.tolist()
        for position, (last, *chain) in feed.steps:
            row = position - 1
            assert last == tokens[row + 1], "a step starts from the token that the target has just said"
            for depth, draft in enumerate(chain):
                # the trainer forces the record's tokens: the drafts are the same as long as those before were right
                if row + 1 + depth >= len(tokens) or chain[:depth] != tokens[row + 2 : row + 2 + depth]:
                    break
                compared += 1
                equal += draft == int(top1[depth, row])
    assert compared > 200
    assert equal == compared


def test_live_tau_is_offline_tau(served):
    drafter, target, batches, answers, _ = served
    walked = sum((offline(drafter, target, batch, depths=DEPTHS) for batch in batches), Walk.empty(DEPTHS))
    tokens = sum(len(answer.output_ids) - 1 for answer in answers)  # the first of each comes from the prefill
    steps = sum(answer.meta["spec_verify_ct"] for answer in answers)
    assert (walked.tokens, tokens) == (8 * 32, 8 * 32)
    assert walked.tau == pytest.approx(tokens / steps, rel=0.02)
    assert walked.tau > 1.0, "a drafter that never is right would agree by having nothing to agree on"

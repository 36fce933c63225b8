"""Real SGLang servers against Hugging Face: every boundary of three families, and what a drafter is fed."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from data.boundaries import text_config
from data.prompts import NOT_SERVED
from extract.capture import Reference
from extract.client import Client, RequestRefused
from extract.command import WHOLE_ON_CPU, numbers_of
from extract.config import ProbeConfig
from extract.fetch import fetch, read_drafter_feed, rid_of
from extract.probe import probe_drafter, probe_server
from extract.server import Server
from tests.targets import SGLANG_VERSION, VOCAB, known_pair, layer_ids, random_drafter, serve, tiny_target

CHUNK = 32  # tokens of a prefill: longer prompts come in pieces, and pieces of several requests share a batch
LENGTHS = (1, 7, 33, 100, 64, 2)
NUM_STEPS = 3
DRAFTS = pytest.mark.skipif(numbers_of(SGLANG_VERSION) < WHOLE_ON_CPU, reason="this SGLang verifies wrongly on a CPU")
PROBE = ProbeConfig(reference="auto", tolerance=None)


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (length,), generator=generator, dtype=torch.int32) for length in LENGTHS]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def on(server, work):
    """Runs `await work(client)`."""

    async def run():
        async with Client(server.url, timeout_seconds=120) as client:
            return await work(client)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "boundaries", "tensor_parallel"),
    [
        ("tiny_llama", [1, 2, 3, 4, 5], 1),
        ("tiny_qwen3", [1, 2, 3, 4, 5], 1),
        ("tiny_deepseek", [2, 3, 4, 5], 2),  # its ids cannot say a first boundary of 1
    ],
)
def test_captured_states_are_hugging_faces_at_every_boundary(name, boundaries, tensor_parallel, models, tmp_path):
    """All requests at once, in chunks, beside other traffic; <= 1e-4 relative at each boundary and for `last`."""
    target = Path(tiny_target(name, models).path)
    reference = Reference(target)
    sent = sequences()
    with serve(
        target, tmp_path, boundaries=boundaries, tensor_parallel=tensor_parallel,
        extra_args=["--chunked-prefill-size", str(CHUNK)],
    ) as server:  # fmt: skip
        assert server.num_ranks == tensor_parallel

        async def work(client):
            spool = server.capturing.spool
            ours = [
                fetch(client, spool, tokens, rid=rid_of(f"test-{i}"), max_new_tokens=3 * (i % 2))
                for i, tokens in enumerate(sent)
            ]
            others = [
                client.generate(tokens.tolist(), rid=f"other-{i}", max_new_tokens=2) for i, tokens in enumerate(sent)
            ]
            answers = await asyncio.gather(*ours, *others)
            return answers[: len(sent)]

        captured = on(server, work)
        left = sorted(path.name for path in server.capturing.spool.iterdir() if path.is_dir())
        report = probe_server(server, boundaries=boundaries, reference=reference, config=PROBE)
        waiting = processor_share(server, seconds=1.5)
    assert waiting < 0.3, "a server that has nothing to do leaves the cores to others"
    assert left == [], "other clients' requests, and rows taken over, leave nothing in the spool"
    assert report.passed and max(row.error for row in report.rows) <= 1e-4
    for i, (tokens, by_rank) in enumerate(zip(sent, captured)):
        assert list(by_rank) == [0], "of a rid without eyas-all only rank 0 writes"
        states, expected = by_rank[0], reference.states(tokens)
        assert torch.equal(states.tokens, tokens)
        assert states.aux.shape == (len(tokens), len(boundaries), 128), "decoded tokens add no rows"
        for column, boundary in enumerate(boundaries):
            assert relative(states.aux[:, column], expected.residual[boundary]) <= 1e-4, f"boundary {boundary}"
        assert relative(states.last, expected.last) <= 1e-4
        if i % 2:
            assert states.next_token == int((expected.last[-1] @ reference.head.T).argmax())


def test_a_server_takes_all_but_the_last_tokens_of_its_context(models, tmp_path):
    """The longest prompt that stage 1 keeps by itself, and one token more."""
    target = Path(tiny_target("tiny_llama", models).path)
    longest = text_config(target)["max_position_embeddings"] - NOT_SERVED
    tokens = torch.arange(longest + 1, dtype=torch.int32) % VOCAB
    with serve(target, tmp_path, boundaries=[2, 3, 5]) as server:
        captured = on(server, lambda client: fetch(client, server.capturing.spool, tokens[:-1], rid=rid_of("longest")))
        assert len(captured[0].last) == longest
        with pytest.raises(RequestRefused, match="exceeds the maximum allowed length"):
            on(server, lambda client: fetch(client, server.capturing.spool, tokens, rid=rid_of("longer")))


def processor_share(server: Server, *, seconds: float) -> float:
    """Cores that the server's schedulers take, on average of so many seconds."""
    processes = [psutil.Process(json.loads(path.read_text())["pid"]) for path in server.capturing.spool.glob("server-*.json")]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(seconds)
    return sum(sum(process.cpu_times()[:2]) - used for process, used in zip(processes, before)) / seconds


@DRAFTS
def test_live_acceptance_is_what_the_pair_was_constructed_for(tmp_path):
    check_live_acceptance(tmp_path)


def check_live_acceptance(tmp_path: Path, **engine) -> None:
    """41 tokens: the first from the prefill, 40 in steps of 4 where all drafts are right, of 2 where one is."""
    pair = known_pair(tmp_path / "pair")
    with serve(pair.target, tmp_path, drafter=pair.drafter, num_steps=NUM_STEPS, feed=True, **engine) as server:

        async def work(client):
            return [
                await client.generate(list(prompt), rid=rid_of(name.replace(" ", "-")), max_new_tokens=41)
                for name, prompt in pair.prompts
            ]

        answers = on(server, work)
        feeds = [read_drafter_feed(server.capturing.spool, rid_of(name.replace(" ", "-"))) for name, _ in pair.prompts]
    embedding = load_file(pair.target / "model.safetensors")["model.embed_tokens.weight"]
    for (name, prompt), answer, feed in zip(pair.prompts, answers, feeds):
        expected = pair.continuation(prompt, 41)
        assert answer.output_ids == expected
        per_step = pair.tokens_per_step(name, NUM_STEPS)
        assert answer.meta["spec_verify_ct"] == 40 // per_step
        assert answer.meta["spec_accept_length"] == pytest.approx(41 / (40 // per_step))
        # row p of the drafter: the token after p, and the target's states of p, here its embedding thrice
        assert feed.tokens.tolist() == [*prompt[1:], expected[0]]
        assert relative(feed.features, embedding[list(prompt)].repeat(1, 3)) <= 1e-5
        # step n starts where the steps before it have got to, and its drafts are twice-following at every depth
        text = [*prompt, *expected]
        for number, (position, chain) in enumerate(feed.steps):
            assert position == len(prompt) + number * per_step
            assert chain == [text[position], *[pair.continuation((text[position - 1],), 2)[1]] * NUM_STEPS]


@DRAFTS
def test_a_drafter_exported_with_ids_one_too_high_is_refused_by_what_it_is_fed(models, tmp_path):
    """Trained at boundaries 2, 3, 4; its config's ids say 3, 4, 5. What is served is compared, not what is said."""
    target = Path(tiny_target("tiny_llama", models).path)
    drafter = random_drafter(tmp_path / "drafter", layer_ids=layer_ids(target, [3, 4, 5]))
    reference = Reference(target)
    with serve(target, tmp_path, drafter=drafter, num_steps=NUM_STEPS, feed=True) as server:
        with pytest.raises(ValueError, match=r"learnt boundaries \[2, 3, 4\] and is served \[3,4,5\]; export it again"):
            probe_drafter(server, boundaries=[2, 3, 4], reference=reference, config=PROBE)
        assert probe_drafter(server, boundaries=[3, 4, 5], reference=reference, config=PROBE).passed
        prompt = random.Random(0).choices(range(3, VOCAB), k=20)
        answer = on(server, lambda client: client.generate(prompt, rid="other", max_new_tokens=12, ignore_eos=True))
    greedy = list(prompt)
    for _ in range(12):
        greedy.append(int((reference.states(torch.tensor(greedy)).last[-1] @ reference.head.T).argmax()))
    assert answer.output_ids == greedy[20:], "drafts change no token of a greedy answer"

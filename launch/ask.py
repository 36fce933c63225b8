"""One server, started for the purpose, and the questions it answers greedily."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from extract.client import Client
from extract.server import Server
from launch.config import BenchConfig
from launch.live import Answer
from launch.questions import Question


@dataclass(frozen=True)
class Run:
    """Answers in the order of the questions, and the seconds from the first request to the last answer."""

    answers: list[Answer]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(len(answer.tokens) for answer in self.answers) / self.seconds


def ask(
    config: BenchConfig, questions: list[Question], *, target_path: Path, drafter: Path | None, num_drafts: int
) -> Run:
    """Start the target's server, with the drafter where there is one, and put every question to it."""
    name = "with drafts" if drafter else "without"
    with Server(
        target_path,
        engine=config.engine,
        server=config.server,
        out=Path(config.out) / name.replace(" ", "_"),
        drafter=drafter,
        num_drafts=num_drafts,
    ) as server:
        return asyncio.run(answers_of(server.url, questions, config=config, name=name))


async def answers_of(url: str, questions: list[Question], *, config: BenchConfig, name: str) -> Run:
    """`concurrency` questions in flight; the server's first request, which warms it up, is not timed."""
    gate = asyncio.Semaphore(config.concurrency)
    async with Client(url, timeout_seconds=config.server.answer_timeout_seconds) as client:

        async def answer(question: Question, bar: tqdm) -> Answer:
            async with gate:
                reply = await client.generate(
                    question.prompt_ids,
                    rid=f"bench-{question.id}",
                    max_new_tokens=question.num_tokens(config.max_new_tokens),
                    temperature=0.0,
                )
            bar.update(len(reply.output_ids))
            return Answer.of(id=question.id, source=question.source, tokens=reply.output_ids, meta=reply.meta)

        await client.generate(questions[0].prompt_ids, rid="bench-warm-up", max_new_tokens=4, temperature=0.0)
        total = sum(question.num_tokens(config.max_new_tokens) for question in questions)
        with tqdm(total=total, desc=name, unit="token", delay=2) as bar:
            started = time.monotonic()
            answers = await asyncio.gather(*(answer(question, bar) for question in questions))
        return Run(list(answers), time.monotonic() - started)

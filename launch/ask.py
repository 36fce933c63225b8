"""One server, started for the purpose, and the questions it answers greedily."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from extract.client import Client, RequestFailed, RequestRefused, ServerGone
from extract.command import Drafting
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
        """Output tokens of all answers together, over `seconds`."""
        return sum(len(answer.tokens) for answer in self.answers) / self.seconds


def ask(config: BenchConfig, questions: list[Question], *, target_path: Path, drafting: Drafting | None) -> Run:
    """Start the target's server, with the drafter where there is one, put every question to it, and end it.

    Raises ValueError if the server cannot be started, refuses a question, or dies.
    """
    name = "with drafts" if drafting else "without drafts"
    with Server(
        target_path,
        engine=config.engine,
        config=config.server,
        out=Path(config.out) / name.replace(" ", "-"),
        drafting=drafting,
        trust_remote_code=config.target.trust_remote_code,
    ) as server:
        try:
            return asyncio.run(answers_of(server.url, questions, config=config, name=name))
        except ServerGone as error:
            raise server.failure(f"the server {name} is gone ({error})", cure="see its log, then run this again") from error
        except RequestRefused as error:
            raise server.failure(f"the server {name} refused question {error}", cure="leave it out") from error
        except RequestFailed as error:
            raise server.failure(f"the server {name} did not answer question {error}", cure="see its log") from error


async def answers_of(url: str, questions: list[Question], *, config: BenchConfig, name: str) -> Run:
    """`concurrency` questions in flight. A request before them warms the server up, and is not timed.

    name  what the progress bar is called
    Raises ServerGone, RequestFailed, RequestRefused; ValueError for an answer that cannot be counted.
    """
    lengths = [question.num_tokens(config.max_new_tokens) for question in questions]
    gate = asyncio.Semaphore(config.concurrency)
    async with Client(url, timeout_seconds=config.server.answer_timeout_seconds) as client:

        async def answer(question: Question, length: int) -> Answer:
            async with gate:
                try:
                    reply = await client.generate(question.prompt_ids, rid=f"bench-{question.id}", max_new_tokens=length)
                except (RequestFailed, RequestRefused) as error:
                    raise type(error)(f"{question.id}: {error}") from error
            bar.update(len(reply.output_ids))
            return Answer.of(id=question.id, source=question.source, tokens=reply.output_ids, meta=reply.meta)

        with contextlib.suppress(RequestFailed, RequestRefused):  # the question itself tells
            await client.generate(questions[0].prompt_ids, rid="bench-warm-up", max_new_tokens=4)
        with tqdm(total=sum(lengths), desc=name, unit=" tokens", delay=2) as bar:
            started = time.monotonic()
            answers = await asyncio.gather(*map(answer, questions, lengths))
        return Run(list(answers), time.monotonic() - started)

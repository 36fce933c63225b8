"""A thin asynchronous client of SGLang's /generate: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp


class ServerGone(Exception):
    """The server does not answer any more."""


class RequestFailed(Exception):
    """The server answered that it could not serve this request; another try may succeed."""


class RequestRefused(Exception):
    """The server will never serve this request: too long, or malformed."""


@dataclass(frozen=True)
class Answer:
    """output_ids: the new tokens, an end-of-sequence token included; meta: SGLang's meta_info."""

    output_ids: list[int]
    meta: dict[str, Any]

    @property
    def finished(self) -> bool:
        """The answer ended by itself, not at the limit."""
        return self.meta["finish_reason"]["type"] == "stop"


class Client:
    """Requests to one server; use it as `async with Client(url, timeout_seconds=...) as client`."""

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        self.url, self._timeout = url.rstrip("/"), aiohttp.ClientTimeout(total=timeout_seconds)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        # no limit here: the caller knows what a request in flight costs
        self._session = aiohttp.ClientSession(timeout=self._timeout, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._session.close()

    async def generate(
        self,
        input_ids: list[int],
        *,
        rid: str,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        ignore_eos: bool = False,
        uncached: bool = False,
    ) -> Answer:
        """One answer to one prompt of token ids. max_new_tokens 0 is a prefill only.

        uncached: computes every token of the prompt, also those that the server has seen before.

        Raises ServerGone, RequestFailed, RequestRefused.
        """
        sampling: dict[str, Any] = {
            "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "ignore_eos": ignore_eos,
        }  # fmt: skip
        if seed is not None:
            sampling["sampling_seed"] = seed
        content = {"input_ids": input_ids, "rid": rid, "sampling_params": sampling}
        if uncached:
            content["extra_key"] = _unused_key()
        return _answer(await self._ask(content))

    async def prefill(self, prompts: Sequence[list[int]], *, rids: Sequence[str]) -> list[Answer | RequestFailed]:
        """Computes every token of every prompt, in one request: a server takes 3 ms for a request, 1 for a prompt of one.

        What a prompt failed with stands in its place. Raises ServerGone, and RequestFailed or RequestRefused of all.
        """
        said = await self._ask({
            "input_ids": list(prompts), "rid": list(rids), "extra_key": [_unused_key() for _ in prompts],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        })  # fmt: skip
        answers: list[Answer | RequestFailed] = []
        for one in said:
            try:
                answers.append(_answer(one))
            except RequestFailed as error:
                answers.append(error)
        return answers

    async def _ask(self, content: dict[str, Any]) -> Any:
        try:
            async with self._session.post(f"{self.url}/generate", json=content) as answer:
                if answer.status == 400:
                    raise RequestRefused(_message(await answer.text()))
                if answer.status != 200:
                    raise RequestFailed(f"status {answer.status}: {_message(await answer.text())}")
                return await answer.json()
        except asyncio.TimeoutError as error:
            raise RequestFailed(f"no answer within {self._timeout.total:.0f} s") from error
        except aiohttp.ClientError as error:
            said = f"{self.url}: {error or type(error).__name__}"
            raise (RequestFailed(said) if await self._is_there() else ServerGone(said)) from error

    async def _is_there(self) -> bool:
        """Whether the server answers at all: a connection may be lost, idle too long, and the server be well."""
        try:
            async with self._session.get(f"{self.url}/model_info", timeout=aiohttp.ClientTimeout(total=10)):
                return True
        except (aiohttp.ClientError, asyncio.TimeoutError):
            return False


def _answer(said: dict[str, Any]) -> Answer:
    """Raises RequestFailed if the server gave up on it."""
    reason = said["meta_info"]["finish_reason"]
    if reason["type"] == "abort":
        raise RequestFailed(reason.get("message") or "aborted")
    return Answer(output_ids=said["output_ids"], meta=said["meta_info"])


def _unused_key() -> str:
    """A part of the radix cache that nothing is in."""
    return uuid.uuid4().hex


def _message(text: str) -> str:
    return " ".join(text.split())[:500]

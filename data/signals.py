"""Signals that end a run: SIGTERM, Ctrl-C, and a terminal that is closed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def heard(by: Callable[[int, FrameType | None], None]) -> Iterator[dict[signal.Signals, Any]]:
    """Inside, these signals call `by`; what the caller ignores (nohup) stays so. Gives the handlers that were there before."""
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, by) for number in numbers}
    try:
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def told_to_end(kept: str | Callable[[], str]) -> Iterator[None]:
    """Inside, such a signal ends the run with one line, which ends with `kept`: what of it is there, and what to do.
    Servers that were started inside go with it. An asyncio loop ends between two callbacks; told twice, it ends at once.
    """
    told: list[signal.Signals] = []

    def end(number: int, frame: FrameType | None) -> None:
        told.append(signal.Signals(number))
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is None or len(told) > 1:
            sys.exit(128 + number)
        # raised here it may land in a callback of a library that takes every exception for its connection's
        loop.call_soon_threadsafe(sys.exit, 128 + number)

    with heard(end):
        try:
            yield
            if told:  # as the last loop was about to end
                sys.exit(128 + told[0])
        except SystemExit:
            if told and os.environ.get("RANK", "0") == "0":
                words = kept if isinstance(kept, str) else kept()
                print(f"ended by {told[0].name}: {words}", file=sys.stderr, flush=True)
            raise

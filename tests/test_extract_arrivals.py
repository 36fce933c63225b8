"""Rows that come into the spool reach the requests that wait for them, and nothing else stays there."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
import torch

from extract import spool
from extract.arrivals import RUN, Arrivals

numbers = itertools.count()


def write(folder: Path, *whose: tuple[str, int, int], rank: int = 0) -> None:
    """A piece with rows of these (rid, start, count); a row's token is its number in the request."""
    tokens = torch.cat([torch.arange(start, start + count, dtype=torch.int32) for _, start, count in whose])
    states = tokens.float()[:, None] + 100 * rank
    spool.write_piece(
        folder, whose, number=next(numbers), rank=rank, tokens=tokens, aux=states[:, None].contiguous(), last=states
    )


def rid(name: str) -> str:
    return f"eyas-{RUN}-{name}"


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, timeout=20))


async def nothing_left(folder: Path) -> None:
    while list(folder.iterdir()):
        await asyncio.sleep(0.01)


def test_rows_come_in_any_order_from_several_pieces_and_ranks(tmp_path):
    async def ask():
        with Arrivals.at(tmp_path).awaiting({rid("a"): 6, rid("b"): 2}, num_ranks=2) as awaited:
            write(tmp_path, (rid("a"), 4, 2), (rid("b"), 0, 2))
            write(tmp_path, (rid("a"), 0, 4))
            write(tmp_path, (rid("b"), 0, 2), rank=1)
            await awaited[rid("b")].here
            while awaited[rid("a")].sizes != {0: 6}:  # the pieces are read side by side
                await asyncio.sleep(0.01)
            assert not awaited[rid("a")].here.done()
            write(tmp_path, (rid("a"), 0, 6), rank=1)
            await awaited[rid("a")].here
            return {name: await one.rows() for name, one in awaited.items()}

    found = run(ask())
    for name, count in ((rid("a"), 6), (rid("b"), 2)):
        assert sorted(found[name]) == [0, 1]
        for rank, rows in found[name].items():
            assert rows.tokens.tolist() == list(range(count)) and rows.start == 0 and rows.finite
            assert rows.aux[:, 0, 0].tolist() == rows.last[:, 0].tolist() == [100 * rank + i for i in range(count)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("second", [(3, 3), (1, 4)])
def test_rows_that_are_missing_or_came_twice_are_an_error(tmp_path, second):
    async def ask():
        with Arrivals.at(tmp_path).awaiting({rid("a"): 5}) as awaited:
            write(tmp_path, (rid("a"), 0, 2))
            write(tmp_path, (rid("a"), *second))
            await awaited[rid("a")].here
            await awaited[rid("a")].rows()

    with pytest.raises(ValueError, match="are missing, or came twice"):
        run(ask())


def test_what_nobody_waits_for_is_removed_and_what_another_run_asked_for_is_not(tmp_path):
    async def ask():
        with Arrivals.at(tmp_path).awaiting({rid("a"): 5}) as awaited:
            write(tmp_path, (rid("late"), 0, 3))
            await nothing_left(tmp_path)
            write(tmp_path, ("eyas-other-a", 0, 3))
            write(tmp_path, (rid("late"), 3, 1), (rid("a"), 0, 5))
            await awaited[rid("a")].here
        write(tmp_path, (rid("a"), 0, 5))  # once more, when it has ended

    run(ask())
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("piece-other-")


def test_a_damaged_piece_is_told_of_and_removed(tmp_path, caplog):
    async def ask():
        with Arrivals.at(tmp_path).awaiting({rid("a"): 5}) as awaited:
            (tmp_path / f"piece-{RUN}-1-000000000.safetensors").write_bytes(b"1234")
            await nothing_left(tmp_path)
            assert not awaited[rid("a")].here.done()
            write(tmp_path, (rid("a"), 0, 5))
            await awaited[rid("a")].here

    run(ask())
    assert f"piece-{RUN}-1-000000000.safetensors cannot be read" in caplog.text


def test_each_loop_has_arrivals_of_its_own(tmp_path):
    """As extraction has one for the probe, and one for each split."""

    async def ask():
        assert Arrivals.at(tmp_path) is Arrivals.at(tmp_path)
        with Arrivals.at(tmp_path).awaiting({rid("a"): 1}) as awaited:
            write(tmp_path, (rid("a"), 0, 1))
            await awaited[rid("a")].here
        return Arrivals.at(tmp_path)

    assert run(ask()) is not run(ask())

"""What launch/ reads out of a live server's answers, by hand."""

from __future__ import annotations

import math

import pytest

from launch.ask import Run
from launch.bench import speeds, verdict
from launch.live import Answer, Tally, by_source, first_difference


def answer(id: str, *, tokens: int, steps: int, histogram=(), source="facts") -> Answer:
    return Answer(id=id, source=source, tokens=tuple(range(tokens)), steps=steps, histogram=tuple(histogram))


def test_the_first_token_of_an_answer_needs_no_verification():
    """11 tokens: 1 from the prefill, 10 in 4 steps: 2.5 a step, where the server's own figure says 2.75."""
    tally = Tally.of([answer("a", tokens=11, steps=4)])
    assert tally.tau == 2.5
    assert tally.server_accept_length == 2.75


def test_tau_weighs_steps_and_not_answers():
    """(10 + 2) tokens in (2 + 2) steps is 3; the mean of the answers' own 5 and 1 is also 3, so lengths differ:
    (10 + 4) in (2 + 4) is 14/6, where the mean of 5 and 1 would stay 3."""
    tally = Tally.of([answer("a", tokens=11, steps=2), answer("b", tokens=5, steps=4)])
    assert tally.tau == pytest.approx(14 / 6)


def test_histograms_of_different_width_add_up():
    tally = Tally.of([answer("a", tokens=3, steps=2, histogram=[2]), answer("b", tokens=9, steps=3, histogram=[0, 1, 2])])
    assert tally.histogram == (2, 1, 2)


def test_no_steps_give_nan_and_not_zero():
    """An answer of one token, or a server that does not draft."""
    assert math.isnan(Tally.of([answer("a", tokens=1, steps=0)]).tau)
    assert math.isnan(Tally.of([]).server_accept_length)


def test_sources_are_told_apart():
    tallies = by_source([answer("a", tokens=5, steps=2), answer("b", tokens=9, steps=2, source="maths")])
    assert {name: tally.tau for name, tally in tallies.items()} == {"facts": 2.0, "maths": 4.0}


def test_a_reply_of_the_server_becomes_an_answer():
    meta = {"completion_tokens": 3, "spec_verify_ct": 1, "spec_correct_drafts_histogram": [0, 1]}
    assert Answer.of(id="a", source="facts", tokens=[7, 8, 9], meta=meta) == Answer("a", "facts", (7, 8, 9), 1, (0, 1))
    assert Answer.of(id="a", source="facts", tokens=[7], meta={"completion_tokens": 1}).steps == 0


def test_a_server_that_counts_other_tokens_than_it_sends_is_refused():
    with pytest.raises(ValueError, match="counts 4 tokens in its answer to a, 3 came"):
        Answer.of(id="a", source="facts", tokens=[7, 8, 9], meta={"completion_tokens": 4})


def test_equal_answers_have_no_difference():
    assert first_difference({"a": (1, 2), "b": ()}, {"a": (1, 2), "b": ()}) is None


def test_the_first_difference_is_named():
    found, expected = {"a": (1, 2), "b": (4, 5, 6)}, {"a": (1, 2), "b": (4, 7, 6)}
    assert first_difference(found, expected) == {"id": "b", "position": 1, "found": 5, "expected": 7}


def test_an_answer_that_ends_early_differs_where_it_ends():
    assert first_difference({"a": (1,)}, {"a": (1, 2)}) == {"id": "a", "position": 1, "found": None, "expected": 2}


def test_a_drafter_that_slows_serving_down_is_told_to_be_taken_away():
    """2.5 tokens a step sound well; but 100 tokens took 8 s with drafts and 4 s without: a step costs five plain ones."""
    drafted, plain = (Run([answer("a", tokens=100, steps=40)], seconds) for seconds in (8.0, 4.0))
    summary = {"tau": 2.5, "steps": 40, "num_drafts": 3, **speeds(drafted, plain, tau=2.5)}
    assert (summary["speedup"], summary["break_even_tau"]) == (0.5, 5.0)
    assert verdict(summary).startswith("SLOWER WITH DRAFTS, 0.50 x: a step with 3 drafts takes as long as 5.00 without")
    assert "compare fewer drafts" in verdict(summary)
    assert verdict(summary | {"num_drafts": 1}).endswith("yields 2.50 tokens. Do not serve it like this; compare other loads (concurrency=)")
    faster = {"tau": 2.5, "steps": 40, "num_drafts": 3, **speeds(plain, drafted, tau=2.5)}
    assert verdict(faster).startswith("2.00 x as fast with drafts: a step with 3 drafts takes as long as 1.25 without")


def test_where_nothing_was_drafted_no_speed_is_judged():
    """The end-of-turn token came first, each time: nan tokens a step are neither fast nor slow."""
    runs = [Run([answer("a", tokens=1, steps=0)], seconds) for seconds in (2.0, 1.0)]
    tau = float("nan")
    assert verdict({"tau": tau, "steps": 0, "num_drafts": 3, **speeds(*runs, tau=tau)}).startswith("nothing was drafted")


def test_without_a_run_to_compare_with_there_is_no_speedup():
    found = speeds(Run([answer("a", tokens=100, steps=40)], 8.0), None, tau=2.5)
    assert found["tokens_per_second"] == 12.5 and found["speedup"] is None and found["break_even_tau"] is None

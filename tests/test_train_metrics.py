"""The walk, step by step on paper."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from train.metrics import DepthSums, walk


def test_a_walk_on_paper():
    """Ten tokens, the answer is x_3 .. x_9; x_3 comes from prefill, six remain.

    Step 1 at row 2: two drafts right -> x_4 x_5 and the target's own x_6. Step 2 at row 5: none right -> x_7.
    Step 3 at row 6: all three right, but only x_8 and x_9 are left. 6 tokens in 3 steps.
    """
    right = np.zeros((10, 3), dtype=bool)
    right[2] = [True, True, False]
    right[5] = [False, True, True]
    right[6] = [True, True, True]
    result = walk(right, np.arange(10) >= 3)
    assert (result.tokens, result.steps) == (6, 3)
    assert result.tau == 2.0
    assert result.histogram == (1, 0, 2, 0)  # the last step could accept two: no more were wanted


def test_fewer_drafts_walk_other_steps():
    """The same ten tokens with one draft a step. Row 2: x_4 x_5; row 4: x_6; row 5: x_7; row 6: x_8 x_9. 6 tokens in 4 steps."""
    right = np.zeros((10, 3), dtype=bool)
    right[2] = [True, True, False]
    right[6] = [True, True, True]
    result = walk(right[:, :1], np.arange(10) >= 3)
    assert (result.tokens, result.steps, result.histogram) == (6, 4, (2, 2))


def test_always_right_gives_k_plus_1_and_never_right_gives_1():
    mask = np.arange(42) >= 1  # x_1 from prefill, 40 tokens to generate
    assert walk(np.ones((42, 3), dtype=bool), mask).tau == 4.0
    assert walk(np.zeros((42, 3), dtype=bool), mask).tau == 1.0


def test_each_turn_of_the_assistant_is_a_generation_of_its_own():
    """Two answers of three tokens, one from prefill each: 2 + 2 tokens; a step never runs into the next turn."""
    mask = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1, 1], dtype=bool)
    result = walk(np.ones((10, 7), dtype=bool), mask)
    assert (result.tokens, result.steps) == (4, 2)


def test_a_turn_of_one_token_needs_no_step():
    result = walk(np.ones((3, 2), dtype=bool), np.array([0, 0, 1], dtype=bool))
    assert result.steps == 0 and math.isnan(result.tau)


def test_walks_add_up_by_tokens_and_steps_not_by_their_means():
    mask = np.arange(9) >= 1
    long, short = walk(np.ones((9, 1), dtype=bool), mask), walk(np.zeros((3, 1), dtype=bool), mask[:3])
    assert (long + short).tau == pytest.approx((7 + 1) / (4 + 1))


def test_acc_is_conditional_and_a_token_beyond_the_draft_vocabulary_stays_in_the_denominator():
    """Four rows; depth 0 hits two; depth 1 hits one of those two and one that depth 0 missed, which is not reached."""
    sums = DepthSums.of(
        counted=torch.ones(2, 4) > 0,
        entropy=torch.tensor([[2.0] * 4, [1.0] * 4]),
        hits=torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]]) > 0,
        alpha=torch.tensor([[0.5] * 4, [0.25] * 4]),
    )
    assert sums.means() == {"loss": [2.0, 1.0], "acc": [0.5, 0.5], "alpha": [0.5, 0.25]}


def test_rows_that_nothing_counts_do_not_spoil_a_sum():
    nan = float("nan")
    counted = torch.tensor([[True, False]])
    sums = DepthSums.of(
        counted=counted, entropy=torch.tensor([[1.0, nan]]), hits=counted, alpha=torch.tensor([[0.5, nan]])
    )
    assert sums.means() == {"loss": [1.0], "acc": [1.0], "alpha": [0.5]}

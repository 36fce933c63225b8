"""Wrong wiring is caught and called by its name. The right states come from Hugging Face itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data.hugging_face import transformers
from extract.capture import Captured, Reference, States, head_weight, reference_fits
from extract.fetch import DrafterFeed
from extract.probe import check_drafter_feed, probe_tokens
from extract.wiring import check_ranks, check_states
from tests.targets import VOCAB

BOUNDARIES = [2, 3, 5]
CURE = "set target.boundaries={found}"


@pytest.fixture(scope="module")
def target(tiny_llama) -> Path:
    return Path(tiny_llama.path)


@pytest.fixture(scope="module")
def reference(target) -> Reference:
    return Reference(target)


@pytest.fixture(scope="module")
def sequences():
    return probe_tokens(VOCAB)


@pytest.fixture(scope="module")
def states(reference, sequences) -> list[States]:
    return [reference.states(tokens) for tokens in sequences]


def captured(states, sequences, *, boundaries=BOUNDARIES, last=None, next_tokens=None):
    """What a server would hand out if its layer ids really meant `boundaries`."""
    return [
        Captured(
            tokens=tokens,
            aux=torch.stack([state.residual[b] for b in boundaries], dim=1),
            last=state.last if last is None else last(state),
            next_token=None if next_tokens is None else next_tokens[i],
        )
        for i, (state, tokens) in enumerate(zip(states, sequences))
    ]


def check(captured, states, **changes):
    options = {"boundaries": BOUNDARIES, "head": None, "where": "shards/tiny", "cure": CURE, **changes}
    return check_states(captured, states, **options)


def test_the_reference_is_hugging_faces_hidden_states(target, reference, states, sequences):
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        output = model(sequences[1].long()[None], output_hidden_states=True)
    for boundary in range(6):
        torch.testing.assert_close(states[1].residual[boundary], output.hidden_states[boundary][0])
    torch.testing.assert_close(states[1].last, output.hidden_states[6][0])
    torch.testing.assert_close(states[1].last @ reference.head.T, output.logits[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.model.norm(states[1].residual[6]), states[1].last, atol=1e-6, rtol=1e-5)
    assert torch.equal(head_weight(target), model.lm_head.weight) and reference_fits(target)


def test_right_wiring_passes_and_the_table_shows_the_first_five_values(states, sequences):
    report = check(captured(states, sequences), states)
    assert report.passed and report.num_tokens == 90
    assert [row.name for row in report.rows] == ["boundary 2", "boundary 3", "boundary 5", "last"]
    five = states[0].residual[2][0, :5]
    assert report.rows[0].first == five.tolist() == report.rows[0].expected
    assert f"{five[0]:.3f}" in report.table() and all(row.error == 0 for row in report.rows)


def test_sixteen_bit_rounding_passes(states, sequences):
    rounded = [
        Captured(tokens=c.tokens, aux=c.aux.bfloat16(), last=c.last.bfloat16()) for c in captured(states, sequences)
    ]
    assert check(rounded, states).passed


@pytest.mark.parametrize("shift", [-1, 1])
def test_states_one_boundary_off_are_refused_by_the_boundary_they_really_are(states, sequences, shift):
    true = [boundary + shift for boundary in [2, 3, 4]]
    report = check(captured(states, sequences, boundaries=true), states, boundaries=[2, 3, 4])
    with pytest.raises(ValueError, match=f"what should be boundary 2 is boundary {2 + shift}"):
        report.require_passed()
    assert f"set target.boundaries={str(true).replace(' ', '')}" in report.problems[0]
    assert "shards/tiny" in report.problems[0]


def test_only_the_boundary_that_is_wrong_is_named(states, sequences):
    report = check(captured(states, sequences, boundaries=[2, 3, 4]), states)
    assert "boundary 5 is boundary 4" in report.problems[0] and "boundary 2 is" not in report.problems[0]
    assert "target.boundaries=[2,3,4]" in report.problems[0]


def test_pre_norm_states_given_as_last_are_called_that(states, sequences):
    report = check(captured(states, sequences, last=lambda state: state.residual[6]), states)
    with pytest.raises(ValueError, match="last should be the hidden state after the final norm and is boundary 6"):
        report.require_passed()
    assert "before that norm" in report.problems[0]


def test_pre_norm_states_given_as_last_are_caught_without_a_reference_too(target, reference, states, sequences):
    """The head of a target whose norm changes directions does not find its own next token in un-normed states."""
    logits = [state.last[-1] @ reference.head.T for state in states]
    next_tokens = [int(row.argmax()) for row in logits]
    head = head_weight(target)
    assert check(captured(states, sequences, next_tokens=next_tokens), None, head=head).passed
    pre_norm = captured(states, sequences, last=lambda state: state.residual[6], next_tokens=next_tokens)
    with pytest.raises(ValueError, match="head\\(last\\) says"):
        check(pre_norm, None, head=head).require_passed()


def test_rows_of_the_neighbouring_token_are_called_that(states, sequences):
    shifted = [
        Captured(tokens=c.tokens, aux=c.aux.roll(1, dims=0), last=c.last) for c in captured(states, sequences)
    ]
    with pytest.raises(ValueError, match="boundary 2 is boundary 2 of the token before"):
        check(shifted, states).require_passed()


def test_states_of_nothing_known_are_refused_without_a_cure_that_would_hide_it(states, sequences):
    noise = [
        Captured(tokens=c.tokens, aux=torch.randn_like(c.aux), last=c.last) for c in captured(states, sequences)
    ]
    report = check(noise, states)
    assert "none of the boundaries" in report.problems[0] and "do not train on it" in report.problems[0]


def test_lost_rows_and_values_that_are_not_finite_are_refused(states, sequences):
    good = captured(states, sequences)
    lost = [Captured(tokens=good[0].tokens, aux=good[0].aux[:-1], last=good[0].last[:-1])]
    assert "rows or boundaries are lost" in check(lost, states).problems[0]
    broken = good[0].aux.clone()
    broken[0, 0, 0] = float("nan")
    assert "not finite" in check([Captured(tokens=good[0].tokens, aux=broken, last=good[0].last)], states).problems[0]


def test_ranks_that_disagree_are_refused(states, sequences):
    whole = captured(states, sequences)[0]
    partial = Captured(tokens=whole.tokens, aux=whole.aux * 0.5, last=whole.last)
    assert check_ranks({0: whole, 1: whole}) == []
    assert "rank 1" in check_ranks({0: whole, 1: partial})[0] and "partial sums" in check_ranks({0: whole, 1: partial})[0]


# ---- what a drafter is fed ----------------------------------------------------------------------


def fed(states, sequences, *, boundaries, next_token=9):
    return [
        DrafterFeed(
            tokens=torch.cat([tokens[1:], torch.tensor([next_token], dtype=torch.int32)]),
            features=torch.cat([state.residual[b] for b in boundaries], dim=-1),
            steps=[],
        )
        for state, tokens in zip(states, sequences)
    ]


def check_feed(feeds, states, sequences):
    return check_drafter_feed(feeds, sequences, states, boundaries=BOUNDARIES, where="what the server feeds")


def test_a_drafter_fed_its_own_boundaries_passes(states, sequences):
    assert check_feed(fed(states, sequences, boundaries=BOUNDARIES), states, sequences).passed


def test_layer_ids_shifted_by_one_at_export_are_refused_by_the_boundaries_served(states, sequences):
    report = check_feed(fed(states, sequences, boundaries=[3, 4, 5][:2] + [6]), states, sequences)
    with pytest.raises(ValueError, match="learnt boundaries \\[2, 3, 5\\] and is served \\[3,4,6\\]; export it again"):
        report.require_passed()


def test_a_drafter_fed_the_prompts_own_tokens_instead_of_the_next_ones_is_refused(states, sequences):
    feeds = [
        DrafterFeed(tokens=tokens, features=feed.features, steps=[])
        for feed, tokens in zip(fed(states, sequences, boundaries=BOUNDARIES), sequences)
    ]
    assert "row p is not fed token p + 1" in check_feed(feeds, states, sequences).problems[0]

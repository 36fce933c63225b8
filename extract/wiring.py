"""Are captured states what their names say? The comparison of the wiring probe: arrays in, a report out."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from extract.capture import Captured, States

TOLERANCE = {torch.float32: 1e-3}  # relative error of a sequence; 16-bit states differ by 0.2 to 1.5 %
TOLERANCE_16_BIT = 5e-2
LOGIT_TOLERANCE = {torch.float32: 1e-4}  # of the largest logit: two tokens closer than that are a tie
LOGIT_TOLERANCE_16_BIT = 2e-2
LAST = "last"


@dataclass(frozen=True)
class Row:
    """One line of the table: a boundary, or `last`, of all sequences together.

    first     the first five values of the first token, the server's
    expected  the same five of the reference; None without one
    norm      mean over tokens, the server's
    error     relative to the reference, of the worst sequence; None without one
    """

    name: str
    first: list[float]
    expected: list[float] | None
    norm: float
    error: float | None


@dataclass
class Report:
    """What a probe found; `problems` is empty where the wiring is right."""

    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def passed(self) -> bool:
        return not self.problems

    def table(self) -> str:
        """The rows as text, one boundary in two lines where there is a reference."""
        lines = [f"{'':>12} {'first five values of the first token':<46} {'norm':>9} {'rel. error':>10}"]
        for row in self.rows:
            error = "" if row.error is None else f"{row.error:10.1e}"
            lines.append(f"{row.name:>12} {_five(row.first):<46} {row.norm:9.3f} {error:>10}")
            if row.expected is not None:
                lines.append(f"{'reference':>12} {_five(row.expected):<46}")
        return "\n".join(lines)

    def require_passed(self) -> None:
        """Raises ValueError with the first problem, which names the cure."""
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            raise ValueError(self.problems[0] + more)


def check_states(
    captured: list[Captured],
    reference: list[States] | None,
    *,
    boundaries: list[int],
    head: Tensor | None,
    where: str,
    cure: str,
    tolerance: float | None = None,
) -> Report:
    """Compares captured sequences with the reference's, boundary by boundary.

    head   [V, H] of the target, to compare head(last) with the server's own next token; None: not compared
    where  what holds the states, for the messages: "the server", "shards/kimi"
    cure   what to do if the boundaries are not what they are called; {found} stands for what they really are
    """
    report = Report(num_tokens=sum(len(sequence.tokens) for sequence in captured))
    for i, sequence in enumerate(captured):
        num_tokens = len(reference[i].last) if reference else len(sequence.tokens)
        _check_shapes(sequence, num_tokens, num_boundaries=len(boundaries), where=where, report=report)
    if report.problems:
        return report
    columns = [(f"boundary {boundary}", boundary, i) for i, boundary in enumerate(boundaries)]
    if captured[0].last is not None:
        columns.append((LAST, LAST, None))
    found: dict[str, str | int | None] = {}  # what a wrong column really is
    for name, key, i in columns:
        states = [(s.last if i is None else s.aux[:, i]).float() for s in captured]
        limit = tolerance or TOLERANCE.get(captured[0].aux.dtype, TOLERANCE_16_BIT)
        expected = [_state(r, key) for r in reference] if reference else None
        error = _worst_error(states, expected) if expected else None
        report.rows.append(
            Row(
                name=name,
                first=states[0][0, :5].tolist(),
                expected=expected[0][0, :5].tolist() if expected else None,
                norm=float(torch.cat(states).norm(dim=-1).mean()),
                error=error,
            )
        )
        if error is not None and not error <= limit:
            found[name] = _identify(states, reference, limit=limit)
    report.problems += _explain(found, boundaries=boundaries, where=where, cure=cure, report=report)
    if head is not None:
        report.problems += _check_next_tokens(captured, head, where=where)
    return report


def _check_shapes(
    sequence: Captured, num_tokens: int, *, num_boundaries: int, where: str, report: Report
) -> None:
    states = [sequence.aux] if sequence.last is None else [sequence.aux, sequence.last]
    if {len(tensor) for tensor in states} != {num_tokens} or sequence.aux.shape[1] != num_boundaries:
        report.problems.append(
            f"{where} has states of shape {[list(tensor.shape) for tensor in states]} for {num_tokens} tokens and "
            f"{num_boundaries} boundaries: rows or boundaries are lost, extract again"
        )
    elif not all(tensor.isfinite().all() for tensor in states):
        report.problems.append(f"{where} has states that are not finite: serve the target in another engine.dtype")


def _state(states: States, key: str | int) -> Tensor:
    return states.last if key == LAST else states.residual[key]


def _worst_error(states: list[Tensor], expected: list[Tensor]) -> float:
    """Largest ||a - b|| / ||b|| over the sequences; inf where a shape differs."""
    errors = [
        float((a - b).norm() / b.norm()) if a.shape == b.shape else float("inf") for a, b in zip(states, expected)
    ]
    return max(errors)


def _identify(states: list[Tensor], reference: list[States], *, limit: float) -> str | int | None:
    """What the states really are: a boundary, "last", either of these with rows shifted, or None."""
    keys = [*reference[0].residual, LAST]
    errors = {key: _worst_error(states, [_state(r, key) for r in reference]) for key in keys}
    best = min(errors, key=errors.get)
    if errors[best] <= limit:
        return best
    for key in keys:
        rows = [_state(r, key) for r in reference]
        if _worst_error([s[1:] for s in states], [r[:-1] for r in rows]) <= limit:
            return f"{_name(key)} of the token before"
        if _worst_error([s[:-1] for s in states], [r[1:] for r in rows]) <= limit:
            return f"{_name(key)} of the token after"
    return None


def _name(key: str | int) -> str:
    return key if isinstance(key, str) else f"boundary {key}"


def _explain(
    found: dict[str, str | int | None], *, boundaries: list[int], where: str, cure: str, report: Report
) -> list[str]:
    """One problem for all boundaries that are something else, and one for a `last` that is."""
    errors = {row.name: row.error for row in report.rows}
    problems = []
    wrong = {name: what for name, what in found.items() if name != LAST}
    if wrong:
        said = ", ".join(
            f"what should be {name} is {_name(what) if what is not None else 'none of the boundaries'} "
            f"(relative error {errors[name]:.1e})"
            for name, what in wrong.items()
        )
        truly = [wrong.get(f"boundary {boundary}", boundary) for boundary in boundaries]
        known = all(isinstance(boundary, int) for boundary in truly)
        remedy = cure.format(found=str(truly).replace(" ", "")) if known else "do not train on it; please report this"
        problems.append(f"in {where}, {said}: {remedy}")
    if LAST in found:
        what = found[LAST]
        problems.append(
            f"in {where}, last should be the hidden state after the final norm and is "
            + (f"{_name(what)}" if what is not None else "something else")
            + (", the residual stream before that norm" if isinstance(what, int) else "")
            + f" (relative error {errors[LAST]:.1e}): the drafter would learn a wrong teacher, extract again with a "
            "server whose LogitsProcessor gets normed states"
        )
    return problems


def _check_next_tokens(captured: list[Captured], head: Tensor, *, where: str) -> list[str]:
    """argmax(head(last)) must be the server's own next token; within rounding, a tie is not a mismatch."""
    problems = []
    for sequence in captured:
        if sequence.next_token is None or sequence.last is None:
            continue
        logits = head.float() @ sequence.last[-1].float()  # [V]
        gap = float(logits.max() - logits[sequence.next_token])
        if gap > LOGIT_TOLERANCE.get(sequence.last.dtype, LOGIT_TOLERANCE_16_BIT) * float(logits.abs().max()):
            problems.append(
                f"{where} continues {len(sequence.tokens)} tokens with {sequence.next_token}, head(last) says "
                f"{int(logits.argmax())}: last is not what the head reads; was the target's final norm or head changed?"
            )
    return problems


def check_ranks(by_rank: dict[int, Captured]) -> list[str]:
    """All tensor-parallel ranks must hold the same states; else a sum over ranks was captured before it was made."""
    first = by_rank[min(by_rank)]
    problems = []
    for rank, other in by_rank.items():
        for name in ("aux", "last"):
            a, b = getattr(first, name).float(), getattr(other, name).float()
            error = float((a - b).norm() / a.norm()) if a.shape == b.shape else float("inf")
            if not error <= TOLERANCE.get(first.last.dtype, TOLERANCE_16_BIT):
                problems.append(
                    f"rank {rank} of the server holds another {name} than rank {min(by_rank)} (relative error "
                    f"{error:.1e}): partial sums were captured, start the server without all-reduce fusion"
                )
    return problems


def _five(values: list[float]) -> str:
    return " ".join(f"{value:8.3f}" for value in values)

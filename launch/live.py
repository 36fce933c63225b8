"""What a live server's answers say: acceptance length, histogram, and whether two runs wrote the same tokens.

SGLang's own figure, `spec_accept_length`, is completion tokens / verification steps. The first token of an
answer comes from the prefill, without a verification, so that this figure is high by about one token an
answer. `tau` here leaves the first token out, which is what train/evaluate.py computes offline: these two
are compared. Source: SGLang 0.5.23, srt/managers/tokenizer_manager.py (_calculate_spec_decoding_metrics) and
srt/managers/scheduler_components/batch_result_processor.py (_resolve_spec_v2_tokens).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """One greedy answer of the server.

    id, source  of its question
    tokens     ids, the end-of-turn token included where there is one
    steps      verification steps, 0 without a drafter
    histogram  steps that found 0, 1, .. drafts right, as the server counts: a last step whose right drafts
               reach beyond the end of the answer counts them all
    """

    id: str
    source: str
    tokens: tuple[int, ...]
    steps: int
    histogram: tuple[int, ...]

    @classmethod
    def of(cls, *, id: str, source: str, tokens: list[int], meta: dict) -> Answer:
        """From a /generate reply. Raises ValueError if the server's count of tokens is not the tokens' number."""
        if meta["completion_tokens"] != len(tokens):
            raise ValueError(
                f"the server counts {meta['completion_tokens']} tokens in its answer to {id}, {len(tokens)} came: "
                "its accept length would be wrong; use SGLang 0.5.23"
            )
        histogram = tuple(meta.get("spec_correct_drafts_histogram", ()))
        return cls(id, source, tuple(tokens), meta.get("spec_verify_ct", 0), histogram)


@dataclass(frozen=True)
class Tally:
    """Sums over answers, of any selection of them; what they are: `Answer`."""

    answers: int
    tokens: int
    steps: int
    histogram: tuple[int, ...]

    @classmethod
    def of(cls, answers: list[Answer]) -> Tally:
        width = max((len(answer.histogram) for answer in answers), default=0)
        padded = [answer.histogram + (0,) * (width - len(answer.histogram)) for answer in answers]
        return cls(
            answers=len(answers),
            tokens=sum(len(answer.tokens) for answer in answers),
            steps=sum(answer.steps for answer in answers),
            histogram=tuple(sum(column) for column in zip(*padded)),
        )

    @property
    def tau(self) -> float:
        """Tokens per verification step, the first token of every answer left out; nan without steps."""
        return (self.tokens - self.answers) / self.steps if self.steps else float("nan")

    @property
    def server_accept_length(self) -> float:
        """The same with the first tokens in, as SGLang prints it."""
        return self.tokens / self.steps if self.steps else float("nan")

    def as_dict(self) -> dict:
        return {
            "tau": self.tau,
            "server_accept_length": self.server_accept_length,
            "answers": self.answers,
            "tokens": self.tokens,
            "steps": self.steps,
            "accept_histogram": list(self.histogram),
        }


def by_source(answers: list[Answer]) -> dict[str, Tally]:
    """The answers of each source added up, by the source's name, in alphabetical order."""
    sources = sorted({answer.source for answer in answers})
    return {source: Tally.of([answer for answer in answers if answer.source == source]) for source in sources}


def first_difference(found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> dict | None:
    """Where two runs' answers (id -> tokens) part first: {"id", "position", "found", "expected"}, or None.

    An answer that ends early differs where it ends, with null for the token that is not there. The ids
    must be the same ones.
    """
    assert found.keys() == expected.keys(), "both runs answer the same prompts"
    for id in expected:
        mine, theirs = found[id], expected[id]
        for position in range(max(len(mine), len(theirs))):
            pair = [tokens[position] if position < len(tokens) else None for tokens in (mine, theirs)]
            if pair[0] != pair[1]:
                return {"id": id, "position": position, "found": pair[0], "expected": pair[1]}
    return None

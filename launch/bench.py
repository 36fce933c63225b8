"""Bench: what a drafter does on a live server, beside the same server without it.

    python launch/bench.py target=smollm2_135m drafter=RUN/export prompts=PROMPTS_OR_FILE

tau is compared with train/evaluate.py's: tokens per verification step, the first token of each answer left out.
SGLang's own figure counts it, and stands beside it (launch/live.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dataclasses import asdict

from data.config import finished, fingerprint, stage
from data.embedded import ensure_target
from data.signals import told_to_end
from extract.command import installation
from launch.ask import Run, ask
from launch.config import BenchConfig
from launch.drafting import checked_drafting
from launch.live import Tally, by_source, first_difference
from launch.questions import Question, load_questions


@stage("bench")
@told_to_end("its servers are gone, the same command begins again")
def main(config: BenchConfig) -> dict:
    drafter, target_path = Path(config.drafter), ensure_target(config.target)
    version = installation(config.engine).version
    drafting = checked_drafting(
        drafter,
        target=config.target,
        target_path=target_path,
        num_drafts=config.num_drafts,
        engine_version=version,
    )
    questions = load_questions(Path(config.prompts), target=config.target, target_path=target_path)[: config.limit]
    if max(question.num_tokens(config.max_new_tokens) for question in questions) < 2:
        raise ValueError(f"every answer to {config.prompts} is a single token, for which nothing is drafted: give longer ones")
    asked = [asdict(question) for question in questions]
    inputs = fingerprint(asdict(config), version, drafter / "config.json", drafter / "model.safetensors", asked)
    if done := finished(Path(config.out), inputs):
        return {**done, "line": f"nothing to do, {config.out} is measured: {line_of(done)}"}

    drafted = ask(config, questions, target_path=target_path, drafting=drafting)
    plain = ask(config, questions, target_path=target_path, drafting=None) if config.baseline else None
    summary = {
        "fingerprint": inputs,
        "engine": f"sglang {version}",
        "num_drafts": drafting.num_steps,
        **Tally.of(drafted.answers).as_dict(),
        "by_source": {source: tally.as_dict() for source, tally in by_source(drafted.answers).items()},
        "answers_as_recorded": as_recorded(drafted, questions),
        **compared(drafted, plain),
    }
    summary |= speeds(drafted, plain, tau=summary["tau"])
    print_table(summary)
    return {**summary, "line": line_of(summary)}


def as_recorded(run: Run, questions: list[Question]) -> int | None:
    """Answers that equal the ones on record; None where no prompt came with an answer."""
    recorded = {q.id: tuple(q.answer_ids) for q in questions if q.answer_ids is not None}
    if not recorded:
        return None
    return sum(a.tokens == recorded[a.id][: len(a.tokens)] for a in run.answers if a.id in recorded)


def speeds(drafted: Run, plain: Run | None, *, tau: float) -> dict:
    """Tokens/s of both runs, and their ratio. `break_even_tau`: how many steps without drafts a step with drafts takes as
    long as; a larger tau pays. null where there was no run without drafts.
    """
    speedup = drafted.tokens_per_second / plain.tokens_per_second if plain else None
    return {
        "tokens_per_second": drafted.tokens_per_second,
        "tokens_per_second_without": plain.tokens_per_second if plain else None,
        "speedup": speedup,
        "break_even_tau": tau / speedup if speedup else None,
    }


def verdict(summary: dict) -> str:
    """Does it pay here? Accuracy cannot say: what a step costs decides as much as what it yields."""
    if not summary["steps"]:
        return "nothing was drafted: every answer ended with its first token"
    number = summary["num_drafts"]
    cost = (
        f"a step with {number} draft{'s' * (number > 1)} takes as long as {summary['break_even_tau']:.2f} without, "
        f"and yields {summary['tau']:.2f} tokens"
    )
    if summary["speedup"] >= 1:
        return f"{summary['speedup']:.2f} x as fast with drafts: {cost}"
    fewer = "fewer drafts (num_drafts=; train/evaluate.py says what tau they keep) and " if number > 1 else ""
    return (
        f"SLOWER WITH DRAFTS, {summary['speedup']:.2f} x: {cost}. Do not serve it like this; compare {fewer}other loads "
        f"(concurrency=)"
    )


def compared(drafted: Run, plain: Run | None) -> dict:
    """Token by token against the run without drafting; null where there was none."""
    if plain is None:
        return {"outputs_identical": None, "first_difference": None}
    difference = first_difference(*({answer.id: answer.tokens for answer in run.answers} for run in (drafted, plain)))
    return {"outputs_identical": difference is None, "first_difference": difference}


def print_table(summary: dict) -> None:
    rows = {"all": summary, **summary["by_source"]}
    width = max(map(len, rows))
    print(f"\n  {'':{width}}  answers  tokens  steps    tau  as SGLang counts  steps with 0, 1, .. drafts right")
    for name, row in rows.items():
        histogram = " ".join(f"{100 * count / max(row['steps'], 1):.0f}%" for count in row["accept_histogram"])
        print(
            f"  {name:{width}}  {row['answers']:7d}  {row['tokens']:6d}  {row['steps']:5d}  {row['tau']:5.3f}  "
            f"{row['server_accept_length']:16.3f}  {histogram}"
        )
    if summary["speedup"] is not None:
        print(f"  {verdict(summary)}")
    if (same := summary["answers_as_recorded"]) is not None:
        print(f"  {same} of {summary['answers']} answers are the recorded ones, on which offline tau is computed")
    if difference := summary["first_difference"]:
        print(
            f"  outputs differ first in {difference['id']}, token {difference['position']}: "
            f"{difference['found']} with drafts, {difference['expected']} without"
        )


def line_of(summary: dict) -> str:
    parts = [f"live tau({summary['num_drafts']}) {summary['tau']:.3f}", f"{summary['tokens_per_second']:.1f} tokens/s"]
    if summary["outputs_identical"] is not None:
        parts[1] += f" ({summary['tokens_per_second_without']:.1f} without drafts)"
        parts.append("outputs identical" if summary["outputs_identical"] else "OUTPUTS DIFFER")
    return ", ".join(parts)


if __name__ == "__main__":
    main()

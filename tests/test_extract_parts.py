"""One command captures every part of the prompts, each in a job of its own: extract/main.py -m part=0/2,1/2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data.prepare import prepare_answers
from data.prompts import PromptSet
from data.shards import ShardReader
from launch.sweep import place
from tests.targets import ROOT
from tests.warm import warm_python

SUBMITIT = (
    "hydra/launcher=submitit", "hydra.launcher.cluster.executor=local", "hydra.launcher.cluster.gpus_per_node=null",
)  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tiny_llama, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    rows = [
        {"id": f"talk-{i}", "messages": [{"role": "user", "content": f"hawk {i}"}, {"role": "assistant", "content": "it flies"}]}
        for i in range(20)
    ]  # fmt: skip
    (folder / "conversations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare_answers(tiny_llama, folder / "conversations.jsonl", folder / "prompts")
    return folder / "prompts"


def sweep(*options: str, out: Path, models: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "extract/main.py", "-m", *SUBMITIT, "target=tiny_llama", f"out={out}", *options], cwd=ROOT,
        capture_output=True, text=True, timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "EYAS_MODELS": str(models)},
    )  # fmt: skip


def test_every_part_is_captured_by_a_job_of_submitits_and_what_is_done_is_not_done_again(prompts, tiny_llama, tmp_path):
    """Its local executor: the code that runs on SLURM, without SLURM. Together the parts are the prompts, once each."""
    out, models = tmp_path / "parts", Path(tiny_llama.path).parent
    told = ["part=0/2,1/2", f"prompts={prompts}", f"engine.python={warm_python()}", "engine.device=cpu", "engine.max_total_tokens=4096"]
    done = sweep(*told, out=out, models=models)
    assert done.returncode == 0, done.stderr[-3000:]
    folders = [out / "part-0-2", out / "part-1-2"]
    readers = [ShardReader(folder, split=split) for folder in folders for split in ("train", "validation")]
    ids = [entry.id for reader in readers for entry in reader.entries]
    assert sorted(ids) == sorted(PromptSet.load(prompts).ids) and len(ids) == 20
    assert all("wiring probe passed" in (folder / "job.log").read_text() for folder in folders)
    again = sweep(*told, out=out, models=models)
    assert again.returncode == 0 and "2 jobs, 2 finished before, 0 to run" in again.stdout


def test_another_setting_or_other_prompts_go_on_in_a_parts_folder(tmp_path):
    """A drafter trained otherwise is another run; a part captured with another memory limit is the same part."""
    told = [(["part=0/2", "engine.mem_fraction=0.8"], "part=0/2", "one"), (["part=1/2"], "part=1/2", "two")]
    first, second = place(tmp_path, told, by_label=True)
    assert [job.out for job in (first, second)] == [tmp_path / "part-0-2", tmp_path / "part-1-2"]
    for job in (first, second):
        job.out.mkdir()
        (job.out / "summary.json").write_text('{"records": 10}')
        job.record(0)
    told[0] = (["part=0/2", "engine.mem_fraction=0.7"], "part=0/2", "changed")
    first, second = place(tmp_path, told, by_label=True)
    assert first.out == tmp_path / "part-0-2" and first.summary() is None and second.summary() == {"records": 10}

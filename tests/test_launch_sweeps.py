"""Sweeps: jobs named by what differs, each a process of its own; failures at the end; finished jobs found again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from launch.compare import find
from launch.sweep import STATUS, label_of, place, run_jobs, varied_keys
from tests.datasets import write_dataset
from train.config import TrainConfig  # noqa: F401, conf/train.yaml asks its resolver

ROOT = Path(__file__).resolve().parent.parent
# A stage with the options of train/main.py and no training in it: what a sweep does with jobs needs no more.
QUICK = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from data.config import stage
from train.config import TrainConfig

@stage("train")
def main(config: TrainConfig) -> dict:
    if config.optim.lr > 0.5:
        raise ValueError(f"optim.lr={{config.optim.lr}}: too much")
    return {{"best_tau": 3.0 - 10 * abs(config.optim.lr - 0.01)}}

main()
"""


def sweep(script: Path | str, *options: str, out: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(script), "-m", *options, f"out={out}"], cwd=ROOT, capture_output=True, text=True,
        timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("stage") / "quick.py"
    file.write_text(QUICK)
    return file


QUICK_OPTIONS = ("target=tiny_llama", "shards=none", "tracker=none")


def test_one_job_of_two_fails_and_the_rest_of_the_sweep_is_kept(tmp_path, tiny_llama):
    """Through `accelerate launch`, two at a time: the report names the log, the status is 2, what is done is not done again."""
    shards = write_dataset(tmp_path / "shards", Path(tiny_llama.path), name="tiny_llama", train=6, validation=2)
    told = [
        "target=tiny_llama", f"target.path={tiny_llama.path}", f"shards={shards}", "tracker.mode=offline", "epochs=1",
        "precision=fp32", "drafter.depths=2", "batch.conversations_per_step=3", "batch.tokens_per_pack=48",
        "batch.num_workers=0", "optim=adamw", "drafter.draft_vocab_size=256,9999", "hydra.launcher.jobs=2",
        "log_every_steps=1",
    ]  # fmt: skip
    out = tmp_path / "a-sweep"
    done = sweep("train/main.py", *told, out=out)
    good, bad = out / "00-draft_vocab_size-256", out / "01-draft_vocab_size-9999"
    assert done.returncode == 2, done.stderr[-3000:]
    assert (good / "export" / "model.safetensors").exists(), (good / "job.log").read_text()[-2000:]
    report = re.search(r"^failed: (.*)$", done.stderr, re.MULTILINE)[1]
    assert str(bad / "job.log") in report and "set drafter.draft_vocab_size=512 or less" in report
    assert "error: 1 jobs failed" in done.stderr
    tracker = json.loads((good / "run.json").read_text())["tracker"]
    assert (tracker["group"], tracker["run_name"]) == ("a-sweep", "draft_vocab_size=256")
    before = (good / "summary.json").stat().st_mtime_ns
    told[told.index("drafter.draft_vocab_size=256,9999")] = "drafter.draft_vocab_size=256"
    again = sweep("train/main.py", *told, out=out)
    assert again.returncode == 0 and "1 jobs, 1 finished before, 0 to run" in again.stdout
    assert (good / "summary.json").stat().st_mtime_ns == before
    (run,) = [run for run in find(out) if run.taus]
    assert run.name == "draft_vocab_size=256" and run.tau == json.loads((good / "summary.json").read_text())["best_tau"]
    (offline,) = find(next(good.glob("wandb/offline-run-*")))
    assert offline.tau == pytest.approx(run.tau)
    counted = [x for x in run.accuracy if x == x]  # a depth that nothing reached is nan, which W&B is not told
    assert offline.accuracy == pytest.approx(counted)


def test_optuna_proposes_more_of_what_had_the_larger_tau(quick, tmp_path):
    """By hand: 3 - 10 |lr - 0.01| is largest at 0.01; two trials, their values are what the stage returned."""
    pytest.importorskip("optuna")
    options = [*QUICK_OPTIONS, "hydra/sweeper=optuna_tau", "hydra.sweeper.n_trials=2", "hydra.launcher.jobs=2"]
    done = sweep(quick, *options, "optim.lr=interval(0.001,0.1)", out=tmp_path / "s")
    assert done.returncode == 0, done.stderr[-3000:]
    rates = [float(next(o for o in json.loads(file.read_text())["overrides"] if o.startswith("optim.lr="))[9:])
             for file in (tmp_path / "s").glob(f"*/{STATUS}")]  # fmt: skip
    best = float(re.search(r"^best_value: (.*)$", (tmp_path / "s" / "optimization_results.yaml").read_text(), re.MULTILINE)[1])
    assert len(rates) == 2 and best == pytest.approx(max(3 - 10 * abs(rate - 0.01) for rate in rates))


def test_a_sweep_that_would_minimize_tau_is_refused(quick, tmp_path):
    pytest.importorskip("optuna")
    done = sweep(quick, *QUICK_OPTIONS, "hydra/sweeper=optuna", "optim.lr=interval(0.001,0.1)", out=tmp_path)
    assert done.returncode == 2 and "set hydra/sweeper=optuna_tau" in done.stderr


def test_submitit_runs_the_jobs_and_reports_the_one_that_failed(quick, tmp_path):
    """Its local executor: the same code as on SLURM, without SLURM."""
    pytest.importorskip("submitit")
    cluster = ["hydra/launcher=submitit", "hydra.launcher.cluster.executor=local", "hydra.launcher.cluster.gpus_per_node=null"]
    done = sweep(quick, *QUICK_OPTIONS, *cluster, "optim.lr=0.01,0.9", out=tmp_path / "s")
    assert done.returncode == 2, done.stderr[-3000:]
    assert json.loads((tmp_path / "s" / "00-lr-0.01" / "summary.json").read_text())["best_tau"] == 3.0
    assert "optim.lr=0.9: too much" in done.stderr and str(tmp_path / "s" / "01-lr-0.9" / "job.log") in done.stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("optim.lrr=1,2", "lrr"),
        ("hydra.launcher.job=2", "job"),
        ("hydra.launcher.jobs=many", "many"),
        ("hydra.launcher.jobs=0", "expected at least 1"),
        ("hydra.launcher.config_file=nowhere.yaml", "there is no such file"),
        ("optim.lr=1e-3,-1", "lr=-1: optim.lr and optim.max_grad_norm must be positive"),
    ],
)
def test_what_is_wrong_is_said_before_the_first_job_starts(quick, tmp_path, option, message):
    done = sweep(quick, *QUICK_OPTIONS, option, out=tmp_path / "s")
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1], done.stderr[-2000:]
    assert not list((tmp_path / "s").glob("*/job.json"))


def test_every_launcher_composes():
    for name in ("accelerate", "submitit"):
        with initialize_config_dir(str(ROOT / "conf"), version_base=None):
            config = compose("train", ["shards=s", "out=o", f"hydra/launcher={name}"], return_hydra_config=True)
        assert config.hydra.launcher._target_ == "hydra_plugins.accelerate_launcher.AccelerateLauncher"
        assert config.hydra.sweep.dir == "o"


# ---- names, numbers, processes ------------------------------------------------------------------


def test_a_label_says_what_differs_and_no_more():
    jobs = [["optim.lr=1e-4", "drafter.depths=4", "seed=0"], ["optim.lr=3e-4", "drafter.depths=4", "seed=0"]]
    assert varied_keys(jobs, swept=set()) == ["optim.lr"]
    keys = varied_keys(jobs, swept={"optim.lr", "drafter.depths"})
    assert label_of(jobs[1], keys) == "lr=3e-4 depths=4"
    assert label_of(["a.name=1", "b.name=2"], ["a.name", "b.name"]) == "a.name=1 b.name=2"
    assert label_of(["optim.lr=0.012520653814999465"], ["optim.lr"]) == "lr=0.01252"


def test_a_widened_sweep_finds_its_jobs_by_what_they_were_told(tmp_path):
    first = place(tmp_path, [(["lr=1"], "lr=1", "a"), (["lr=3"], "lr=3", "c")])
    assert [job.out.name for job in first] == ["00-lr-1", "01-lr-3"]
    for job in first:
        job.record(0)
    wider = place(tmp_path, [(["lr=1"], "lr=1", "a"), (["lr=2"], "lr=2", "b"), (["lr=3"], "lr=3", "c")])
    assert [job.out.name for job in wider] == ["00-lr-1", "02-lr-2", "01-lr-3"]


def test_a_job_is_finished_only_with_its_own_summary(tmp_path):
    (job,) = place(tmp_path, [(["lr=1"], "lr=1", "a")])
    job.record(0)
    assert job.summary() is None, "no summary.json"
    (job.out / "summary.json").write_text('{"best_tau": 2.0}')
    assert job.summary() == {"best_tau": 2.0}
    job.record(None)
    assert job.summary() is None, "it was begun again"
    (other,) = place(tmp_path, [(["lr=2"], "", "b")])
    assert other.out != job.out and other.summary() is None


def test_so_many_jobs_run_at_a_time_and_each_has_its_slot(tmp_path):
    """Four jobs on two slots: never more than two at once, and two of one slot never overlap."""
    jobs = place(tmp_path / "s", [([str(i)], f"i={i}", str(i)) for i in range(4)])
    code = "import os,sys,time; a=time.time(); time.sleep(0.3); print(os.environ['SLOT'], a, time.time())"
    ended = run_jobs(
        jobs, command=lambda job: [sys.executable, "-c", code], environment=lambda slot: {**os.environ, "SLOT": str(slot)},
        at_once=2,
    )  # fmt: skip
    assert set(ended.values()) == {0}
    spans = [job.log.read_text().split() for job in jobs]
    for slot in ("0", "1"):
        mine = sorted((float(a), float(b)) for s, a, b in spans if s == slot)
        assert mine and all(one[1] <= next_[0] for one, next_ in zip(mine, mine[1:]))


def test_a_sweep_that_is_stopped_lets_its_jobs_save_and_starts_no_more(tmp_path):
    """SIGTERM reaches the jobs' whole process groups; they end in their own way."""
    job = "import signal,sys,time; signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0))); print('up', flush=True); time.sleep(60)"
    script = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from launch.sweep import place, run_jobs
jobs = place(Path({str(tmp_path / "s")!r}), [(["1"], "i=1", "1"), (["2"], "i=2", "2")])
run_jobs(jobs, command=lambda _: [sys.executable, "-c", {job!r}], environment=lambda _: dict(os.environ), at_once=1)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    log, deadline = tmp_path / "s" / "00-i-1" / "job.log", time.monotonic() + 60
    while not (log.exists() and "up" in log.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0 and "KeyboardInterrupt" in errors
    assert "saved" in log.read_text()
    assert not (tmp_path / "s" / "01-i-2").exists()


def test_each_job_has_gpus_of_its_own_where_there_are_enough(monkeypatch):
    """Eight GPUs, two jobs of four processes: 0-3 and 4-7; three jobs of four processes do not fit, and share."""
    from hydra_plugins import accelerate_launcher
    from hydra_plugins.accelerate_launcher import AccelerateLauncher

    monkeypatch.setattr(accelerate_launcher, "_gpus", lambda: [str(i) for i in range(8)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two, three = (AccelerateLauncher(jobs, 4, None, [], None) for jobs in (2, 3))
    assert [two._environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in (0, 1)] == ["0,1,2,3", "4,5,6,7"]
    assert "CUDA_VISIBLE_DEVICES" not in three._environment(0)


def test_a_sweep_inside_accelerate_launch_is_refused(monkeypatch):
    from hydra_plugins.accelerate_launcher import AccelerateLauncher

    monkeypatch.setenv("RANK", "0")
    with pytest.raises(HydraException, match="start it with plain python"):
        AccelerateLauncher(1, None, None, [], None).launch([["seed=0"]], 0)

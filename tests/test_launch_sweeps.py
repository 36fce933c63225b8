"""Sweeps: jobs named by what differs, each a process of its own; failures at the end; finished jobs found again."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import submitit
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

import launch.sweep as sweep_module
from launch.compare import find
from launch.submit import submit
from launch.sweep import STATUS, Job, label_of, open_log, place, run_jobs, varied_keys
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


def test_jobs_on_a_dataset_that_grows_stay_the_jobs_that_they_were(quick, tmp_path):
    manifest = tmp_path / "shards/manifest.json"
    manifest.parent.mkdir()
    for content, said in (("one shard", "1 jobs, 0 finished before"), ("two shards", "1 jobs, 1 finished before")):
        manifest.write_text(content)
        data = (f"shards={manifest.parent}", "follow=true", "follow_conversations=9")
        done = sweep(quick, "target=tiny_llama", "tracker=none", *data, "optim.lr=1e-3", out=tmp_path / "sweep")
        assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr


def test_a_sweep_of_another_stage_has_a_folder_for_each_job_and_sees_other_data(tiny_llama, tmp_path):
    file, out = tmp_path / "conversations.jsonl", tmp_path / "prompts"
    for text, earlier in (("the hawk flies", 0), ("the hawk flies", 2), ("a hawk sleeps", 0)):
        file.write_text(json.dumps({"text": text}) + "\n")
        told = ("target=tiny_llama", f"target.path={tiny_llama.path}", f"conversations={file}", "max_tokens=20,30")
        done = sweep("data/main.py", *told, "validation_fraction=0", "hydra.launcher.jobs=2", out=out)
        assert done.returncode == 0 and f"2 jobs, {earlier} finished before" in done.stdout, done.stdout + done.stderr
        assert sorted(path.parent.name for path in out.glob("*/prompts.jsonl")) == ["max_tokens-20", "max_tokens-30"]


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
    told = ["shards=s", "out=o", "hydra/launcher=submitit", "+hydra.launcher.cluster.extra.qos=high"]
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        assert compose("train", told, return_hydra_config=True).hydra.launcher.cluster.extra == {"qos": "high"}


# ---- on a cluster -------------------------------------------------------------------------------

SAVES = """
import signal, sys, time
def save(*_):
    time.sleep(1)
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(60)
"""
# dies at once when it is told to, as Accelerate's does
LAUNCHES = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {SAVES!r}]))"


@pytest.mark.parametrize(("number", "ending"), [(signal.SIGUSR2, "queued again"), (signal.SIGINT, "KeyboardInterrupt")])
def test_a_job_that_the_cluster_wants_back_saves_and_is_queued_again(tmp_path, number, ending):
    """submitit calls `checkpoint` from the handler of a signal that comes while the job is waited for."""
    script = f"""
import signal, sys
sys.path.insert(0, {str(ROOT)!r})
from launch.submit import Command
job = Command([sys.executable, "-c", {LAUNCHES!r}], log={str(tmp_path / "job.log")!r}, folder={str(tmp_path)!r})
def wanted_back(*_):
    again = job.checkpoint()
    print("queued again" if again.function.command == job.command else "something else", flush=True)
    sys.exit(0)
signal.signal(signal.SIGUSR2, wanted_back)
signal.signal(signal.SIGINT, signal.default_int_handler)  # which what a shell starts in the background has not
job()
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until(tmp_path / "job.log", "up")
    process.send_signal(number)
    assert ending in process.communicate(timeout=30)[0]
    if number == signal.SIGUSR2:  # the cluster ends what is left
        assert "saved" in (tmp_path / "job.log").read_text().splitlines()
    until(tmp_path / "job.log", "saved")


def runs(pid: int) -> bool:
    """Also a process that has ended exists until its parent has heard of it."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def until(file: Path, words: str | re.Pattern[str]) -> None:
    """Waits until the words stand on a line of their own in the file."""
    deadline = time.monotonic() + 60
    while not (file.exists() and any(re.fullmatch(words, line) for line in file.read_text().splitlines())):
        assert time.monotonic() < deadline, f"{words!r} does not come"
        time.sleep(0.05)


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    """A cluster that takes jobs and runs none: `calls` has its commands, sacct says what `state` says."""
    (tmp_path / "bin").mkdir()
    for name, text in {
        "srun": "exit 0",
        "scancel": f"echo scancel >> {tmp_path}/calls",
        "sbatch": f"echo sbatch >> {tmp_path}/calls; echo Submitted batch job 12",
        "sacct": f'echo "JobID|State|NodeList"; for job in 12 12_0 12_1; do echo "$job|$(cat {tmp_path}/state)|node1"; done',
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (tmp_path / "state").write_text("RUNNING")
    submitit.SlurmJob.watcher.clear()  # it remembers for ten minutes what sacct said
    return tmp_path


def calls(slurm: Path) -> list[str]:
    return (slurm / "calls").read_text().split()


CLUSTER = SimpleNamespace(
    executor="slurm", timeout_minutes=60, partition=None, account=None, gpus_per_node=1, cpus_per_task=1, mem_gb=None, extra={}
)


def submitted(jobs: list[Job]) -> dict[Job, int]:
    return submit(jobs, command=lambda job: ["true"], cluster=CLUSTER, at_once=2)


def interrupted(jobs: list[Job], monkeypatch) -> str:
    """What the command says that is stopped as soon as it waits for its jobs."""

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("launch.submit._wait", stop)
        with pytest.raises(KeyboardInterrupt) as stopped:
            submitted(jobs)
    return str(stopped.value)


def test_a_command_that_is_started_again_waits_for_the_jobs_that_the_cluster_has(slurm, tmp_path, monkeypatch):
    """Queued twice, two jobs would write to one folder."""
    jobs = place(tmp_path / "s", [([str(i)], f"i={i}", str(i)) for i in range(2)])
    assert "the same command waits for them again, `scancel 12` ends them" in interrupted(jobs, monkeypatch)
    assert calls(slurm) == ["sbatch"]
    for number, status in ((0, 0), (1, 3)):
        (tmp_path / "s/submitit" / f"12_{number}_0_result.pkl").write_bytes(pickle.dumps(("success", status)))
    assert list(submitted(jobs).values()) == [0, 3]
    assert calls(slurm) == ["sbatch"], "none was queued again"


def test_any_option_of_sbatch_can_be_given(slurm, tmp_path, monkeypatch):
    monkeypatch.setattr("launch.submit._wait", lambda queued, **_: queued)
    jobs = place(tmp_path / "s", [(["1"], "i=1", "1")])
    cluster = SimpleNamespace(**{**vars(CLUSTER), "extra": {"qos": "high"}})
    submit(jobs, command=lambda job: ["true"], cluster=cluster, at_once=1)
    assert any("#SBATCH --qos=high" in file.read_text().splitlines() for file in (tmp_path / "s/submitit").glob("*.sh"))


def test_a_job_that_the_cluster_has_no_more_is_queued_again(slurm, tmp_path, monkeypatch):
    jobs = place(tmp_path / "s", [([str(i)], f"i={i}", str(i)) for i in range(2)])
    interrupted(jobs, monkeypatch)
    (slurm / "state").write_text("CANCELLED by 1000")
    monkeypatch.setattr("launch.submit._wait", lambda queued, **_: queued)
    assert len(submitted(jobs)) == 2 and calls(slurm) == ["sbatch", "sbatch"]


def test_a_folder_that_the_clusters_job_still_writes_to_takes_no_other_job(slurm, tmp_path, monkeypatch):
    told = lambda inputs: place(tmp_path / "s", [(["part=0/2"], "part=0/2", inputs)], by_label=True)  # noqa: E731
    interrupted(told("a"), monkeypatch)
    with pytest.raises(ValueError, match="SLURM's job 12.* still writes to .*part-0-2, and was told something else"):
        submitted(told("b"))


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


def test_two_jobs_that_begin_alike_have_folders_of_their_own(tmp_path):
    """Extraction's have no numbers: of two long paths that differ at their ends one would take the other's shards out."""
    paths = ["/data/" + 120 * "x" + end for end in ("a", "b")]
    wanted = [([f"prompts={path}"], f"prompts={path}", path) for path in paths]
    one, two = place(tmp_path, wanted, by_label=True)
    assert one.out != two.out and place(tmp_path, wanted[1:], by_label=True)[0].out == two.out
    with pytest.raises(ValueError, match="'p=a/b' and 'p=a-b' would both be written to .*p-a-b"):
        place(tmp_path, [(["p=a/b"], "p=a/b", "1"), (["p=a-b"], "p=a-b", "2")], by_label=True)


def test_a_job_that_is_named_twice_is_one_job(tmp_path):
    jobs = place(tmp_path, [(["part=0/2"], "part=0/2", "a")] * 2, by_label=True)
    assert len(set(jobs)) == 1


def test_last_words_are_those_of_the_last_start(tmp_path):
    """The job failed once; started again it is killed without a word, and its old error is not why."""
    (job,) = place(tmp_path, [(["lr=1"], "lr=1", "a")])
    job.out.mkdir()
    with open_log(job.log, ["python", "x"]) as log:
        log.write(b"error: the disk is full\n")
    assert job.last_words() == "error: the disk is full"
    with open_log(job.log, ["python", "x"]) as log:
        assert job.last_words() == "its log is empty"
        log.write(b"step 1\rstep 2\n")
    assert job.last_words() == "step 2"
    with job.log.open("ab") as log:
        log.write(b"told to end: step 2 is saved\ntrain 2%\n")
    assert job.last_words() == "told to end: step 2 is saved"


def test_so_many_jobs_run_at_a_time_and_each_has_its_slot(tmp_path):
    """Four jobs on two slots: never more than two at once, and two of one slot never overlap."""
    jobs = place(tmp_path / "s", [([str(i)], f"i={i}", str(i)) for i in range(4)])
    code = "import os,sys,time; a=time.time(); time.sleep(0.3); print(os.environ['SLOT'], a, time.time())"
    ended = run_jobs(
        jobs, command=lambda job: [sys.executable, "-c", code], environment=lambda slot: {**os.environ, "SLOT": str(slot)},
        at_once=2,
    )  # fmt: skip
    assert set(ended.values()) == {0}
    spans = [job.log.read_text().splitlines()[-1].split() for job in jobs]
    for slot in ("0", "1"):
        mine = sorted((float(a), float(b)) for s, a, b in spans if s == slot)
        assert mine and all(one[1] <= next_[0] for one, next_ in zip(mine, mine[1:]))


def test_a_job_whose_folder_cannot_be_written_fails_alone(tmp_path):
    jobs = place(tmp_path, [([f"a={i}"], f"a={i}", str(i)) for i in range(3)])
    (jobs[0].out / STATUS).mkdir(parents=True)
    ended = run_jobs(jobs, command=lambda job: ["true"], environment=lambda slot: dict(os.environ), at_once=1)
    assert [ended[job] for job in jobs] == [1, 0, 0]
    assert jobs[0].last_words().startswith(f"error: cannot write {jobs[0].out / STATUS}")


def test_a_sweep_that_is_stopped_lets_its_jobs_save_and_starts_no_more(tmp_path):
    """SIGTERM reaches the jobs' whole process groups; they end in their own way, the launcher before what it launched."""
    script = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from launch.sweep import place, run_jobs
jobs = place(Path({str(tmp_path / "s")!r}), [(["1"], "i=1", "1"), (["2"], "i=2", "2")])
run_jobs(jobs, command=lambda _: [sys.executable, "-c", {LAUNCHES!r}], environment=lambda _: dict(os.environ), at_once=1)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    log = tmp_path / "s" / "00-i-1" / "job.log"
    until(log, "up")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0 and "KeyboardInterrupt" in errors
    assert "saved" in log.read_text().splitlines()
    assert not (tmp_path / "s" / "01-i-2").exists()


RANKS = """
import os, subprocess, sys, time
ranks = [subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True) for _ in range(2)]
def hears(pid):  # SIGTERM, which it handles or ignores
    said = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
    return (int(said["SigCgt"], 16) | int(said["SigIgn"], 16)) >> 14 & 1
while not all(hears(rank.pid) for rank in ranks):
    time.sleep(0.05)
print(*(rank.pid for rank in ranks), flush=True)
os.kill(os.getpid(), 9) if sys.argv[2] == "is killed" else time.sleep(60)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"


def test_a_job_whose_launcher_was_killed_has_ended_when_its_ranks_have_saved(tmp_path):
    """Each is in a session of its own, as torchrun's are. Else the next job shares its GPUs with processes that nobody sees."""
    jobs = place(tmp_path, [(["1"], "i=1", "1")])
    words = [sys.executable, "-c", RANKS, SAVES, "is killed"]
    ended = run_jobs(jobs, command=lambda _: words, environment=lambda _: dict(os.environ), at_once=1)
    before, ranks, after = re.split(r"^(\d+ \d+)$", jobs[0].log.read_text(), flags=re.MULTILINE)
    assert ended == {jobs[0]: -9} and after.count("saved") == 2
    assert not any(runs(int(rank)) for rank in ranks.split())


def test_ranks_that_are_deaf_do_not_outlive_their_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "GRACE_SECONDS", 1)
    jobs = place(tmp_path, [(["1"], "i=1", "1")])
    words = [sys.executable, "-c", RANKS, DEAF, "is not"]

    def stop() -> None:
        until(jobs[0].log, re.compile(r"\d+ \d+"))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, command=lambda _: words, environment=lambda _: dict(os.environ), at_once=1)
    ranks = next(line for line in jobs[0].log.read_text().splitlines() if re.fullmatch(r"\d+ \d+", line)).split()
    assert not any(runs(int(rank)) for rank in ranks)


def test_each_job_has_gpus_of_its_own_where_there_are_enough(monkeypatch):
    """Eight GPUs, two jobs of four processes: 0-3 and 4-7; three jobs of four processes do not fit, and share."""
    from hydra_plugins import accelerate_launcher
    from hydra_plugins.accelerate_launcher import AccelerateLauncher

    monkeypatch.setattr(accelerate_launcher, "_gpus", lambda: [str(i) for i in range(8)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two, three = (AccelerateLauncher(jobs, 4, None, [], None) for jobs in (2, 3))
    assert [two._environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in (0, 1)] == ["0,1,2,3", "4,5,6,7"]
    assert "CUDA_VISIBLE_DEVICES" not in three._environment(0)


@pytest.mark.parametrize(("gpus", "processes"), [(0, None), (1, None), (0, 2), (8, 2)])
def test_no_saved_setting_of_accelerate_reaches_a_job(monkeypatch, tmp_path, gpus, processes):
    """`accelerate config` was once answered with DeepSpeed, four processes and bf16."""
    from accelerate.commands import launch
    from accelerate.commands.config import config_args
    from hydra_plugins import accelerate_launcher

    saved = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\nuse_cpu: false\n"
    (tmp_path / "saved.yaml").write_text(saved + "num_processes: 4\nnum_machines: 1\nmixed_precision: bf16\ndebug: false\n")
    for module, name in ((launch, "default_config_file"), (config_args, "default_config_file")):
        monkeypatch.setattr(module, name, str(tmp_path / "saved.yaml"))
    monkeypatch.setattr(config_args, "default_yaml_config_file", str(tmp_path / "saved.yaml"))
    monkeypatch.setattr(accelerate_launcher, "_gpus", lambda: [str(i) for i in range(gpus)])
    words = accelerate_launcher.AccelerateLauncher(1, processes, None, [], None)._accelerate()
    told, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args([*words, "train/main.py"]))
    assert (told.num_processes, told.multi_gpu, told.use_deepspeed) == (processes or 1, processes is not None, False)
    assert told.mixed_precision == "no" and told.use_cpu == (not gpus and not processes)


def test_a_sweep_inside_accelerate_launch_is_refused(monkeypatch):
    from hydra_plugins.accelerate_launcher import AccelerateLauncher

    monkeypatch.setenv("RANK", "0")
    with pytest.raises(HydraException, match="start it with plain python"):
        AccelerateLauncher(1, None, None, [], None).launch([["seed=0"]], 0)

"""The batch files, on a machine without SLURM: its commands are played by scripts that write down what they were told."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """srun runs its command here as node 1 of 2, scontrol names the nodes and notes a requeue, python notes its arguments,
    and runs until it is told to end if it is asked to."""
    scripts = {
        "srun": '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nexport SLURM_NODEID=1\nexec "$@"\n',
        "scontrol": f'#!/bin/bash\necho "$@" >> {tmp_path}/scontrol\n[ "$1" = show ] && printf "node7\\nnode8\\n"\nexit 0\n',
        "python": f"""#!/bin/bash
printf '%s\\n' "$@" > {tmp_path}/arguments
trap 'echo saved > {tmp_path}/saved; exit 143' TERM
[ -n "$ENDLESS" ] && while true; do sleep 0.05; done
exit "${{STATUS:-0}}"
""",
    }  # fmt: skip
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python"), "SLURM_JOB_ID": "20123",
        "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8",
    }  # fmt: skip


def told(folder: Path) -> list[str]:
    return (folder / "arguments").read_text().splitlines()


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_training_starts_one_launch_per_node_that_knows_its_place(cluster, tmp_path):
    done = subprocess.run(["bash", ROOT / "launch/slurm/train.sbatch", "out=RUN", "tracker.run_name='a b'"], env=cluster, cwd=tmp_path, timeout=60)
    assert done.returncode == 0
    words = told(tmp_path)
    assert [option(words, f"--{name}") for name in ("num_processes", "num_machines", "machine_rank")] == ["16", "2", "1"]
    assert (option(words, "--main_process_ip"), option(words, "--main_process_port")) == ("node7", "20123")
    assert words[words.index("train/main.py") :] == ["train/main.py", "out=RUN", "tracker.run_name='a b'"]
    assert "--multi_gpu" in words and not (tmp_path / "scontrol").read_text().count("requeue")


def test_one_gpu_needs_no_launcher_that_would_die_before_the_run_has_saved(cluster, tmp_path):
    one = {**cluster, "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_NUM_NODES": "1"}
    subprocess.run(["bash", ROOT / "launch/slurm/train.sbatch", "out=RUN"], env=one, cwd=tmp_path, timeout=60, check=True)
    assert told(tmp_path) == ["train/main.py", "out=RUN"]
    several = {**one, "ACCELERATE": "--config_file launch/accelerate/zero2.yaml"}
    subprocess.run(["bash", ROOT / "launch/slurm/train.sbatch", "out=RUN"], env=several, cwd=tmp_path, timeout=60, check=True)
    assert option(told(tmp_path), "--config_file") == "launch/accelerate/zero2.yaml"


def test_a_failure_is_the_jobs_failure_and_is_not_queued_again(cluster, tmp_path):
    done = subprocess.run(["bash", ROOT / "launch/slurm/train.sbatch", "out=RUN"], env={**cluster, "STATUS": "2"}, cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and "requeue" not in (tmp_path / "scontrol").read_text()


@pytest.mark.parametrize(("file", "number"), [("train", signal.SIGUSR1), ("train", signal.SIGTERM), ("extract", signal.SIGUSR1)])
def test_a_job_that_is_told_to_end_saves_and_is_queued_again(cluster, tmp_path, file, number):
    """USR1 before the time ends, TERM when it is pre-empted."""
    environment = {**cluster, "ENDLESS": "1", "SLURM_ARRAY_JOB_ID": "20120", "SLURM_ARRAY_TASK_ID": "3"}
    job = subprocess.Popen(["bash", ROOT / f"launch/slurm/{file}.sbatch", "out=RUN"], env=environment, cwd=tmp_path)
    deadline = time.monotonic() + 30
    while not (tmp_path / "arguments").exists():
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)  # its trap is set in the line after
    job.send_signal(number)
    assert job.wait(timeout=30) == 0
    assert (tmp_path / "saved").exists()
    assert f"requeue {'20123' if file == 'train' else '20120_3'}" in (tmp_path / "scontrol").read_text()


def test_every_task_of_the_array_captures_its_own_part(cluster, tmp_path):
    environment = {**cluster, "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "4"}
    done = subprocess.run(
        ["bash", ROOT / "launch/slurm/extract.sbatch", "target=tiny_llama", "out=PARTS", "prompts=P"], env=environment, cwd=tmp_path, timeout=60
    )
    assert done.returncode == 0
    assert told(tmp_path) == ["extract/main.py", "target=tiny_llama", "prompts=P", "part=2/4", "out=PARTS/2"]


def test_a_part_without_a_folder_is_an_error(cluster, tmp_path):
    done = subprocess.run(["bash", ROOT / "launch/slurm/extract.sbatch", "prompts=P"], env=cluster, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "out=... is missing" in done.stderr

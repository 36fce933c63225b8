"""The jobs of a sweep on a cluster, through submitit: queued, watched, queued again when they are preempted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from launch.sweep import Job, outcome

ROOT = Path(__file__).resolve().parent.parent
POLL_SECONDS = 1.0


class Command:
    """What a node of the cluster calls: the job's process, its output in the job's own log.

    SLURM's warning before preemption or timeout becomes SIGTERM for the whole job, which saves and stops; submitit
    then queues the same command again, and that continues from the checkpoint.
    """

    def __init__(self, command: list[str], *, log: str, folder: str):
        self.command, self.log, self.folder = command, log, folder
        self.process: subprocess.Popen | None = None

    def __call__(self) -> int:
        Path(self.log).parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder,
                start_new_session=True,
            )  # fmt: skip
            return self.process.wait()

    def checkpoint(self) -> Any:
        """Called by submitit in the job, when the cluster wants the node back."""
        import submitit

        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait()
        return submitit.helpers.DelayedSubmission(Command(self.command, log=self.log, folder=self.folder))


def submit(jobs: list[Job], *, command: Callable[[Job], list[str]], cluster: Any, at_once: int) -> dict[Job, int]:
    """Queue every job and wait for all of them; the exit status of each, 1 where the cluster itself ended it.

    cluster  ClusterConf of launch/hydra_plugins/accelerate_launcher.py
    Raises ValueError if submitit is not installed.
    """
    try:
        import submitit
    except ImportError as error:
        raise ValueError("hydra/launcher=submitit needs submitit: pip install submitit==1.5.4") from error
    if not jobs:
        return {}
    executor = submitit.AutoExecutor(folder=jobs[0].out.parent / "submitit", cluster=cluster.executor)
    wanted = {name: getattr(cluster, name) for name in ("gpus_per_node", "cpus_per_task", "mem_gb")}
    if cluster.executor == "slurm":
        wanted |= {"slurm_partition": cluster.partition, "slurm_account": cluster.account}
        wanted |= {"slurm_array_parallelism": at_once, "slurm_additional_parameters": dict(cluster.extra) or None}
        wanted |= {"slurm_setup": [f"export PYTHONPATH={ROOT}:$PYTHONPATH"]}
    executor.update_parameters(
        name="eyas", timeout_min=cluster.timeout_minutes, **{k: v for k, v in wanted.items() if v is not None}
    )
    began, folder = time.monotonic(), os.getcwd()
    for job in jobs:
        job.out.mkdir(parents=True, exist_ok=True)
        job.record(None)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([before] if before else [])])  # the local executor's
    try:
        with executor.batch():
            queued = {job: executor.submit(Command(command(job), log=str(job.log), folder=folder)) for job in jobs}
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    ended: dict[Job, int] = {}
    with tqdm(total=len(jobs), desc=f"sweep on {cluster.executor}", unit="job", dynamic_ncols=True) as bar:
        while len(ended) < len(jobs):
            for job, handle in queued.items():
                if job in ended or not handle.done():
                    continue
                error = handle.exception()
                ended[job] = 1 if error is not None else handle.result()
                if error is not None:
                    with job.log.open("a") as log:
                        log.write(f"error: the cluster ended job {handle.job_id}: {str(error).splitlines()[-1]}\n")
                job.record(ended[job], seconds=time.monotonic() - began)
                bar.update()
                bar.write(f"{'ended  ' if ended[job] == 0 else 'FAILED '} {job.out}: {outcome(job, ended[job])}")
            bar.set_postfix_str(", ".join(sorted({handle.state for j, handle in queued.items() if j not in ended})))
            time.sleep(POLL_SECONDS)
    return ended

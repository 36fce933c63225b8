"""The jobs of a sweep on a cluster, through submitit: queued, watched, queued again when they are preempted."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from launch.processes import GRACE_SECONDS, Family
from launch.sweep import Job, open_log, outcome

ROOT = Path(__file__).resolve().parent.parent
POLL_SECONDS = 1.0
# States of SLURM in which a job has not ended; sacct adds words to some, like "CANCELLED by 1000"
ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "PREEMPTED", "REQUEUED", "COMPLETING", "STOPPED", "RESIZING")


class Command:
    """What a node of the cluster calls: the job's process, its output in the job's own log.

    command  the process's words
    log      file that its output is added to
    folder   where it is started

    SLURM's warning before preemption or timeout becomes SIGTERM for the whole job, which saves and stops; submitit
    then queues the same command again, and that continues from the checkpoint.
    """

    def __init__(self, command: list[str], *, log: str, folder: str):
        self.command, self.log, self.folder = command, log, folder
        self.family: Family | None = None

    def __call__(self) -> int:
        """The exit status of the process. Interrupted, it tells the process to save and stop."""
        Path(self.log).parent.mkdir(parents=True, exist_ok=True)
        with open_log(self.log, self.command) as log:
            self.family = Family(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder
            )  # fmt: skip
            try:  # not Popen.wait, which holds a lock: submitit calls `checkpoint` from a signal's handler, in its midst
                os.waitid(os.P_PID, self.family.process.pid, os.WEXITED | os.WNOWAIT)
            except BaseException:
                self.family.tell()
                raise
            return self.family.wait()

    def checkpoint(self) -> Any:
        """Called by submitit in the job, when the cluster wants the node back: what it is to queue again."""
        import submitit

        if self.family is not None:
            self.family.tell()
            self.family.end(seconds=GRACE_SECONDS)
        return submitit.helpers.DelayedSubmission(Command(self.command, log=self.log, folder=self.folder))


def submit(jobs: list[Job], *, command: Callable[[Job], list[str]], cluster: Any, at_once: int) -> dict[Job, int]:
    """Queue every job and wait for all of them; the exit status of each, 1 where the cluster itself ended it.

    command  of a job
    cluster  ClusterConf of launch/hydra_plugins/accelerate_launcher.py
    at_once  most jobs at a time

    A job that an earlier call queued, and that has not ended, is waited for and not queued again. Raises ValueError if
    submitit is not installed, or such a job was told something else; KeyboardInterrupt, with the reason in words.
    """
    try:
        import submitit
    except ImportError as error:
        raise ValueError("hydra/launcher=submitit needs submitit: pip install submitit==1.5.4") from error
    if not jobs:
        return {}
    logs = jobs[0].out.parent / "submitit"
    queued = _queued_before(jobs, logs) if cluster.executor == "slurm" else {}
    new = [job for job in jobs if job not in queued]
    if queued:
        print(f"{len(queued)} jobs are queued or run since an earlier command: waiting for them", flush=True)
    try:
        executor = submitit.AutoExecutor(folder=logs, cluster=cluster.executor)
    except RuntimeError as error:
        raise ValueError(
            f"no SLURM here ({error}): start the sweep where sbatch is, or try it out with hydra.launcher.cluster.executor=local"
        ) from error
    wanted = {name: getattr(cluster, name) for name in ("gpus_per_node", "cpus_per_task", "mem_gb")}
    if cluster.executor == "slurm":
        wanted |= {"slurm_partition": cluster.partition, "slurm_account": cluster.account}
        wanted |= {"slurm_array_parallelism": at_once, "slurm_additional_parameters": dict(cluster.extra) or None}
        wanted |= {"slurm_signal_delay_s": GRACE_SECONDS + 60}  # before the end; submitit's own 90 are too short to save in
        wanted |= {"slurm_setup": [f"export PYTHONPATH={ROOT}:$PYTHONPATH"]}
    executor.update_parameters(
        name="eyas", timeout_min=cluster.timeout_minutes, **{k: v for k, v in wanted.items() if v is not None}
    )
    began, folder = time.monotonic(), os.getcwd()
    for job in new:
        job.out.mkdir(parents=True, exist_ok=True)
        job.record(None)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([before] if before else [])])  # the local executor's
    try:
        with executor.batch() if new else contextlib.nullcontext():
            queued |= {job: executor.submit(Command(command(job), log=str(job.log), folder=folder)) for job in new}
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    for job in new:
        job.record(None, cluster_job=queued[job].job_id)
    try:
        return _wait(queued, began=began, name=cluster.executor)
    except KeyboardInterrupt:
        if cluster.executor == "slurm":
            numbers = " ".join(sorted({handle.job_id.split("_")[0] for handle in queued.values()}))
            raise KeyboardInterrupt(
                f"stopped waiting, and the jobs go on: the same command waits for them again, `scancel {numbers}` ends them"
            ) from None
        for handle in queued.values():
            handle.cancel()
        raise KeyboardInterrupt("stopped; what had begun saves a checkpoint, and the same command goes on") from None


def _queued_before(jobs: list[Job], logs: Path) -> dict[Job, Any]:
    """Handles of the jobs that SLURM has from an earlier command and that have not ended."""
    import submitit

    found = {}
    for job in jobs:
        number, same = job.queued_as()
        if number is None:
            continue
        handle = submitit.SlurmJob(folder=logs, job_id=number)
        if handle.watcher.get_state(number, mode="force").split()[0] not in ALIVE:
            continue
        if not same:
            raise ValueError(f"SLURM's job {number} still writes to {job.out}, and was told something else: wait for it, or "
                             f"`scancel {number}`")  # fmt: skip
        found[job] = handle
    return found


def _wait(queued: dict[Job, Any], *, began: float, name: str) -> dict[Job, int]:
    """The exit status of each job, when all have ended; `began` is time.monotonic() of their queueing."""
    ended: dict[Job, int] = {}
    with tqdm(total=len(queued), desc=f"sweep on {name}", unit="job", dynamic_ncols=True) as bar:
        while len(ended) < len(queued):
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

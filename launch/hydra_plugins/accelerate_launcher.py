"""Hydra's launcher for sweeps: one `accelerate launch` per job of training, here or on a cluster.

    python train/main.py -m optim.lr=1e-4,3e-4 drafter.depths=4,7 target=... shards=SHARDS out=SWEEP
    python extract/main.py -m part=0/4,1/4,2/4,3/4 target=... prompts=PROMPTS out=PARTS     a plain process per job

Jobs in Hydra's own process cannot do: a second DeepSpeed engine, another precision or another number of processes
needs a process of its own. Found by its place alone: data/config.py puts launch/ on Python's path.
"""

# No "from __future__ import annotations" here: Hydra runs this file before Python lists it among its modules, where
# dataclasses would look the names up.

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict


@dataclass
class ClusterConf:
    """Where submitit puts the jobs. What is null is left to the cluster.

    executor         slurm, or local: processes of this machine, to try it out
    timeout_minutes  of a job; one that is preempted or timed out is queued again and continues
    gpus_per_node    of each job; hydra.launcher.num_processes starts a process on each
    extra            more of sbatch's options, by their long names with underscores: +hydra.launcher.cluster.extra.qos=high
    """

    executor: str = MISSING
    timeout_minutes: int = MISSING
    partition: Optional[str] = MISSING
    account: Optional[str] = MISSING
    gpus_per_node: Optional[int] = MISSING
    cpus_per_task: Optional[int] = MISSING
    mem_gb: Optional[int] = MISSING
    extra: dict[str, Any] = MISSING


@dataclass
class AccelerateLauncherConf:
    """Defaults: conf/hydra/launcher/accelerate.yaml.

    jobs           how many run at a time; with GPUs enough for all of them, each has its own
    num_processes  of each job, a GPU for each; null: as the config file says, or 1. Of extraction: GPUs of each job
    config_file    of `accelerate launch`, for each job
    options        more options of `accelerate launch`
    cluster        null: here
    """

    _target_: str = "hydra_plugins.accelerate_launcher.AccelerateLauncher"
    jobs: int = MISSING
    num_processes: Optional[int] = MISSING
    config_file: Optional[str] = MISSING
    options: list[str] = field(default_factory=list)
    cluster: Optional[ClusterConf] = MISSING


ConfigStore.instance().store(group="hydra/launcher", name="accelerate_schema", node=AccelerateLauncherConf)

CONFIG_FILES = Path(__file__).resolve().parent.parent / "accelerate"


class AccelerateLauncher(Launcher):
    """What Hydra starts a sweep's jobs with. Options: AccelerateLauncherConf.

    Raises HydraException, before any job is started, for options that cannot be meant.
    """

    def __init__(
        self,
        jobs: int,
        num_processes: int | None,
        config_file: str | None,
        options: list[str],
        cluster: DictConfig | None,
    ):
        if jobs < 1 or (num_processes is not None and num_processes < 1):
            raise HydraException(
                f"hydra.launcher.jobs={jobs}, hydra.launcher.num_processes={num_processes}: expected at least 1 of each"
            )
        if config_file is not None and not Path(config_file).is_file():
            raise HydraException(f"hydra.launcher.config_file={config_file}: there is no such file, see launch/accelerate/")
        self.jobs, self.num_processes, self.config_file, self.options = jobs, num_processes, config_file, list(options)
        self.cluster = cluster

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config
        if "minimize" in str(config.hydra.sweeper.get("direction", "")):
            raise HydraException("hydra/sweeper=optuna minimizes, and tau is to be large: set hydra/sweeper=optuna_tau")

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs that are not finished yet. One return for each; a job that failed stands in FAILED_JOBS too."""
        from data.config import FAILED_JOBS
        from launch.sweep import best_tau, outcome, place, run_jobs

        if "RANK" in os.environ:
            raise HydraException("a sweep starts `accelerate launch` itself, once a job: start it with plain python")
        setup_globals()
        overrides = [[o for o in job if not o.startswith("out=")] for job in job_overrides]
        described = self._described(overrides)
        try:
            jobs = place(Path(self.config.hydra.sweep.dir), described, by_label=not self._trains)
        except ValueError as error:
            raise HydraException(str(error)) from error
        todo = [job for job in dict.fromkeys(jobs) if job.summary() is None]
        done = len(set(jobs)) - len(todo)
        print(f"sweep: {len(set(jobs))} jobs, {done} finished before, {len(todo)} to run, {self.jobs} at a time", flush=True)
        if self.cluster is not None:
            from launch.submit import submit

            try:
                ended = submit(todo, command=self._command, cluster=self.cluster, at_once=self.jobs)
            except (ValueError, KeyboardInterrupt) as error:
                raise HydraException(str(error)) from error
        else:
            try:
                ended = run_jobs(todo, command=self._command, environment=self._environment, at_once=self.jobs)
            except KeyboardInterrupt:
                print("stopped; what had begun has saved a checkpoint, and the same command goes on", file=sys.stderr, flush=True)
                sys.exit(128 + signal.SIGINT)
        returns = []
        for job, told in zip(jobs, job_overrides):
            status = ended.get(job, 0)
            result = JobReturn(overrides=list(told), working_dir=os.getcwd(), task_name=job.out.name)
            result.status, result.return_value = JobStatus.COMPLETED, best_tau(job)
            if status:
                failure = f"{job.out}: {outcome(job, status)}; its log: {job.log}"
                FAILED_JOBS.setdefault(str(job.out), failure)
                if not self._all_jobs_are_known:  # a search goes on with the others, and must know
                    result.status, result.return_value = JobStatus.FAILED, HydraException(failure)
            returns.append(result)
        return returns

    @property
    def _trains(self) -> bool:
        """Else a job is one plain process, and another setting does not make it another job."""
        return self.config.hydra.job.config_name == "train"

    @property
    def _all_jobs_are_known(self) -> bool:
        """True for Hydra's own sweeper, which stops at the first failure that it hears of."""
        return "BasicSweeper" in self.config.hydra.sweeper._target_

    def _described(self, overrides: list[list[str]]) -> list[tuple[list[str], str, str]]:
        """Of every job its overrides, what differs, and the fingerprint of what it is told. All are checked first."""
        from data.config import fingerprint, quoted, typed
        from launch.sweep import label_of, varied_keys

        parsed = OverridesParser.create().parse_overrides(list(self.config.hydra.overrides.task))
        swept = {o.get_key_element().lstrip("+~") for o in parsed if o.is_sweep_override()}
        swept |= set(self.config.hydra.sweeper.get("params") or {})
        if not self._trains:
            swept.add("part")  # one that is started again alone goes on in its folder
        keys = varied_keys(overrides, swept=swept)
        described = []
        for told in overrides:
            with_out = [*told, f"out={quoted(str(self.config.out))}"]
            config = self.hydra_context.config_loader.load_sweep_config(self.config, with_out)
            with open_dict(config):
                del config["hydra"]
            try:
                typed(self.task_function.config_class, config)
                config.out = ""  # the rest is the same wherever it is written
                content = OmegaConf.to_container(config, resolve=True)
                content.pop("tracker", None)
            except ValueError as error:
                raise HydraException(f"{label_of(told, keys)}: {error}") from error
            inputs = fingerprint(content, *_files_of(content))
            described.append((told, label_of(told, keys), inputs))
        return described

    def _command(self, job: Any) -> list[str]:
        from data.config import quoted

        overrides = [*job.overrides, f"out={quoted(str(job.out))}"]
        if "tracker" in self.config:
            given = {override.split("=")[0] for override in job.overrides}
            named = {"tracker.group": job.out.parent.name, "tracker.run_name": job.label or job.out.name}
            overrides += [f"{key}={quoted(value)}" for key, value in named.items() if key not in given]
        if not self._trains:
            return [sys.executable, sys.argv[0], *overrides]
        launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *self._accelerate()]
        return [*launch, *self.options, sys.argv[0], *overrides]

    def _accelerate(self) -> list[str]:
        """The options of `accelerate launch`: always with a file, so that no saved setting of the user's steps in."""
        count = [] if self.num_processes is None else ["--num_processes", str(self.num_processes)]
        port = ["--main_process_port", "0"]  # any that is free on the machine where the job runs
        if self.config_file is not None:
            return ["--config_file", self.config_file, *count, *port]
        on_cpu = not _gpus() and self.cluster is None
        file = "ddp.yaml" if self._processes() > 1 else "cpu.yaml" if on_cpu else "gpu.yaml"
        threads = ["--num_cpu_threads_per_process", str(max(len(os.sched_getaffinity(0)) // (self.jobs * self._processes()), 1))]
        return ["--config_file", str(CONFIG_FILES / file), *count, *port, *(threads if on_cpu else [])]

    def _processes(self) -> int:
        """Processes of each job."""
        if self.num_processes is not None or self.config_file is None:
            return self.num_processes or 1
        return int(OmegaConf.load(self.config_file).get("num_processes", 1))

    def _environment(self, slot: int) -> dict:
        """This process's, and GPUs of its own where there are enough for all the jobs of one time."""
        environment = dict(os.environ)
        gpus, each = _gpus(), self._processes()
        if not gpus:
            environment["ACCELERATE_USE_CPU"] = "true"
        elif 1 < self.jobs and self.jobs * each <= len(gpus):
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slot * each : (slot + 1) * each])
        return environment


def _files_of(config: dict[str, Any]) -> list[Path]:
    """What changes with the data that a job reads."""
    names = {"prompts": "summary.json", "conversations": ""}
    if not config.get("follow"):  # what grows is another file each time
        names["shards"] = "manifest.json"
    read = [Path(config[key]) / name for key, name in names.items() if config.get(key)]
    return [file for file in read if file.is_file()]


def _gpus() -> list[str]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return names if torch.cuda.is_available() else []

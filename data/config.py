"""What every stage shares with Hydra: typed configuration, one-line errors, summary.json."""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import json
import os
import re
import sys
import time
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Callable, TypeVar

import hydra
from hydra._internal.config_repository import ConfigRepository
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

Config = TypeVar("Config")

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "launch"))  # where Hydra finds hydra_plugins/, the launcher of sweeps

FAILED_JOBS: dict[str, str] = {}  # folder of a sweep's job -> what became of it; the launcher adds to them

TARGET_SOURCES = ("smollm2", "tiny_llama", "tiny_qwen3", "tiny_deepseek")
WEIGHT_DTYPES = ("bfloat16", "float16", "float32")


@dataclass
class TargetConfig:
    """The model that is to be sped up, as one YAML of conf/target/ describes it.

    name               short name, goes into shards and checkpoints
    path               Hugging Face folder
    source             null: the folder must exist; else what data/embedded.py makes it from, once
    boundaries         where the residual stream is captured: after that many decoder blocks, ascending
    dtype              of the weights on disk, when data/embedded.py makes them
    trust_remote_code  the target's tokenizer or config is Python code in its folder (Kimi)
    """

    name: str
    path: str
    source: str | None
    boundaries: list[int]
    dtype: str
    trust_remote_code: bool

    def __post_init__(self) -> None:
        known = self.source is None or self.source in TARGET_SOURCES
        require(known, "target.source", self.source, f"null or one of {', '.join(TARGET_SOURCES)}")
        require(self.dtype in WEIGHT_DTYPES, "target.dtype", self.dtype, f"one of {', '.join(WEIGHT_DTYPES)}")
        ascending = all(a < b for a, b in zip(self.boundaries, self.boundaries[1:]))
        valid = bool(self.boundaries) and ascending and self.boundaries[0] >= 0
        require(valid, "target.boundaries", self.boundaries, "ascending numbers from 0, like [2, 15, 27]")


@dataclass
class DataConfig:
    """Stage 1, conversations to tokenized prompts. YAML: conf/data.yaml.

    conversations        file, one JSON object a line, see data/conversations.py
    out                  folder to write
    max_tokens           longest conversation kept, tokens; null: what a server of the target takes, 7 less than its context
    cut_long             cut what is longer to max_tokens instead of refusing it
    min_supervised       fewest supervised tokens of a conversation that is kept
    validation_fraction  0 .. 1, of the conversations, by the hash of their id
    rewritten_history    refuse | last_turn: what to do when the template renders an earlier answer
                         differently once the conversation goes on (dropped thinking)
    template_options     extra variables of the chat template, like {enable_thinking: true}
    """

    target: TargetConfig
    conversations: str
    out: str
    max_tokens: int | None
    cut_long: bool
    min_supervised: int
    validation_fraction: float
    rewritten_history: str
    template_options: dict[str, Any]

    def __post_init__(self) -> None:
        fraction, rewritten = self.validation_fraction, self.rewritten_history
        require(self.max_tokens is None or self.max_tokens >= 2, "max_tokens", self.max_tokens, "null or at least 2")
        require(self.min_supervised >= 1, "min_supervised", self.min_supervised, "at least 1 token")
        require(0 <= fraction < 1, "validation_fraction", fraction, "a share, 0 <= share < 1")
        require(rewritten in ("refuse", "last_turn"), "rewritten_history", rewritten, "refuse or last_turn")


def require(condition: bool, name: str, found: Any, expected: str) -> None:
    """ValueError that names the option, what it is and what it may be, unless `condition` holds."""
    if not condition:
        raise ValueError(f"{name}={found}: expected {expected}")


def typed(cls: type[Config], cfg: DictConfig) -> Config:
    """`cfg` as an instance of the dataclass `cls`, whose __post_init__ has checked the values.

    Raises ValueError for a key that `cls` does not have, a value of the wrong type, and a value that
    the command line had to give and did not.
    """
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), cfg))
    except OmegaConfBaseException as error:
        raise ValueError(_explain(error, known=_keys(cls))) from error


def stage(config_name: str) -> Callable[[Callable[[Any], dict]], Callable[[], None]]:
    """Decorator of a stage's `main(config: SomeConfig) -> dict`: Hydra around it, a clear end after it.

    The configuration is conf/<config_name>.yaml, checked against the annotation of the argument. The
    returned dict is the summary: written to <out>/summary.json and printed in the last line (its
    `line` as is, where it has one). A user's error is one line `error: ...` and exit status 2;
    EYAS_TRACE=1 shows the whole trace. On ranks above 0 nothing is printed or written.
    """

    def decorate(function: Callable[[Any], dict]) -> Callable[[], None]:
        config_class = next(iter(typing.get_type_hints(function).values()))
        rank = int(os.environ.get("RANK", "0"))
        config_folder = ROOT / "conf"
        outs: set[str] = set()  # of the jobs that Hydra has run in this process: with -m more than one

        # not functools.wraps: Hydra would unwrap it and look for the YAML beside the stage's file
        def job(cfg: DictConfig) -> None:
            started = time.monotonic()
            try:
                config = typed(config_class, cfg)
                if config.out in outs:
                    raise ValueError(
                        f"out={config.out} is an earlier job's of this sweep: give each its own, such as "
                        f"'out={config.out}/${{NAME}}' with the NAME of the option that differs"
                    )
                outs.add(config.out)
                summary = {"stage": config_name, **function(config)}
                summary.setdefault("seconds", round(time.monotonic() - started, 2))
                if rank == 0:
                    _finish(Path(config.out), summary)
            except (ValueError, OSError) as error:
                _stop(error, config_class)

        job.config_class = config_class  # for the launcher of a sweep, which checks every job before it starts one

        @functools.wraps(function)
        def main() -> None:
            outs.clear()
            overrides = [f"hydra.job.name={config_name}"]
            if rank > 0:
                overrides += ["hydra.output_subdir=null", "hydra/job_logging=stdout", "hydra/hydra_logging=none"]
            _add_overrides(overrides)
            os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing: this function prints
            try:
                with folders_are_values(config_class, config_folder / f"{config_name}.yaml"):
                    hydra.main(version_base=None, config_path=str(config_folder), config_name=config_name)(job)()
            except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:  # nothing has started yet
                _stop(error, config_class)
            finally:
                _report_failed_jobs()

        return main

    return decorate


@contextlib.contextmanager
def folders_are_values(config_class: type, yaml: Path) -> Iterator[None]:
    """Inside, `drafter=DIR` is a value where the option is text that `yaml` takes from no group of that name.

    Hydra 1.3.8 decides by the name alone, and conf/drafter/ is a group; it asks its repository of configs.
    """
    chosen = {name for entry in OmegaConf.load(yaml).defaults if isinstance(entry, DictConfig) for name in entry}
    texts = {name for name, hint in typing.get_type_hints(config_class).items() if hint is str} - chosen
    is_group = ConfigRepository.group_exists
    ConfigRepository.group_exists = lambda self, config_path: config_path not in texts and is_group(self, config_path)
    try:
        yield
    finally:
        ConfigRepository.group_exists = is_group


def quoted(text: str) -> str:
    """The text as the value of an override: Hydra takes it as it is, whatever is in it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def fingerprint(*parts: Any) -> str:
    """Hex digest of the inputs of a stage: JSON values as they are, the bytes of every Path."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            with part.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        else:
            digest.update(json.dumps(part, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:32]


def finished(out: Path, inputs: str) -> dict | None:
    """The summary that an earlier run left in `out`, if its `fingerprint` equals `inputs`."""
    summary = _summary(out)
    return summary if summary is not None and summary.get("fingerprint") == inputs else None


def _summary(out: Path) -> dict | None:
    """What an earlier run left in `out`."""
    try:
        summary = json.loads((out / "summary.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return summary if isinstance(summary, dict) else None


def write_atomically(path: Path, content: bytes | str) -> None:
    """`content` under `path`, complete or not at all: temporary name, fsync, rename.

    Raises ValueError if the disk is full or the folder cannot be written; the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ValueError(f"cannot write {path}: {error.strerror}; free some space or choose another out=") from error


def _report_failed_jobs() -> None:
    """Ends a sweep of which some jobs failed: a line for each of them, exit status 2."""
    for failure in FAILED_JOBS.values():
        print(f"failed: {failure}", file=sys.stderr)
    if FAILED_JOBS:
        print(f"error: {len(FAILED_JOBS)} jobs failed, see above; the same command runs them again, and only them",
              file=sys.stderr, flush=True)  # fmt: skip
        sys.exit(2)


def _stop(error: Exception, config_class: type) -> None:
    """Ends the process with the error in one line."""
    if os.environ.get("EYAS_TRACE") == "1":
        raise error
    print(f"error: {_explain(error, known=_keys(config_class))}", file=sys.stderr, flush=True)
    sys.exit(2)


def _add_overrides(overrides: list[str]) -> None:
    """Puts them beside the user's on the command line, which must stand together."""
    first = (i for i, argument in enumerate(sys.argv) if i > 0 and "=" in argument and not argument.startswith("-"))
    position = next(first, len(sys.argv))
    sys.argv[position:position] = overrides


def as_json(content: Any) -> str:
    """For people and their tools: a figure of what never happened is nan here and null there, which is JSON."""
    return json.dumps(json.loads(json.dumps(content), parse_constant=lambda _: None), indent=1) + "\n"


def _finish(out: Path, summary: dict) -> None:
    scalars = ", ".join(f"{name} {value}" for name, value in summary.items() if isinstance(value, (int, float)))
    line = summary.get("line") or scalars
    path = out / "summary.json"
    earlier = _summary(out) or {}
    if summary.get("plan") and earlier and not earlier.get("plan"):  # which is of what was done
        print(f"{summary['stage']}: {line}", flush=True)
        return
    is_the_same = "fingerprint" in summary and {**earlier, "line": line} == {**summary, "line": line}
    if not is_the_same:  # else the earlier run's stays, with its own line
        write_atomically(path, as_json(summary))
    print(f"{summary['stage']}: {line} (summary: {path})", flush=True)


def _keys(cls: type, prefix: str = "") -> list[str]:
    """Every option of a config dataclass, dotted."""
    keys = []
    hints = typing.get_type_hints(cls)
    for field in fields(cls):
        keys.append(prefix + field.name)
        if hasattr(hints[field.name], "__dataclass_fields__"):
            keys += _keys(hints[field.name], f"{prefix}{field.name}.")
    return keys


def _explain(error: Exception, *, known: list[str]) -> str:
    """The error in one line, in the words of the command line."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    key = getattr(cause, "full_key", None)
    if isinstance(cause, (MissingMandatoryValue, InterpolationToMissingValueError)):
        wanted = re.search(r"[Mm]andatory value: (\w+)", str(cause))  # ${out} of hydra.run.dir names out
        key = wanted[1] if wanted else key
        return f"{key}=... is missing: give it on the command line, see --help"
    if isinstance(error, InstantiationException) and isinstance(error.__cause__, HydraException):
        return str(error.__cause__)
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and key and key.startswith("hydra."):
        return f"there is no option {key}: docs/sweeps.md has those of hydra.launcher, --hydra-help the rest"
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and key:
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        return f"there is no option {key}: {hint}"
    text = str(error).split("Config search path:")[0]
    text = " ".join(line.strip() for line in text.splitlines() if line.strip() and "object_type=" not in line)
    return text.replace("full_key:", "in option")

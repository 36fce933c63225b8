"""How an SGLang server is started: its command line, its environment, and the folder that brings the plugin along."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from extract.config import EngineConfig, ExtractConfig
from extract.plugin import VARIABLE

VERSIONS = ((0, 5, 16), (0, 5, 23))  # of SGLang, first and last that the plugin and the boundaries were read against
WHOLE_ON_CPU = (0, 5, 19)  # before it, its CPU attention forgets the drafts in a sequence's length when it verifies them
CPU_TOTAL_TOKENS = 16384  # KV cache; SmolLM2-135M in float32: 45 KiB a token
CPU_RUNNING_REQUESTS = 16
CPU_PREFILL_TOKENS = 1024  # of one forward: enough to fill two cores, and the progress bar moves every few seconds
PLUGIN_FILES = ("__init__.py", "plugin.py", "copier.py", "spool.py", "feed.py", "cpu/")  # all that the server's side needs


@dataclass(frozen=True)
class Installation:
    """What is behind `engine.python`: SGLang's version, and whether its PyTorch sees a GPU."""

    python: str
    version: str
    device: str  # cpu | cuda


@dataclass(frozen=True)
class Capturing:
    """What the plugin is asked for.

    spool      folder, on the server's side and on ours the same
    layer_ids  of the engine, from data/boundaries.py; null: the states are not captured
    feed       record what a drafter is fed and proposes
    """

    spool: Path
    layer_ids: list[int] | None
    feed: bool = False

    def to_json(self) -> str:
        return json.dumps({"spool": str(self.spool.resolve()), "layer_ids": self.layer_ids, "feed": self.feed})


@dataclass(frozen=True)
class Drafting:
    """An EAGLE-3 drafter beside the target, which proposes a chain of `num_steps` tokens at a time."""

    path: Path
    num_steps: int
    unquantized: bool = False  # the target is quantized and the drafter is not

    def options(self) -> list[str]:
        options = [
            "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(self.path),
            "--speculative-num-steps", str(self.num_steps), "--speculative-eagle-topk", "1",
            "--speculative-num-draft-tokens", str(self.num_steps + 1),
        ]  # fmt: skip
        return options + (["--speculative-draft-model-quantization", "unquant"] if self.unquantized else [])


def installation(engine: EngineConfig) -> Installation:
    """Asks `engine.python` for its SGLang.

    Raises ValueError if there is no such Python, no SGLang in it, or one of another version than VERSIONS.
    """
    if engine.python is None:
        found = _here()
    else:
        found = _elsewhere(engine.python, need_device=engine.device == "auto")
    if engine.device != "auto":
        found = Installation(found.python, found.version, engine.device)
    check_version(found.version, f"{found.python} has")
    return found


def check_version(version: str, where: str) -> None:
    """Raises ValueError, which begins with `where`, unless it is an SGLang that Eyas was read against."""
    if not VERSIONS[0] <= numbers_of(version) <= VERSIONS[1]:
        first, last = (".".join(map(str, known)) for known in VERSIONS)
        raise ValueError(f"{where} SGLang {version}: Eyas needs {first} to {last}, install one")


def numbers_of(version: str) -> tuple[int, ...]:
    """(0, 5, 16) of 0.5.16.post1."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _here() -> Installation:
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"{sys.executable} has no sglang: install it, set engine.python to a Python that has it, or attach to a "
            f"running server with server.url"
        ) from None
    import torch

    return Installation(sys.executable, version, "cuda" if torch.cuda.is_available() else "cpu")


@functools.cache
def _elsewhere(python: str, *, need_device: bool) -> Installation:
    code = "import importlib.metadata, json; found = [importlib.metadata.version('sglang'), None]\n"
    if need_device:
        code += "import torch; found[1] = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
    try:
        answer = subprocess.run(
            [python, "-c", code + "print(json.dumps(found))"], capture_output=True, text=True, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"engine.python={python} cannot be run ({error}): set it to a Python with sglang") from error
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(f"engine.python={python} has no usable sglang ({reason}): install it there, or set another")
    version, device = json.loads(answer.stdout.splitlines()[-1])
    return Installation(python, version, device or "cuda")


def command(
    target: Path,
    found: Installation,
    *,
    engine: EngineConfig,
    host: str,
    port: int,
    capturing: bool,
    drafting: Drafting | None,
    trust_remote_code: bool,
) -> list[str]:
    """The command line of the server; on a CPU through the shim of extract/cpu/.

    Raises ValueError if a drafter is to be served on a CPU by a version that cannot.
    """
    on_cpu = found.device == "cpu"
    if on_cpu and drafting and numbers_of(found.version) < WHOLE_ON_CPU:
        raise ValueError(
            f"SGLang {found.version} does not verify drafts rightly on a CPU: use 0.5.19 or newer there, or a GPU; "
            f"capturing needs no other version"
        )
    module = "extract.cpu.launch" if on_cpu else "sglang.launch_server"
    line = [found.python, "-m", module, "--model-path", str(target), "--host", host, "--port", str(port)]
    line += ["--log-level-http", "warning", "--skip-server-warmup"]
    line += ["--dtype", ("float32" if on_cpu else "auto") if engine.dtype == "auto" else engine.dtype]
    if on_cpu:
        # These two backends take the shim's attention; the plain flag would ask for a CPU with AMX. A server that waits
        # takes a core, without --sleep-on-idle.
        line += ["--device", "cpu", "--sleep-on-idle", "--prefill-attention-backend", "intel_amx"]
        line += ["--decode-attention-backend", "intel_amx", "--chunked-prefill-size", str(CPU_PREFILL_TOKENS)]
    if not (engine.overlap_schedule if engine.overlap_schedule is not None else not on_cpu):
        line += ["--disable-overlap-schedule"]
    if capturing and not engine.radix_cache:
        line += ["--disable-radix-cache"]  # what it keeps of our requests, nobody asks for again
    if capturing and engine.tensor_parallel > 1 and not on_cpu:
        # With it GPT-OSS and GLM hand out sums before they are complete (0.5.16). It is for batches of at most 2048 tokens.
        line += ["--enforce-disable-flashinfer-allreduce-fusion"]
    if trust_remote_code:
        line += ["--trust-remote-code"]
    if engine.tensor_parallel > 1:
        line += ["--tp-size", str(engine.tensor_parallel)]
    if engine.data_parallel > 1:
        line += ["--dp-size", str(engine.data_parallel)]
    if engine.dp_attention:
        line += ["--enable-dp-attention"]
    limits = {
        "--context-length": engine.context_length,
        "--max-total-tokens": engine.max_total_tokens or (CPU_TOTAL_TOKENS if on_cpu else None),
        "--max-running-requests": engine.max_running_requests or (CPU_RUNNING_REQUESTS if on_cpu else None),
        "--mem-fraction-static": engine.mem_fraction or (0.1 if on_cpu else None),
    }
    line += [text for option, value in limits.items() if value is not None for text in (option, str(value))]
    return line + (drafting.options() if drafting else []) + list(engine.extra_args)


def environment(
    found: Installation, *, engine: EngineConfig, plugin: Path, capturing: Capturing | None
) -> dict[str, str]:
    """What the server's environment has beside our own."""
    paths = [str(plugin), *filter(None, [os.environ.get("PYTHONPATH")])]
    added = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    if capturing:
        added[VARIABLE] = capturing.to_json()
    if found.device == "cpu":
        added |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
        num_processes = engine.tensor_parallel * (1 if engine.dp_attention else engine.data_parallel)
        if numbers_of(found.version) < WHOLE_ON_CPU:  # it counts the processes of one copy
            num_processes = engine.tensor_parallel
        if num_processes > 1:  # else every process takes every core
            cores = sorted(os.sched_getaffinity(0))
            share = max(1, len(cores) // num_processes)
            groups = [cores[i * share : (i + 1) * share] or cores[:1] for i in range(num_processes)]
            added["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, group)) for group in groups)
    return added


def how_to_start(target: Path, config: ExtractConfig, capturing: Capturing) -> dict[str, str]:
    """mode=command: prints what starts a capturing server by hand, in a container or on another machine."""
    found = installation(config.engine)
    capturing.spool.mkdir(parents=True, exist_ok=True)  # else it would be made by the server's user, root in a container
    plugin = install_plugin(Path(config.out).resolve() / "server" / "plugin")
    line = command(
        target.resolve(), found, engine=config.engine, host=config.server.host, port=config.server.port or 30000,
        capturing=True, drafting=None, trust_remote_code=config.target.trust_remote_code,
    )  # fmt: skip
    added = environment(found, engine=config.engine, plugin=plugin, capturing=capturing)
    shown = " \\\n  ".join([f"{name}={shlex.quote(value)}" for name, value in added.items()] + [shlex.join(line)])
    print(f"{shown}\n\nThen: python extract/main.py target={config.target.name} server.url=http://... "
          f"server.spool={capturing.spool.resolve()} prompts=... out=...")  # fmt: skip
    return {"command": shown, "line": f"{plugin} and {capturing.spool} must be at the same path there"}


def install_plugin(folder: Path) -> Path:
    """A folder for the server's PYTHONPATH: the plugin's files and the entry point by which SGLang finds it.

    Nothing is installed in the server's environment. Where Eyas is installed there, this copy comes first.
    """
    root = Path(__file__).resolve().parent
    shutil.rmtree(folder, ignore_errors=True)
    for name in PLUGIN_FILES:
        target = folder / "extract" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            shutil.copytree(root / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(root / name, target)
    about = folder / "eyas-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: eyas\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[sglang.srt.plugins]\neyas = extract.plugin:register\n")
    return folder

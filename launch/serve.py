"""Serve: a target with its drafter, after the checkpoint and the wiring were checked, until Ctrl-C.

    python launch/serve.py target=smollm2_135m drafter=RUN/export [server.port=30000]

It prints the plain SGLang command that serves the same, for scripts and containers that know nothing of Eyas.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import shlex
import signal
import time

from data.config import TargetConfig, stage
from data.embedded import ensure_target
from data.schema import Record
from data.shards import ShardReader
from data.signals import told_to_end
from data.storage import local_folder
from extract.command import Capturing, Drafting, command, environment, install_plugin, installation
from extract.probe import load_reference, probe_drafter
from extract.server import Server
from launch.config import ServeConfig
from launch.drafting import checked_drafting
from train.export import check_export
from train.target import check_shards

POLL_SECONDS = 0.5


@stage("serve")
@told_to_end("it was not serving yet")
def main(config: ServeConfig) -> dict:
    drafter, target_path, out = Path(config.drafter), ensure_target(config.target), Path(config.out)
    version = installation(config.engine).version
    drafting = checked_drafting(
        drafter,
        target=config.target,
        target_path=target_path,
        num_drafts=config.num_drafts,
        engine_version=version,
    )
    print(f"the same server without Eyas:\n\n  {plain_command(config, target_path, drafting)}\n", flush=True)
    reference = load_reference(target_path, config.probe, trust_remote_code=config.target.trust_remote_code)
    boundaries = check_export(drafter)["eyas"]["boundaries"]
    record = first_record(config.shards, target=config.target, target_path=target_path, boundaries=boundaries)
    if reference is None and record is None:
        raise ValueError(
            f"nothing to compare the wiring with: the Hugging Face reference of {config.target.name} does not fit in memory, "
            f"or probe.reference=off; give shards=, what the drafter learnt from"
        )
    with Server(
        target_path,
        engine=config.engine,
        config=config.server,
        out=out / "server",
        capturing=Capturing(out / "spool", layer_ids=None, feed=True),
        drafting=drafting,
        trust_remote_code=config.target.trust_remote_code,
    ) as server:
        report = probe_drafter(
            server,
            boundaries=boundaries,
            reference=reference,
            record=record,
            config=config.probe,
        )
        del reference  # its memory, while the server is in use
        print(f"serving {config.target.name} at {server.url} (OpenAI's API: {server.url}/v1); Ctrl-C ends it", flush=True)
        seconds = wait(server)
    return {
        "url": server.url,
        "probe_passed": report.passed,
        "num_drafts": drafting.num_steps,
        "engine": f"sglang {version}",
        "line": f"stopped after {seconds:.0f} s",
    }


def plain_command(config: ServeConfig, target_path: Path, drafting: Drafting) -> str:
    """What serves the same without this program; on a CPU it needs the shim, which stands in OUT/plugin."""
    found = installation(config.engine)
    line = command(
        target_path.resolve(), found, engine=config.engine, host=config.server.host, port=config.server.port or 30000,
        capturing=False, drafting=drafting, trust_remote_code=config.target.trust_remote_code,
    )  # fmt: skip
    if found.device != "cpu":
        return shlex.join(line)
    plugin = install_plugin(Path(config.out).resolve() / "plugin")
    added = environment(found, engine=config.engine, plugin=plugin, capturing=None)
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in added.items()), shlex.join(line)])


def first_record(shards: str | None, *, target: TargetConfig, target_path: Path, boundaries: list[int]) -> Record | None:
    """The dataset's first, decoded; None where there is no dataset.

    Raises ValueError if it has no record to train on, or was captured from another target or at other boundaries: what
    the drafter is fed would be compared with something else.
    """
    if shards is None:
        return None
    reader = ShardReader(local_folder(shards), split="train")
    cure = "give the shards that the drafter learnt from, or leave shards= out where the reference fits in memory"
    check_shards(reader, target_path, name=target.name, boundaries=boundaries, cure=cure)
    if len(reader) == 0:
        raise ValueError(f"{shards} has no record of the train split: give the shards that the drafter learnt from")
    return reader.read(0).decoded()


def wait(server: Server) -> float:
    """Seconds until Ctrl-C or SIGTERM. Raises ValueError if the server ends by itself."""
    started = time.monotonic()
    for ending in (signal.SIGINT, signal.SIGTERM):  # a shell's background job starts with SIGINT ignored
        signal.signal(ending, signal.default_int_handler)
    try:
        while server.is_alive():
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        return time.monotonic() - started
    raise server.failure("the server ended", cure="see its log")


if __name__ == "__main__":
    main()

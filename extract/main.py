"""Stage 2: tokenized prompts -> a real SGLang server -> shards of hidden states.

python extract/main.py target=smollm2_135m prompts=DIR out=SHARDS
"""

import sys, pathlib  # noqa: E401

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import functools  # noqa: E402
from contextlib import ExitStack  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import BinaryIO  # noqa: E402

from data.config import stage  # noqa: E402
from data.embedded import ensure_target  # noqa: E402
from data.locks import claim  # noqa: E402
from data.manifest import finished_ids  # noqa: E402
from data.prepare import prepare_answers  # noqa: E402
from data.signals import told_to_end  # noqa: E402
from extract.command import Capturing, how_to_start  # noqa: E402
from extract.config import ExtractConfig  # noqa: E402
from extract.generate import FILE, generate  # noqa: E402
from extract.run import Extraction  # noqa: E402
from extract.server import Server  # noqa: E402


@stage("extract")
def main(config: ExtractConfig) -> dict:
    target, out = ensure_target(config.target), Path(config.out)

    def kept() -> str:
        there = "answers" if config.mode == "generate" else f"{len(finished_ids(out))} records in finished shards"
        return f"{there} are kept, the same command continues"

    with told_to_end(kept), ExitStack() as stack:
        only_tells = config.mode == "command" or (config.mode == "extract" and config.plan)
        if not only_tells:
            stack.enter_context(only_run(out))
        if config.mode == "generate":
            return generate(config, target, start=starter(stack, config, target, None))
        extraction = Extraction.of(config, target)
        if config.mode == "command":
            return how_to_start(target, config, extraction.capturing)
        start = starter(stack, config, target, extraction.capturing)
        if config.mode == "extract":
            return extraction.run(Path(config.prompts), start=start)
        answers = generate(config, target, start=start)
        prepare_answers(config.target, out / FILE, out / "prompts")
        extracted = extraction.run(out / "prompts", start=start)
        return {"answers": answers, **extracted, "line": f"{answers['line']}; {extracted['line']}"}


def only_run(out: Path) -> BinaryIO:
    """Until it is closed, no other run begins in `out`. Raises ValueError where one is at work."""
    out.mkdir(parents=True, exist_ok=True)
    return claim(out / ".run.lock", taken=f"another run extracts into {out}", cure="wait for it to end, or choose another out=")


def starter(stack: ExitStack, config: ExtractConfig, target: Path, capturing: Capturing | None):
    """What gives the server: the first call begins its start, `Server.ready` waits for it; it ends with `stack`."""
    engine = config.engine
    if config.mode == "generate_and_extract":
        engine = replace(engine, radix_cache=True)  # a conversation's turns begin alike; what is captured never hits it

    @functools.cache
    def start() -> Server:
        server = Server(
            target, engine=engine, config=config.server, out=Path(config.out) / "server", capturing=capturing,
            trust_remote_code=config.target.trust_remote_code, spool_is_temporary=not config.server.spool,
        )  # fmt: skip
        stack.callback(server.stop)
        server.begin()
        return server

    return start


if __name__ == "__main__":
    main()

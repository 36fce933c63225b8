"""Stage 2: tokenized prompts -> a real SGLang server -> shards of hidden states.

python extract/main.py target=smollm2_135m prompts=DIR out=SHARDS
"""

import sys, pathlib  # noqa: E401

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import shutil  # noqa: E402
from contextlib import nullcontext  # noqa: E402
from dataclasses import asdict  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

from data.boundaries import architecture_of, engine_layer_ids, text_config  # noqa: E402
from data.codecs import Codec, TeacherHead  # noqa: E402
from data.config import finished, fingerprint, stage  # noqa: E402
from data.embedded import ensure_target  # noqa: E402
from data.manifest import finished_ids  # noqa: E402
from data.prompts import PromptSet  # noqa: E402
from data.schema import Provenance  # noqa: E402
from data.shards import ShardWriter  # noqa: E402
from data.storage import Uploader  # noqa: E402
from extract.capture import head_weight  # noqa: E402
from extract.command import Capturing, how_to_start, installation  # noqa: E402
from extract.config import ExtractConfig  # noqa: E402
from extract.generate import generate  # noqa: E402
from extract.probe import load_reference, probe_server  # noqa: E402
from extract.server import Server, version_at  # noqa: E402
from extract.sink import extract  # noqa: E402


@stage("extract")
def main(config: ExtractConfig) -> dict:
    target, out = ensure_target(config.target), Path(config.out)
    if config.mode == "generate":
        return generate(config, target)

    version = version_at(config.server.url) if config.server.url else installation(config.engine).version
    boundaries, num_layers = config.target.boundaries, text_config(target)["num_hidden_layers"]
    layer_ids = engine_layer_ids(
        boundaries,
        architecture=architecture_of(target),
        engine=config.engine.name,
        engine_version=version,
        num_layers=num_layers,
    )
    capturing = Capturing(Path(config.server.spool or out / "spool"), layer_ids)
    if config.mode == "command":
        return how_to_start(target, config, capturing)

    prompts = PromptSet.load(config.prompts)
    provenance = Provenance.of_target(
        target,
        name=config.target.name,
        boundaries=boundaries,
        codec=config.codec,
        engine=config.engine.name,
        engine_version=version,
    )
    inputs = fingerprint(asdict(provenance), *(Path(config.prompts) / f"prompts.{end}" for end in ("jsonl", "safetensors")))
    summary = {
        "fingerprint": inputs,
        "target": config.target.name,
        "records": len(prompts),
        "tokens": len(prompts.tokens),
        "boundaries": boundaries,
        "engine_ids": layer_ids,
        "engine": f"{config.engine.name} {version}",
    }
    shutil.copy(Path(config.prompts) / "vocabulary.safetensors", out / "vocabulary.safetensors")
    uploader = Uploader(out, config.upload, keep_local=config.keep_local) if config.upload else None
    if (done := finished(out, inputs)) and finished_ids(out) >= set(prompts.ids):
        if uploader:
            uploader.close()
        return {**done, "line": f"nothing to do, {out} holds all {len(prompts)} records"}

    # Refuses a folder that holds other data, or that another process writes to, before a server is started for it.
    ShardWriter(out, provenance=provenance, split="train", shard_bytes=config.shard_bytes).close()
    trust = config.target.trust_remote_code
    reference = load_reference(target, config.probe, trust_remote_code=trust)
    with (
        uploader or nullcontext(),
        Server(
            target, engine=config.engine, config=config.server, out=out / "server", capturing=capturing,
            trust_remote_code=trust,
        ) as server,
    ):  # fmt: skip
        report = probe_server(server, boundaries=boundaries, reference=reference, config=config.probe)
        del reference  # its memory, during a long extraction
        head = load_head(target, config)
        extracted = extract(
            prompts,
            server=server,
            out=out,
            provenance=provenance,
            shard_bytes=config.shard_bytes,
            in_flight_bytes=config.in_flight_bytes,
            retries=config.retries,
            head=head,
            uploader=uploader,
        )
    return {
        **summary,
        "probe_passed": report.passed,
        "records_now": extracted.records,
        "records_earlier": extracted.earlier,
        "line": f"{len(prompts)} records, {len(prompts.tokens)} tokens at boundaries {boundaries} in {out}",
    }


def load_head(target: Path, config: ExtractConfig) -> TeacherHead | None:
    """The target's head, where the codec stores the tokens that it finds most likely."""
    if Codec.parse(config.codec).last != "topk":
        return None
    device = config.head_device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return TeacherHead(head_weight(target), device=device)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"the GPU has no room for the target's head beside its server ({error}): lower engine.mem_fraction, or set "
            f"head_device=cpu, which is slow for a large vocabulary"
        ) from error


if __name__ == "__main__":
    main()

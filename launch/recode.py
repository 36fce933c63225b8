"""A dataset in another codec, from the states that it has: nothing is captured again.

python launch/recode.py target=smollm2_135m shards=DIR out=DIR codec=fp8+topk64
"""

import sys, pathlib  # noqa: E401

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import shutil  # noqa: E402
from dataclasses import dataclass, replace  # noqa: E402
from pathlib import Path  # noqa: E402

from tqdm import tqdm  # noqa: E402

from data import vocab  # noqa: E402
from data.codecs import Codec, TeacherHead  # noqa: E402
from data.config import TargetConfig, require, stage  # noqa: E402
from data.embedded import ensure_target  # noqa: E402
from data.manifest import FILE, Manifest, mark_complete, read_index  # noqa: E402
from data.schema import SPLITS, Provenance, Record, check_same  # noqa: E402
from data.shards import ShardReader, ShardWriter  # noqa: E402
from data.storage import local_folder  # noqa: E402
from extract.capture import teacher_head  # noqa: E402


@dataclass
class RecodeConfig:
    """From one codec to another. YAML: conf/recode.yaml.

    shards       folder with a manifest.json, or s3://…
    out          folder to write; the same command continues there
    codec        see data/codecs.py
    shard_bytes  a shard is finished once it is this large
    device       auto | cpu | cuda: where codec topk asks the target's head
    """

    target: TargetConfig
    shards: str
    out: str
    codec: str
    shard_bytes: int
    device: str

    def __post_init__(self) -> None:
        Codec.parse(self.codec)
        require(self.shard_bytes >= 1, "shard_bytes", self.shard_bytes, "at least 1")
        require(self.device in ("auto", "cpu", "cuda"), "device", self.device, "auto, cpu or cuda")


@stage("recode")
def main(config: RecodeConfig) -> dict:
    source, out, codec = local_folder(config.shards), Path(config.out), Codec.parse(config.codec)
    manifest = Manifest.load(source)
    found = manifest.provenance
    head = None
    if codec.last == "topk" and Codec.parse(found.codec).last != "topk":
        target = ensure_target(config.target)
        expected = Provenance.of_target(
            target,
            name=config.target.name,
            boundaries=list(found.boundaries),
            codec=found.codec,
            engine=found.engine,
            engine_version=found.engine_version,
        )
        check_same(found, expected, where=str(source))
        head = teacher_head(target, device=config.device)
    recode(source, out, codec=codec, head=head, shard_bytes=config.shard_bytes)
    written = Manifest.load(out)
    before, after = (sum(shard.bytes for shard in manifest.shards) for manifest in (Manifest.load(source), written))
    num_tokens = sum(shard.tokens for shard in written.shards)
    if num_tokens == 0:
        raise ValueError(f"{source} has no records: nothing was recoded; the command that makes it continues there")
    return {
        "codec": codec.name,
        "tokens": num_tokens,
        "bytes": after,
        "bytes_per_token": round(after / num_tokens, 1),
        "share": round(after / before, 4),
        "line": f"{num_tokens} tokens as {codec.name} in {out}: {after / 1e9:.2f} GB, {100 * after / before:.1f} % of "
        f"{found.codec}'s" + ("" if written.complete else "; it is not complete, as its source is not"),
    }


def recode(source: Path, out: Path, *, codec: Codec, head: TeacherHead | None, shard_bytes: int) -> None:
    """Writes what `source` has and `out` has not yet.

    head  the target's, for a codec that stores the most likely tokens of states; else None

    Raises ValueError if `source` lacks what the codec stores, or `out` holds another dataset.
    """
    manifest = Manifest.load(source)
    if out.resolve() == source.resolve():
        raise ValueError(f"out={out} is the dataset itself: choose another out=")
    provenance = replace(manifest.provenance, codec=codec.name)
    _check_possible(source, Codec.parse(manifest.provenance.codec), codec)
    done, there = _finished(out), _finished(source)
    if strange := [id for id, about in done.items() if there.get(id) != about]:
        raise ValueError(
            f"{out} holds {len(strange)} records that {source} has not, like {min(strange)}: they were made from another "
            f"dataset, or before it was captured again; choose another out="
        )
    out.mkdir(parents=True, exist_ok=True)
    if (source / vocab.FILE).exists():
        shutil.copy(source / vocab.FILE, out / vocab.FILE)
    total = sum(shard.tokens for shard in manifest.shards)
    interval = 0.5 if sys.stderr.isatty() else 30.0  # seconds; a log file wants few lines
    with tqdm(total=total, desc="recode", unit=" tokens", unit_scale=True, mininterval=interval) as progress:
        for split in SPLITS:
            with ShardWriter(
                out, provenance=provenance, split=split, shard_bytes=shard_bytes, part=manifest.part
            ) as writer:
                for record in ShardReader(source, split=split):
                    if record.id not in done:
                        writer.write(with_top_k(record.decoded(), codec, head))
                    progress.update(record.num_tokens)
    if manifest.complete:
        mark_complete(out)


def _finished(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Id -> source, tokens and supervised tokens of all finished records; empty if there is no dataset yet."""
    if not (folder / FILE).exists():
        return {}
    entries = (entry for shard in Manifest.load(folder).shards for entry in read_index(folder, shard))
    return {entry.id: (entry.source, entry.num_tokens, entry.num_supervised) for entry in entries}


def _check_possible(source: Path, found: Codec, codec: Codec) -> None:
    """Raises ValueError if what `codec` stores cannot be had from `found`."""
    if found.last != "topk":
        return
    if codec.last != "topk":
        raise ValueError(f"{source} is {found.name} and has no last, codec {codec.name} stores it: capture it again")
    if codec.top_k > found.top_k:
        raise ValueError(
            f"{source} has the {found.top_k} most likely tokens and no last, codec {codec.name} stores more: capture it again"
        )


def with_top_k(record: Record, codec: Codec, head: TeacherHead | None) -> Record:
    """The record with the teacher's most likely tokens, if the codec stores them: from `last`, or of those it has."""
    if codec.last != "topk":
        return record
    if record.last is not None:
        return replace(record, **head.top_k(record.last, codec.top_k))
    kept = {name: getattr(record, name)[:, : codec.top_k] for name in ("top_ids", "top_log_probs")}
    return replace(record, **kept)


if __name__ == "__main__":
    main()

"""One dataset from the parts that several servers made (extract/main.py part=i/n).

python launch/merge.py parts=[DIR,DIR,...] out=DIR
"""

import sys, pathlib  # noqa: E401

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import os  # noqa: E402
import shutil  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from dataclasses import dataclass, replace  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from data import vocab  # noqa: E402
from data.config import require, stage, write_atomically  # noqa: E402
from data.manifest import FILE, Manifest, ShardInfo, index_name, parse_part, read_index, remove_shards  # noqa: E402
from data.schema import SPLITS, check_same  # noqa: E402
from data.storage import Remote, local_folder  # noqa: E402
from data.vocab import Vocabulary  # noqa: E402

HOW = ("link", "move", "copy")


@dataclass
class MergeConfig:
    """Parts to one dataset. YAML: conf/merge.yaml.

    parts  their folders, or s3://…
    out    folder to write
    into   s3://… if the parts are there; `out` is then for the log
    how    link: hard links, which take no space and no time | move: the parts are no datasets any more | copy: to
           another file system. Of parts on S3, whatever `how` is, the shards are copied by the store itself and stay
    """

    parts: list[str]
    out: str
    into: str
    how: str

    def __post_init__(self) -> None:
        require(len(self.parts) >= 1, "parts", self.parts, "the folders of the parts, like [shards/0,shards/1]")
        require(self.how in HOW, "how", self.how, f"one of {', '.join(HOW)}")


@stage("merge")
def main(config: MergeConfig) -> dict:
    merged = merge(config.parts, config.into, how=config.how)
    records, tokens = (sum(getattr(shard, name) for shard in merged.shards) for name in ("samples", "tokens"))
    return {
        "parts": len(config.parts),
        "shards": len(merged.shards),
        "records": records,
        "tokens": tokens,
        "line": f"{records} records, {tokens} tokens of {len(config.parts)} parts in {config.into}",
    }


def merge(parts: Sequence[Path | str], out: Path | str, *, how: str) -> Manifest:
    """The manifest of the merged dataset, whose shards are those of the parts under new numbers, part after part.

    parts, out  folders, or all of them s3://…    how  see MergeConfig

    Everything is checked before the first file is touched. Raises ValueError if a part is missing, incomplete, there
    twice, of another target or codec, or holds a record that another one has too; or if `out` holds a dataset.
    """
    place, parts = _Place(out), [str(part).rstrip("/") for part in parts]
    folders = [local_folder(part) for part in parts]
    manifests = [Manifest.load(folder) for folder in folders]
    order = _in_order(parts, manifests)
    parts, folders, manifests = ([of[i] for i in order] for of in (parts, folders, manifests))
    for part, manifest in zip(parts, manifests):
        check_same(manifest.provenance, manifests[0].provenance, where=str(part))
        if manifest.provenance.codec != manifests[0].provenance.codec:
            raise ValueError(
                f"{part} holds {manifest.provenance.codec} records, {parts[0]} {manifests[0].provenance.codec}: bring "
                f"them to one codec first, see launch/recode.py"
            )
    _check_disjoint(folders, manifests)
    vocabulary = _vocabulary(folders)

    shards: list[ShardInfo] = []
    todo = [(part, shard) for part, manifest in zip(parts, manifests) for shard in manifest.shards]
    with tempfile.TemporaryDirectory() as small:
        place.begin()
        for part, shard in tqdm(todo, desc="merge", unit="shard"):
            number = sum(other.split == shard.split for other in shards)
            renamed = replace(shard, name=f"{shard.split}-{number:06d}.tar")
            for old, new in ((index_name(shard.name), index_name(renamed.name)), (shard.name, renamed.name)):
                place.bring(f"{part}/{old}", new, how=how)
            shards.append(renamed)
        shards.sort(key=lambda shard: SPLITS.index(shard.split))  # stable: each split in the order of its parts
        merged = Manifest(provenance=manifests[0].provenance, shards=tuple(shards), complete=True)
        if vocabulary is not None:
            vocabulary.save(small)
            place.put(Path(small, vocab.FILE))
        merged.save(small)
        place.put(Path(small, FILE))  # last: until then `out` is no dataset
    if how == "move" and not place.elsewhere:
        for folder, manifest in zip(folders, manifests):
            remove_shards(folder, {shard.name for shard in manifest.shards})
            (folder / FILE).unlink()
    return merged


class _Place:
    """Where the merged dataset comes to be. Raises ValueError if there already is one, or it cannot be reached."""

    def __init__(self, out: Path | str) -> None:
        self.out, self.elsewhere = str(out), "://" in str(out)
        self.remote = Remote(self.out.rstrip("/"), keep=False, mirror=False)
        with self.remote.reached() as (files, root):
            if files.exists(f"{root}/{FILE}"):
                raise ValueError(f"{out} already holds a dataset: choose another out=")

    def begin(self) -> None:
        """Makes the folder, and takes out of it what a merge that was killed was writing."""
        with self.remote.reached() as (files, root):
            files.makedirs(root, exist_ok=True)
        if not self.elsewhere:
            for name in (FILE, vocab.FILE):
                for leftover in Path(self.out).glob(f".{name}.*.tmp"):
                    leftover.unlink()

    def bring(self, source: str, name: str, *, how: str) -> None:
        """The file at `source` under `name`."""
        if self.elsewhere != ("://" in source):
            raise ValueError(f"{source} is not where out={self.out} is: give both on one file system, or both on S3")
        if self.elsewhere:
            with self.remote.reached() as (files, root):
                files.copy(source, f"{root}/{name}")
            return
        target = Path(self.out, name)
        target.unlink(missing_ok=True)  # of a merge that was interrupted
        try:
            if how == "copy":
                shutil.copyfile(source, target)
                with target.open("rb+") as copied:  # on the disk before the manifest lists it
                    os.fsync(copied.fileno())
            else:
                os.link(source, target)
        except OSError as error:
            raise ValueError(
                f"cannot {how} {source} to {target} ({error.strerror}): set how=copy, or free some space"
            ) from error

    def put(self, file: Path) -> None:
        if self.elsewhere:
            with self.remote.reached() as (files, root):
                files.put_file(str(file), f"{root}/{file.name}")
        else:
            write_atomically(Path(self.out, file.name), file.read_bytes())


def _in_order(parts: Sequence[Path | str], manifests: list[Manifest]) -> list[int]:
    """Places of parts 0/n, 1/n, … n-1/n in `parts`."""
    found: dict[int, int] = {}  # number of a part -> its place
    counts = {parse_part(manifest.part)[1] for manifest in manifests if manifest.part}
    for place, (part, manifest) in enumerate(zip(parts, manifests)):
        if manifest.part is None:
            raise ValueError(f"{part} is no part of a dataset: expected one that was made with part=i/n")
        number, count = parse_part(manifest.part)
        if len(counts) > 1:
            raise ValueError(
                f"the parts are of {sorted(counts)}: {part} is {manifest.part}; give the parts of one dataset"
            )
        if number in found:
            raise ValueError(f"part {manifest.part} is there twice: {parts[found[number]]} and {part}")
        away = [
            shard.name for shard in manifest.shards if "://" not in str(part) and not Path(part, shard.name).exists()
        ]
        if away:
            raise ValueError(
                f"{away[0]} is not in {part}: give the place where its shards were sent, upload= of that run"
            )
        if not manifest.complete:
            raise ValueError(
                f"{part} is not complete: the command that makes it (part={manifest.part}) continues there"
            )
        found[number] = place
    missing = [f"{i}/{count}" for i in range(count) if i not in found]
    if missing:
        raise ValueError(f"part(s) {', '.join(missing)} are missing: expected all {count}")
    return [found[i] for i in range(count)]


def _check_disjoint(folders: list[Path], manifests: list[Manifest]) -> None:
    seen: dict[str, Path] = {}
    for folder, manifest in zip(folders, manifests):
        for shard in manifest.shards:
            for entry in read_index(folder, shard):
                if entry.id in seen:
                    raise ValueError(
                        f"record {entry.id} is in {seen[entry.id]} and in {folder}: the parts were not made from "
                        f"the same prompts with the same n"
                    )
                seen[entry.id] = folder


def _vocabulary(folders: list[Path]) -> Vocabulary | None:
    """The parts' own if they share one, as parts of one prompt set do; else their counts added up."""
    if not any((folder / vocab.FILE).exists() for folder in folders):
        return None
    different = list({found.data_hash: found for found in (Vocabulary.load(folder) for folder in folders)}.values())
    first = different[0]
    for other in different[1:]:
        if other.tokenizer_hash != first.tokenizer_hash or not torch.equal(other.special_ids, first.special_ids):
            raise ValueError(
                "the parts' vocabularies were counted with different tokenizers: run python data/main.py again"
            )
    counts = torch.stack([other.counts for other in different]).sum(0)
    return replace(first, counts=counts, data_hash="+".join(other.data_hash for other in different))


if __name__ == "__main__":
    main()

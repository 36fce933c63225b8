"""Proves a dataset: all that its manifest lists is there, whole, once, and every number is finite.

python launch/verify.py shards=DIR
"""

import sys, pathlib  # noqa: E401

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import json  # noqa: E402
import tarfile  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from contextlib import ExitStack  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from pathlib import Path  # noqa: E402

from tqdm import tqdm  # noqa: E402

from data.checksums import is_unchanged  # noqa: E402
from data.codecs import is_finite  # noqa: E402
from data.config import TargetConfig, stage  # noqa: E402
from data.embedded import ensure_target  # noqa: E402
from data.manifest import FILE, Manifest, claim_split, index_name, is_written, remove_shards  # noqa: E402
from data.mapped import Shard, read_ahead  # noqa: E402
from data.schema import SPLITS, Provenance, Record, check_same, safe_key  # noqa: E402
from data.storage import Remote, Unreachable, local_folder, whole  # noqa: E402

_TEMPORARY = (*(f".{split}-" for split in SPLITS), f".{FILE}.")  # of the dataset; a stage's summary is none of it


@dataclass
class VerifyConfig:
    """What is to be proved. YAML: conf/verify.yaml.

    shards      folder with a manifest.json, or s3://…: every shard is downloaded for a moment
    out         folder for the log and the summary
    target      that it must have been captured from; null: whichever the manifest names
    remove_bad  take bad shards out of the dataset: the command that made it captures their records again. Nobody may
                write to it meanwhile
    """

    shards: str
    out: str
    remove_bad: bool
    target: TargetConfig | None


@dataclass
class Verified:
    """What a dataset holds, and what is wrong with it: file name -> problems, each in words.

    shards, records, tokens, supervised  of which nothing is wrong; supervised: tokens under the loss mask
    bytes                                of all shards, as the manifest has them
    complete                             as the manifest says
    """

    shards: int = 0
    records: int = 0
    tokens: int = 0
    supervised: int = 0
    bytes: int = 0
    complete: bool = False
    problems: dict[str, list[str]] = field(default_factory=dict)

    def add(self, file: str, problem: str) -> None:
        self.problems.setdefault(file, []).append(problem)

    def words(self) -> str:
        """The first three bad files, each with its first problem."""
        return "; ".join(f"{file}: {found[0]}" for file, found in list(self.problems.items())[:3])


@stage("verify")
def main(config: VerifyConfig) -> dict:
    path = local_folder(config.shards)
    provenance = Manifest.load(path).provenance
    if config.remove_bad and (remote := Remote.of(path)) and remote.mirror:
        raise ValueError(
            f"remove_bad=true takes shards out of a folder, and {config.shards} is elsewhere: give the folder whose upload= "
            f"it is, or leave remove_bad=false"
        )
    if config.target is not None:
        expected = Provenance.of_target(
            ensure_target(config.target),
            name=config.target.name,
            boundaries=config.target.boundaries,
            codec=provenance.codec,
            engine=provenance.engine,
            engine_version=provenance.engine_version,
        )
        check_same(provenance, expected, where=str(path))
    with ExitStack() as stack:
        if config.remove_bad:
            for split in SPLITS:
                stack.enter_context(claim_split(path, split))
        found = verify(path, progress=True, alone=config.remove_bad)
        if config.remove_bad and found.problems:
            remove_shards(path, set(found.problems))
    for file, problems in found.problems.items():
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        print(f"  BAD {file}: {problems[0]}{more}")
    if found.problems:
        cure = "remove_bad=true takes bad shards out"
        if config.remove_bad:
            cure = "they were taken out"
        raise ValueError(
            f"{path}: {len(found.problems)} bad file(s) beside {found.records} records that hold: {found.words()}; "
            f"{cure}, and the command that made the dataset captures their records again"
        )
    return {
        "shards": found.shards,
        "records": found.records,
        "tokens": found.tokens,
        "supervised_tokens": found.supervised,
        "bytes": found.bytes,
        "codec": provenance.codec,
        "complete": found.complete,
        "line": f"{found.records} records, {found.tokens} tokens, {found.bytes / 1e9:.2f} GB in {found.shards} shards "
        f"of {path} ({provenance.target}, {provenance.codec}) hold" + ("" if found.complete else "; it is not complete"),
    }


def verify(path: Path | str, *, progress: bool = False, alone: bool = False) -> Verified:
    """Reads every byte of a dataset. Counts are those of the records in which nothing is wrong.

    progress  show a bar
    alone     the caller holds the locks of the dataset's writers. Else somebody may write to it: then what is not in the
              manifest is theirs, and no problem

    Checked for each shard: size, checksum, index; the members of the tar against the index; shapes and dtypes against
    codec and provenance; token ids within the vocabulary; masks; finite states; counts against the manifest. For the
    whole: an id in one record only, nothing temporary and nothing unlisted left.
    Raises ValueError if there is no manifest that can be read, or the place where the shards are does not answer: that
    says nothing about them.
    """
    path = local_folder(path)
    manifest = Manifest.load(path)
    found, seen = Verified(complete=manifest.complete), {}
    size = sum(shard.bytes for shard in manifest.shards)
    interval = 0.5 if sys.stderr.isatty() else 30.0  # seconds; a log file wants few lines
    with tqdm(total=size, desc="verify", unit="B", unit_scale=True, disable=not progress, mininterval=interval) as bar:
        for info in manifest.shards:
            try:
                with whole(path, info) as folder:
                    _check_shard(Shard(folder, info, manifest.provenance), found, seen, bar)
            except OSError as error:
                raise ValueError(f"{path / info.name} cannot be read ({error}), which says nothing about the rest: try again, "
                                 f"or look at its disk") from error  # fmt: skip
            except ValueError as error:
                if isinstance(error, Unreachable) and not isinstance(error.__cause__, FileNotFoundError | None):
                    raise
                found.add(info.name, str(error))
                bar.update(info.bytes)
            found.shards += info.name not in found.problems
            found.bytes += info.bytes
    if alone or not is_written(path):
        _check_leftovers(path, found)
    return found


def _check_shard(shard: Shard, found: Verified, seen: dict[str, str], bar: tqdm) -> None:
    file = shard.folder / shard.info.name
    before = found.records, found.tokens, found.supervised
    with ThreadPoolExecutor(1) as thread:  # hashing does not hold the interpreter
        unchanged = thread.submit(is_unchanged, file, shard.info.checksum, read=bar.update)
        _check_members(file, shard, found)
        _check_records(shard, found, seen)
        if not unchanged.result():
            found.add(file.name, "its checksum is not the manifest's: bytes changed on the disk")
            found.records, found.tokens, found.supervised = before  # which of them changed is not known


def _check_members(file: Path, shard: Shard, found: Verified) -> None:
    """What plain tar and WebDataset see is what the index says."""
    keys = [safe_key(entry.id) for entry in shard.entries]
    expected = [f"{key}.{end}" for key in keys for end in ("json", "safetensors")]
    try:
        with tarfile.open(file, "r:") as tar:
            members = tar.getmembers()
            if [member.name for member in members] != expected:
                found.add(file.name, f"{len(members)} members, not the {len(expected)} of the index in its order")
                return
            for entry, about, states in zip(shard.entries, members[::2], members[1::2]):
                said = json.loads(tar.extractfile(about).read())
                if (states.offset_data, states.size) != (entry.offset, entry.size):
                    found.add(file.name, f"record {entry.id} is not where the index says")
                if [said[name] for name in ("id", "source", "num_tokens", "num_supervised")] != list(entry[:4]):
                    found.add(file.name, f"record {entry.id}: its json differs from the index")
    except (tarfile.TarError, ValueError, KeyError, TypeError, OSError) as error:
        found.add(file.name, f"plain tar cannot read it: {error}")


def _check_records(shard: Shard, found: Verified, seen: dict[str, str]) -> None:
    """seen: id -> shard of every record so far."""
    info = shard.info
    tokens = supervised = 0
    records = read_ahead((shard, i) for i in range(len(shard.entries)))
    for entry, record in zip(shard.entries, records, strict=True):
        if entry.id in seen:
            found.add(info.name, f"record {entry.id} is also in {seen[entry.id]}")
        seen[entry.id] = info.name
        tokens, supervised = tokens + entry.num_tokens, supervised + entry.num_supervised
        try:
            problem = _problem(record.result(), shard.provenance, num_supervised=entry.num_supervised)
        except ValueError as error:
            problem = str(error)
        if problem:
            found.add(info.name, f"record {entry.id}: {problem}")
            continue
        found.records, found.tokens = found.records + 1, found.tokens + entry.num_tokens
        found.supervised += entry.num_supervised
    if (len(shard.entries), tokens, supervised) != (info.samples, info.tokens, info.supervised):
        found.add(
            info.name,
            f"holds {len(shard.entries)} records, {tokens} tokens, {supervised} supervised; the manifest says "
            f"{info.samples}, {info.tokens}, {info.supervised}",
        )


def _problem(record: Record, provenance: Provenance, *, num_supervised: int) -> str | None:
    """What is wrong with the numbers of a record, in words."""
    for name, column in record.states().items():
        if not is_finite(column):
            return f"{name} holds values that are not finite"
        if name.endswith("_scale") and not (column > 0).all():
            return f"{name} holds scales that are not positive"
    for name, ids in (("tokens", record.tokens), ("top_ids", record.top_ids)):
        if ids is not None and not 0 <= int(ids.min()) <= int(ids.max()) < provenance.vocab_size:
            return f"{name} lie in {int(ids.min())} .. {int(ids.max())}, the vocabulary has {provenance.vocab_size}"
    if int(record.loss_mask.max()) > 1 or int(record.loss_mask.sum()) != num_supervised:
        return f"loss_mask is not {num_supervised} ones among zeros"
    if record.top_log_probs is not None:
        rises = (record.top_log_probs.diff(dim=-1) > 0).any()
        mass = float(record.top_log_probs.double().exp().sum(-1).max())
        if rises or mass > 1 + 1e-4:
            return f"top_log_probs are no log-probabilities in falling order (their sum reaches {mass:.4f})"
    return None


def _check_leftovers(path: Path, found: Verified) -> None:
    listed = {name for shard in Manifest.load(path).shards for name in (shard.name, index_name(shard.name))}
    for file in sorted(path.iterdir()):
        if file.name.startswith(_TEMPORARY) and file.name.endswith(".tmp"):
            found.add(
                file.name, "a temporary file that a killed run left: the command that made the dataset removes it"
            )
        elif file.name.startswith(SPLITS) and file.suffix in (".tar", ".json") and file.name not in listed:
            found.add(file.name, "is not in the manifest: a killed run left it, the same command writes it again")


if __name__ == "__main__":
    main()

"""ShardWriter and ShardReader: both halves of the format on disk. docs/design.md, "The record".

    <out>/manifest.json              provenance, and the shards that are complete
    <out>/train-000000.tar           WebDataset: <key>.json and <key>.safetensors of every sample
    <out>/train-000000.index.json    where each record lies in the tar, so that it is mapped, not searched
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import struct
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from data.config import write_atomically
from data.schema import (
    SPLITS,
    Manifest,
    Provenance,
    Record,
    ShardInfo,
    check_record,
    check_same,
    decode,
    encode,
    safe_key,
)

_TAR_BLOCK = 512
_INDEX_COLUMNS = ("ids", "sources", "num_tokens", "num_supervised", "offsets", "sizes")


class Entry(NamedTuple):
    """Where a record is: bytes [offset, offset + size) of its shard are its safetensors file."""

    id: str
    source: str
    num_tokens: int
    num_supervised: int
    shard: int
    offset: int
    size: int


class ShardWriter:
    """Writes one split of a dataset, shard by shard; continues what is there.

    out          folder; may hold earlier shards of the same provenance
    shard_bytes  a shard is finished once it is this large

    A shard gets its name when it is complete and on disk, and then a line in the manifest: after a
    crash or an exception every finished shard counts, and the unfinished one is gone. Raises
    ValueError if the folder holds another provenance, another process writes this split, an id comes
    twice, or the disk is full.
    """

    def __init__(self, out: Path | str, *, provenance: Provenance, split: str, shard_bytes: int) -> None:
        if split not in SPLITS:
            raise ValueError(f"split={split}: expected {' or '.join(SPLITS)}")
        self.out, self.provenance, self.split, self.shard_bytes = Path(out), provenance, split, shard_bytes
        self.out.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.out / f".{split}.lock", wait=False)
        try:
            with _manifest_lock(self.out):
                if (self.out / "manifest.json").exists():
                    self._check(Manifest.load(self.out))
                else:
                    write_atomically(self.out / "manifest.json", Manifest(provenance=provenance).to_json())
            for leftover in self.out.glob(f".{split}-*.tmp"):
                leftover.unlink()
            self._ids = finished_ids(self.out)
        except BaseException:
            self._lock.close()
            raise
        self._file: IO[bytes] | None = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close() if kind is None else self.abandon()

    def write(self, record: Record) -> None:
        """Adds one record to the shard at hand, and finishes the shard if it is large enough."""
        check_record(record, self.provenance)
        if record.split != self.split:
            raise ValueError(f"record {record.id} is of split {record.split}, this writer's is {self.split}")
        if record.id in self._ids:
            raise ValueError(f"record {record.id} is already in {self.out}: ids are unique in a dataset")
        header, tensors = encode(record, self.provenance.codec)
        payload = [memoryview(header), *(memoryview(t.reshape(-1).view(torch.uint8).numpy()) for t in tensors)]
        num_supervised = int(record.loss_mask.sum())
        about = {
            "id": record.id,
            "source": record.source,
            "split": record.split,
            "num_tokens": record.num_tokens,
            "num_supervised": num_supervised,
        }
        key = safe_key(record.id)
        try:
            self._open()
            self._member(f"{key}.json", [memoryview(json.dumps(about).encode())])
            offset, size = self._member(f"{key}.safetensors", payload)
            self._ids.add(record.id)
            self._entries.append((record.id, record.source, record.num_tokens, num_supervised, offset, size))
        except OSError as error:
            self._fail(error)
        if self._written >= self.shard_bytes:
            self._finish()

    def close(self) -> None:
        """Finishes the shard at hand; the writer cannot be used after that."""
        if self._file is not None:
            self._finish()
        self._lock.close()

    def abandon(self) -> None:
        """Removes the unfinished shard; finished ones stay."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._temporary.unlink(missing_ok=True)
        self._lock.close()

    def _check(self, manifest: Manifest) -> None:
        check_same(manifest.provenance, self.provenance, where=str(self.out))
        if manifest.provenance.codec != self.provenance.codec:
            raise ValueError(
                f"{self.out} holds {manifest.provenance.codec} records, this run writes {self.provenance.codec}: "
                f"set codec={manifest.provenance.codec}, or choose another out="
            )

    def _open(self) -> None:
        if self._file is not None:
            return
        number = sum(shard.split == self.split for shard in Manifest.load(self.out).shards)
        self._name = f"{self.split}-{number:06d}.tar"
        self._temporary = self.out / f".{self._name}.tmp"
        self._file = self._temporary.open("wb", buffering=0)
        self._digest, self._written, self._entries = hashlib.sha256(), 0, []

    def _member(self, name: str, chunks: list[memoryview]) -> tuple[int, int]:
        """Appends one file to the tar; its offset and size in bytes."""
        info = tarfile.TarInfo(name)
        info.size, info.mode = sum(chunk.nbytes for chunk in chunks), 0o644
        header = info.tobuf(tarfile.USTAR_FORMAT)
        offset = self._written + len(header)
        self._append([memoryview(header), *chunks, memoryview(bytes(-info.size % _TAR_BLOCK))])
        return offset, info.size

    def _append(self, chunks: list[memoryview]) -> None:
        for chunk in chunks:
            self._digest.update(chunk)
        chunks = [chunk for chunk in chunks if chunk.nbytes]
        while chunks:
            count = os.writev(self._file.fileno(), chunks)  # may be less than all of it
            self._written += count
            while chunks and count >= chunks[0].nbytes:
                count -= chunks.pop(0).nbytes
            if count:
                chunks[0] = chunks[0][count:]

    def _finish(self) -> None:
        """End of archive, to the disk, index, final name, manifest: in this order."""
        index = json.dumps(dict(zip(_INDEX_COLUMNS, zip(*self._entries)))).encode()
        try:
            self._append([memoryview(bytes(2 * _TAR_BLOCK))])
            os.fsync(self._file.fileno())
            write_atomically(self.out / _index_name(self._name), index)
            self._file.close()
            os.replace(self._temporary, self.out / self._name)
        except OSError as error:
            self._fail(error)
        except ValueError:
            self.abandon()
            raise
        info = ShardInfo(
            name=self._name,
            split=self.split,
            samples=len(self._entries),
            tokens=sum(entry[2] for entry in self._entries),
            supervised=sum(entry[3] for entry in self._entries),
            bytes=self._written,
            sha256=self._digest.hexdigest(),
            index_sha256=hashlib.sha256(index).hexdigest(),
        )
        with _manifest_lock(self.out):
            manifest = Manifest.load(self.out)
            write_atomically(self.out / "manifest.json", replace(manifest, shards=(*manifest.shards, info)).to_json())
        self._file = None

    def _fail(self, error: OSError) -> None:
        self.abandon()
        raise ValueError(
            f"cannot write {self.out / self._name}: {error.strerror or error}; {len(finished_ids(self.out))} finished "
            f"records are kept: free some space and run again, it continues there"
        ) from error


class ShardReader:
    """Random access to the records of one split of a dataset, without a copy.

    path   folder with a manifest.json; split: train | validation
    lengths int64 [n], tokens per record; entries [n]; provenance

    Raises ValueError naming the file if a shard is missing, shorter than the manifest says, or its
    index is damaged. Flipped bits inside tensors are found by `verify`. May be pickled and forked:
    files are opened where they are read.
    """

    def __init__(self, path: Path | str, *, split: str) -> None:
        if split not in SPLITS:
            raise ValueError(f"split={split}: expected {' or '.join(SPLITS)}")
        self.path, self.split = Path(path), split
        manifest = Manifest.load(self.path)
        self.provenance = manifest.provenance
        self.shards = [shard for shard in manifest.shards if shard.split == split]
        self.entries: list[Entry] = []
        for number, shard in enumerate(self.shards):
            self.entries += _read_index(self.path, shard, number)
        self.lengths = np.array([entry.num_tokens for entry in self.entries], dtype=np.int64)
        self._maps: dict[int, mmap.mmap] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}

    def read(self, i: int) -> Record:
        """Record i; its tensors are views into the mapped shard, so do not write to them.

        Raises ValueError naming the shard if the record in it is damaged.
        """
        entry = self.entries[i]
        try:
            columns = decode(self._map(entry.shard), offset=entry.offset, size=entry.size)
            record = Record(id=entry.id, source=entry.source, split=self.split, **columns)
            check_record(record, self.provenance)
            if record.num_tokens != entry.num_tokens:
                raise ValueError(f"{record.num_tokens} tokens, the index says {entry.num_tokens}")
        except (ValueError, KeyError, TypeError, RuntimeError, struct.error) as error:
            file = self.path / self.shards[entry.shard].name
            raise ValueError(f"{file} is corrupt at record {entry.id} ({error}): extract again") from error
        return record

    def __iter__(self) -> Iterator[Record]:
        return (self.read(i) for i in range(len(self)))

    def verify(self) -> None:
        """Reads every shard and compares its sha256. Raises ValueError naming the first that differs."""
        for shard in self.shards:
            with (self.path / shard.name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                    raise ValueError(f"{self.path / shard.name} is corrupt (its sha256 changed): extract again")

    def _map(self, shard: int) -> mmap.mmap:
        if shard not in self._maps:
            with (self.path / self.shards[shard].name).open("rb") as file:
                # a private copy-on-write map: torch takes it as writable, the file stays as it is
                self._maps[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[shard]


def finished_ids(out: Path | str) -> set[str]:
    """Ids of all records in finished shards, of both splits; empty if there is no dataset yet."""
    if not (Path(out) / "manifest.json").exists():
        return set()
    shards = Manifest.load(out).shards
    return {entry.id for number, shard in enumerate(shards) for entry in _read_index(Path(out), shard, number)}


def _read_index(out: Path, shard: ShardInfo, number: int) -> list[Entry]:
    tar, file = out / shard.name, out / _index_name(shard.name)
    try:
        size, content = tar.stat().st_size, file.read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename} is missing, the manifest lists it: restore it, or extract again") from error
    if size != shard.bytes:
        raise ValueError(f"{tar} is truncated: {size} bytes, the manifest says {shard.bytes}; extract again")
    if hashlib.sha256(content).hexdigest() != shard.index_sha256:
        raise ValueError(f"{file} is corrupt (its sha256 changed): restore it, or extract again")
    index = json.loads(content)
    return [Entry(*row[:4], number, *row[4:]) for row in zip(*(index[name] for name in _INDEX_COLUMNS))]


def _index_name(shard: str) -> str:
    return shard.replace(".tar", ".index.json")


@contextmanager
def _manifest_lock(out: Path) -> Iterator[None]:
    with _lock(out / ".manifest.lock", wait=True):
        yield


def _lock(path: Path, *, wait: bool) -> IO[str]:
    """An open file that this process alone may hold, until it is closed."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        raise ValueError(f"another process writes to {path.parent}: wait for it, or choose another out=") from None
    return file

"""Datasets that live elsewhere: in any place that fsspec knows, like s3://bucket/path. A folder here stands for each.

It holds manifest, indexes and vocabulary, and `remote.json`, which says where the shards are. They are streamed, a
record being one range of bytes, or, where EYAS_CACHE names a folder, kept there as they are needed. Credentials and
endpoints are those of the place's own tools: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, …

Written the other way: a shard is finished here, then sent, then in the manifest there: `Uploader`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from data import vocab
from data.checksums import Checksum
from data.config import write_atomically
from data.locks import claim_when_free
from data.manifest import FILE, REMOTE, Manifest, ShardInfo, index_name, manifest_lock, no_dataset
from data.schema import check_same

_CHUNK_BYTES = 1 << 22  # downloaded at a time


def local_folder(shards: Path | str) -> Path:
    """The folder that stands for `shards`: itself, or for s3://… one whose manifest and indexes are up to date.

    Raises ValueError if there is no dataset, or the place cannot be reached.
    """
    url = str(shards)
    if "://" not in url or url.startswith("file://"):
        folder = Path(url.removeprefix("file://"))
        if not (folder / FILE).is_file():
            raise no_dataset(folder)
        return folder
    kept = os.environ.get("EYAS_CACHE")
    name = "".join(c if c.isalnum() else "-" for c in url.rstrip("/"))[-60:]
    folder = Path(kept or "~/.cache/eyas").expanduser() / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
    remote = Remote(url.rstrip("/"), keep=kept is not None, mirror=True)
    remote.pull(folder)
    remote.save(folder)
    return folder


class Unreachable(ValueError):
    """The place where a dataset is does not answer, or holds something else than the manifest says."""


@dataclass(frozen=True)
class Remote:
    """Where the shards of a local folder are.

    keep    shards are downloaded whole when one is first read; else records are streamed
    mirror  the dataset is made elsewhere: its manifest there is the true one
    """

    url: str
    keep: bool
    mirror: bool

    @classmethod
    def of(cls, folder: Path) -> Remote | None:
        try:
            return cls(**json.loads((folder / REMOTE).read_text()))
        except FileNotFoundError:
            return None

    def save(self, folder: Path) -> None:
        write_atomically(folder / REMOTE, json.dumps(asdict(self)))

    def pull(self, folder: Path) -> None:
        """Brings manifest, indexes and vocabulary up to date; the manifest last, so that what it lists is here.

        One process at a time: a slower one must not put an older manifest in the place of a newer.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with manifest_lock(folder), self.reached() as (files, root):
            try:
                content = files.cat_file(f"{root}/{FILE}")
            except FileNotFoundError:
                raise ValueError(
                    f"{self.url} has no {FILE}: there is no dataset there, or none of it is finished"
                ) from None
            there = Manifest.parse(content.decode(), file=f"{self.url}/{FILE}")
            before = {s.name: s.checksum for s in Manifest.load(folder).shards} if (folder / FILE).exists() else {}
            for shard in there.shards:
                index = folder / index_name(shard.name)
                if not index.exists() or hashlib.sha256(index.read_bytes()).hexdigest() != shard.index_sha256:
                    write_atomically(index, files.cat_file(f"{root}/{index.name}"))
                if before.get(shard.name, shard.checksum) != shard.checksum:
                    (folder / shard.name).unlink(missing_ok=True)  # kept of a dataset that was replaced
            if files.exists(f"{root}/{vocab.FILE}"):
                write_atomically(folder / vocab.FILE, files.cat_file(f"{root}/{vocab.FILE}"))
            write_atomically(folder / FILE, content)

    def read(self, name: str, offset: int, size: int) -> bytearray:
        """Bytes [offset, offset + size) of a file."""
        with self.reached() as (files, root):
            return bytearray(files.cat_file(f"{root}/{name}", start=offset, end=offset + size))

    def download(self, shard: ShardInfo, folder: Path) -> None:
        """The whole shard into `folder`, checked, unless another process has just done it."""
        target, temporary = folder / shard.name, folder / f".{shard.name}.tmp"
        with claim_when_free(folder / f".{shard.name}.lock"):
            if target.exists():
                return
            checksum = Checksum(like=shard.checksum)
            with (
                self.reached() as (files, root),
                files.open(f"{root}/{shard.name}", "rb", cache_type="readahead") as there,
            ):
                try:
                    with temporary.open("wb") as here:
                        for chunk in self._chunks(there):
                            checksum.update(chunk)
                            here.write(chunk)
                except OSError as error:
                    temporary.unlink(missing_ok=True)
                    raise Unreachable(
                        f"cannot keep {self.url}/{shard.name} in {folder} ({error}): free some space there, or unset "
                        f"EYAS_CACHE to stream"
                    ) from error
            if str(checksum) != shard.checksum:
                temporary.unlink()
                raise Unreachable(
                    f"{self.url}/{shard.name} is corrupt (its checksum changed): send it again, or extract again"
                )
            temporary.replace(target)

    def push(self, folder: Path, *, keep_local: bool) -> None:
        """Sends what is finished in `folder` and not yet there: shard, index, then the manifest with it.

        Raises ValueError if another dataset is there, or the place cannot be reached.
        """
        with self.reached() as (files, root):
            files.makedirs(root, exist_ok=True)
            here, sent = Manifest.load(folder), {}
            if files.exists(f"{root}/{FILE}"):
                there = Manifest.parse(files.cat_file(f"{root}/{FILE}").decode(), file=f"{self.url}/{FILE}")
                check_same(there.provenance, here.provenance, where=self.url)
                if (there.provenance.codec, there.part) != (here.provenance.codec, here.part):
                    raise ValueError(
                        f"{self.url} holds codec {there.provenance.codec}, part {there.part}: choose another"
                    )
                sent = {shard.name: shard.checksum for shard in there.shards}
            if (folder / vocab.FILE).exists():
                _put(files, folder / vocab.FILE, f"{root}/{vocab.FILE}")
            for shard in here.shards:
                if sent.get(shard.name) != shard.checksum:
                    for name in (index_name(shard.name), shard.name):
                        _put(files, folder / name, f"{root}/{name}")
                    sent[shard.name] = shard.checksum
                    arrived = tuple(s for s in here.shards if sent.get(s.name) == s.checksum)
                    files.pipe_file(f"{root}/{FILE}", replace(here, shards=arrived, complete=False).to_json().encode())
                if not keep_local:
                    (folder / shard.name).unlink(missing_ok=True)
            files.pipe_file(f"{root}/{FILE}", here.to_json().encode())

    @contextmanager
    def reached(self) -> Iterator[tuple[Any, str]]:
        """File system and path. Its errors, of many kinds, become one."""
        try:
            yield fsspec.core.url_to_fs(self.url)
        except ValueError:
            raise
        except Exception as error:
            raise self._unreachable(error) from error

    def _chunks(self, there: Any) -> Iterator[bytes]:
        """All of an open file. Raises Unreachable where another OSError would be taken for one of the disk here."""
        try:
            while chunk := there.read(_CHUNK_BYTES):
                yield chunk
        except OSError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(f"{self.url} cannot be used ({type(error).__name__}: {error}): is it there, may you?")


class Uploader:
    """Sends a dataset's shards after its writer, one at a time, on a thread of its own.

    folder      where they are written; what an earlier run left unsent goes first
    url         where they are to be
    keep_local  else a shard is removed here once it is there, so that the disk needs to hold two of them
    """

    def __init__(self, folder: Path, url: str, *, keep_local: bool) -> None:
        self.folder, self.keep_local = folder, keep_local
        self.remote = Remote(url.rstrip("/"), keep=False, mirror=False)
        if not (folder / FILE).exists():  # the folder was lost: what is there is taken up
            with self.remote.reached() as (files, root):
                there = files.exists(f"{root}/{FILE}")
            if there:
                self.remote.pull(folder)
        self.remote.save(folder)
        self._thread, self._running = ThreadPoolExecutor(1), Future()
        self._running.set_result(None)

    def __enter__(self) -> Uploader:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close() if kind is None else self._thread.shutdown()  # the next run sends the rest

    def send(self) -> None:
        """Starts to send what is finished, once the shard before has arrived. Raises ValueError if that failed."""
        self._running.result()
        self._running = self._thread.submit(self.remote.push, self.folder, keep_local=self.keep_local)

    def close(self) -> None:
        """All that is finished is there. Raises ValueError if not."""
        try:
            self.send()
            self._running.result()
        finally:
            self._thread.shutdown()


@contextmanager
def whole(folder: Path, shard: ShardInfo) -> Iterator[Path]:
    """A folder in which the shard and its index lie: `folder`, or a temporary one to which it was downloaded."""
    remote = Remote.of(folder)
    if remote is None or (folder / shard.name).exists():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="eyas-", dir=folder) as temporary:
        shutil.copy(folder / index_name(shard.name), temporary)
        remote.download(shard, Path(temporary))
        yield Path(temporary)


def _put(files: Any, source: Path, target: str) -> None:
    """Complete under its name or not there: object stores do that themselves, a shared file system needs a rename."""
    if isinstance(files, LocalFileSystem):
        head, _, name = target.rpartition("/")
        files.put_file(str(source), f"{head}/.{name}.tmp")
        files.mv(f"{head}/.{name}.tmp", target)
    else:
        files.put_file(str(source), target)
    if files.info(target)["size"] != source.stat().st_size:
        raise ValueError(f"{target} arrived with another size than {source} has: send it again")

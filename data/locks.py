"""Locks on files: what one process alone may do at a time, also from machines that share the file system."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what a file system that knows no locks says


def claim(path: Path, *, taken: str, cure: str) -> BinaryIO:
    """The open file, which this process alone holds until it is closed or the process ends.

    Raises ValueError "<taken> (process N on NODE): <cure>" where another holds it; OSError if it cannot be made.
    On a file system without locks nobody is kept out.
    """
    file = _opened(path)
    try:
        _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with file:
            holder = file.read().decode(errors="replace").strip()
        raise ValueError(f"{taken}{f' ({holder})' if holder else ''}: {cure}") from None
    with suppress(OSError):  # on a full disk it stays without a name
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n".encode())
    return file


def claim_when_free(path: Path) -> BinaryIO:
    """As `claim`, once whoever holds it lets go."""
    file = _opened(path)
    _lock(file, fcntl.LOCK_EX)
    return file


def is_claimed(path: Path) -> bool:
    """Whether another process holds it now."""
    try:
        with path.open("rb") as file:
            _lock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # nobody has made it, or it is not ours to read
        return False
    return False


def _opened(path: Path) -> BinaryIO:
    """For reading and writing, made where it is missing, with what is in it; the umask says who else may."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)


def _lock(file: BinaryIO, how: int) -> None:
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise

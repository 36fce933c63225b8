"""What a server has to itself while it runs: its folders, and a port."""

from __future__ import annotations

import errno
import fcntl
import socket
from pathlib import Path
from typing import IO

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what a file system that knows no locks says


def claim_folder(folder: Path, *, cure: str) -> IO[str]:
    """Makes `folder`; nobody else can claim it until the returned file is closed, or this process ends.

    Raises ValueError, which ends with `cure`, if somebody has claimed it; OSError if it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"another process has a server that writes to {folder}: wait for it to end, or {cure}") from None
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            file.close()
            raise
    return file


def free_port(host: str) -> int:
    """A port that nothing listens on."""
    with socket.socket() as found:
        found.bind((host, 0))
        return found.getsockname()[1]


def check_port(host: str, port: int) -> None:
    """Raises ValueError if a server cannot listen there."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"port {port} of {host} cannot be used ({error.strerror}): set server.port=0 for a free one, or attach "
                f"to the server there with server.url=http://{host}:{port}"
            ) from error

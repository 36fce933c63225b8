"""What a server has to itself while it runs: its folders, and a port."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import BinaryIO

from data.locks import claim

PORTS = range(20_000, 32_000)  # below those that outgoing connections are given
DERIVED_PORTS = range(233, 265)  # with data parallelism SGLang takes some of the port + these, without a look
TRIES = 200


def claim_folder(folder: Path, *, cure: str) -> BinaryIO:
    """Makes `folder`; nobody else can claim it until the returned file is closed, or this process ends.

    Raises ValueError, which ends with `cure`, if somebody has claimed it; OSError if it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taken = f"another process has a server that writes to {folder}"
    return claim(folder / ".lock", taken=taken, cure=f"wait for it to end, or {cure}")


def free_port(host: str) -> int:
    """A port that nothing listens on, nor on those that SGLang takes with it. Raises ValueError if there is none."""
    for port in random.sample(PORTS, TRIES):
        if not any(_refusal(host, one) for one in (port, *(port + derived for derived in DERIVED_PORTS))):
            return port
    raise ValueError(f"{host} has no free port in {PORTS.start} .. {PORTS.stop - 1}: set server.port=")


def check_port(host: str, port: int, *, attachable: bool = True) -> None:
    """Raises ValueError if a server cannot listen there. attachable: the run may use the one that does."""
    if error := _refusal(host, port):
        attach = f", or attach to the server there with server.url=http://{host}:{port}" if attachable else ""
        raise ValueError(f"port {port} of {host} cannot be used ({error.strerror}): set server.port=0 for a free one{attach}") from error


def _refusal(host: str, port: int) -> OSError | None:
    """Why a server cannot listen there; None if it can."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            return error
    return None

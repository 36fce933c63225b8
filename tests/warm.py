"""Servers for tests, forked from a process that has imported SGLang once: three seconds instead of twenty.

It is the same server, started otherwise: `warm_python()` is an executable to be used as `engine.python`. Where a test
needs the server's processes as children of its own, or the start itself, it starts one as users do (`warm=False`).

    a test's Server ── Popen ──▶ the executable: sends its command, environment and output over a socket, and waits
                                       │
    one per test process: this file ◀──┘ forks; the child becomes the server, and dies with the executable
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
EXECUTABLE = """\
#!{python} -IS
import json, os, signal, socket, sys
if sys.argv[1] != "-m":  # a question about the installation
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
asked = json.dumps({{"arguments": sys.argv[3:], "environment": dict(os.environ), "folder": os.getcwd()}}).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [len(asked).to_bytes(8, "big")], [1, 2])
    server.sendall(asked)
    status = int(server.recv(16) or b"1")
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@functools.cache
def warm_python() -> str:
    """The executable; its first call starts the process that imports SGLang, which ends with this one."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    address, executable = str(folder / "socket"), folder / "python"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(listener.fileno())], cwd=ROOT, pass_fds=[listener.fileno()],
            env={**os.environ, **ENVIRONMENT}, stdin=subprocess.DEVNULL, start_new_session=True,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),  # PR_SET_PDEATHSIG
        )  # fmt: skip
    atexit.register(process.kill)
    executable.write_text(EXECUTABLE.format(python=sys.executable, address=address))
    executable.chmod(0o755)
    return str(executable)


def main(listener: socket.socket) -> None:
    """Imports SGLang, then forks a server for everybody who connects."""
    from extract.cpu.shim import install, keep_attention_backend

    install()
    keep_attention_backend()
    import multiprocessing

    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.data_parallel_controller
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401

    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *arguments, **options: None  # SGLang asks for spawn
    # A process asks to die with the thread that forked it, and by the time a spawned one asks that is long gone; all of
    # a server's processes are one group here, which ends as a whole.
    for module in list(sys.modules.values()):
        if "kill_itself_when_parent_died" in vars(module):
            module.kill_itself_when_parent_died = lambda: None
    watched: dict[int, socket.socket] = {}
    woken, waker = socket.socketpair()  # a child's end wakes the loop below
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    while True:
        ready, _, _ = select.select([listener, woken], [], [])
        if woken in ready:
            woken.recv(4096)
        _reap(watched)
        if listener in ready:
            caller, _ = listener.accept()
            length, outputs, _, _ = socket.recv_fds(caller, 8, 2)
            asked = json.loads(_receive(caller, int.from_bytes(length, "big")))
            if (pid := os.fork()) == 0:
                listener.close()
                _serve(caller, outputs, asked)
            watched[pid] = caller
            for output in outputs:
                os.close(output)


def _receive(caller: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        content += caller.recv(count - len(content))
    return content


def _reap(watched: dict[int, socket.socket]) -> None:
    """Tells those who wait how their server has ended."""
    for pid in list(watched):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            caller = watched.pop(pid)
            try:
                caller.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            except OSError:
                pass  # killed: nobody waits
            caller.close()


def _serve(caller: socket.socket, outputs: list[int], asked: dict) -> None:
    """In the child: what `python -m extract.cpu.launch ARGUMENTS` does, and no more."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.path[:0] = [path for path in asked["environment"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = ["sglang.launch_server", *asked["arguments"]]
    threading.Thread(target=_die_with, args=[caller], daemon=True).start()
    status = 1
    try:
        runpy.run_module("sglang.launch_server", run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _die_with(caller: socket.socket) -> None:
    caller.recv(1)  # nothing comes, until the other end is gone
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))

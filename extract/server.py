"""The engine's server: starts it as a child process, or attaches to one; knows when it is ready, and why it is not."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil
from tqdm import tqdm

from data.boundaries import architecture_of
from extract.claims import check_port, claim_folder, free_port
from extract.command import Capturing, Drafting, Installation, check_version, command, environment, install_plugin
from extract.command import installation
from extract.config import EngineConfig, ServerConfig
from extract.fetch import ROWS_SECONDS
from extract.readiness import Watch, cure_of
from extract.spool import FORMAT, empty, forget_abandoned

POLL_SECONDS = 0.2
HEALTH_SECONDS = 30.0  # longest wait for /health, which SGLang answers after 20 s where its scheduler does not
READY, LOADING, NO_PORT = "ready", "loading (503)", "port not open yet"
STOP_SECONDS = 5.0  # for the server's other processes to follow the first
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Server:
    """A server that is ready inside the `with` block, and stopped after it if it was started here.

    target     Hugging Face folder            out  folder for its log and plugin
    capturing  what the plugin is asked for   drafting  the drafter to serve with
    config     where it is, or is to be       spool_is_temporary  the spool's folder goes when the server does
    config.url attaches to a running server instead: it must have been started with the command that
    `python extract/main.py mode=command` prints, if it is to capture.

    Raises ValueError that says what happened, shows the last log lines, and what to do.
    """

    def __init__(
        self,
        target: Path,
        *,
        engine: EngineConfig,
        config: ServerConfig,
        out: Path,
        capturing: Capturing | None = None,
        drafting: Drafting | None = None,
        trust_remote_code: bool = False,
        spool_is_temporary: bool = False,
    ) -> None:
        self.target, self.engine, self.config, self.out = Path(target), engine, config, Path(out)
        self.capturing, self.drafting, self.trust_remote_code = capturing, drafting, trust_remote_code
        self.url = config.url.rstrip("/") if config.url else ""
        self.log = self.out / "server.log"
        self.num_ranks = 1  # that hold the same rows
        self.state_bytes = 4  # of one captured number
        self.hung = ""  # what was seen of it before it was ended for hanging
        self._process: subprocess.Popen | None = None
        self._watch: Watch | None = None
        self._made, self._schedulers = time.time(), list[psutil.Process]()
        self._stopping = threading.Event()
        self._claimed: list[BinaryIO] = []  # locks on the folders that it writes to
        self.spool_is_temporary = spool_is_temporary
        self._leftover: Path | None = None  # the spool, once it is ours to remove

    def __enter__(self) -> Server:
        self.begin()
        return self.ready()

    def begin(self) -> None:
        """Starts its processes, and returns while they load; to be followed by `ready`, and at last by `stop`."""
        try:
            if not self.config.url:
                self._start()
        except BaseException:
            self.stop()
            raise

    def ready(self) -> Server:
        """Waits until it answers, and checks that it is the server that is wanted; a second call does nothing."""
        if self._watch is not None:
            return self
        try:
            self._wait()
            self._check_model()
            if self.config.url:
                version_at(self.url)
            if self.capturing and self.capturing.layer_ids is not None:
                self._check_plugin()
            threading.Thread(target=self._guard, name="server-guard", daemon=True).start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def get(self, path: str, *, timeout_seconds: float = 30.0) -> Any:
        """The JSON that the server answers; None if it answers without content. Raises OSError."""
        content = _fetch(self.url + path, timeout_seconds=timeout_seconds)
        return json.loads(content) if content else None

    def is_alive(self) -> bool:
        return self._process is None or self._process.poll() is None

    def stop(self) -> None:
        """Ends all processes that were started here; a server attached to goes on. If it is interrupted, call it again."""
        self._stopping.set()
        try:
            if self._process is not None:
                self._end(self._process)
                self._process = None
        finally:
            if self._leftover:  # still claimed: it is nobody else's yet
                shutil.rmtree(self._leftover, ignore_errors=True)
                self._leftover = None if self._process is None else self._leftover
            while self._claimed:
                self._claimed.pop().close()

    def _end(self, process: subprocess.Popen) -> None:
        # SGLang's graceful end takes 5 to 10 s, and nothing in it is ours. Its processes die with the first one, and
        # Python's resource tracker, which outlives them for a moment, removes what they left in shared memory.
        process.kill()
        process.wait()
        deadline = time.monotonic() + STOP_SECONDS
        while _group_runs(process.pid) or any(map(_runs, self._schedulers)):  # they write into the spool
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def failure(self, what: str, *, cure: str) -> ValueError:
        """An error about this server: what happened, the last log lines, what to do."""
        what += f"; {self.hung}" if self.hung else ""
        shown = f"; the last lines of {self.log}: {' | '.join(self.last_lines())}" if not self.config.url else ""
        return ValueError(f"{what}: {cure}{shown}")

    def last_lines(self, count: int = 8) -> list[str]:
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return []
        return [line.strip()[:300] for line in lines if line.strip()][-count:]

    def _start(self) -> None:
        found: Installation = installation(self.engine)
        host, port = self.config.host, self.config.port or free_port(self.config.host)
        check_port(host, port, attachable=self.drafting is None)
        self.url = f"http://{host}:{port}"
        try:
            self._claimed.append(claim_folder(self.out, cure="choose another out="))
            if self.capturing:
                self._claimed.append(claim_folder(self.capturing.spool, cure="set another server.spool="))
                self._leftover = self.capturing.spool if self.spool_is_temporary else None
                empty(self.capturing.spool)
            plugin = install_plugin((self.out / "plugin").resolve())  # the server runs in another folder
            log = self.log.open("wb")
        except OSError as error:
            raise ValueError(
                f"cannot write {error.filename or self.out}: {error.strerror}; free some space, or choose another out= "
                f"or server.spool="
            ) from error
        line = command(
            self.target.resolve(), found, engine=self.engine, host=host, port=port,
            capturing=self.capturing is not None and self.capturing.layer_ids is not None,
            drafting=self.drafting, trust_remote_code=self.trust_remote_code,
        )  # fmt: skip
        added = environment(found, engine=self.engine, plugin=plugin, capturing=self.capturing)
        with log:
            self._process = subprocess.Popen(
                line, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=self.out,
                env=os.environ | added, start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip

    def _wait(self) -> None:
        """Until /health says 200. 503 means that it still loads; no answer, that its port is not open yet."""
        started, limit = time.monotonic(), self.config.ready_timeout_seconds
        watch = self._watch = Watch(
            self.log, self._process.pid if self._process else None, silence_seconds=self.config.silence_seconds,
            hang_seconds=self.config.hang_seconds,
        )  # fmt: skip
        with tqdm(bar_format="{desc} {elapsed}", desc="server: starting", mininterval=_interval()) as progress:
            while True:
                elapsed = time.monotonic() - started
                if not self.is_alive():
                    status = self._process.returncode
                    what = f"the server exited with status {status} after {elapsed:.0f} s"
                    raise self.failure(what, cure=cure_of(self.last_lines(40)))
                state = self._state()
                if state == READY:
                    return
                if self.config.url and state == NO_PORT:
                    raise ValueError(f"nothing answers at server.url={self.url}: start it there, or set another url")
                loading = watch.progress()
                state += f", {loading}" if loading else ""
                if self._process and (said := watch.look(state)):
                    tqdm.write(f"{said}; waiting on", file=sys.stderr)
                hangs = self._process is not None and watch.hangs()
                if hangs or elapsed > limit:
                    option = "server.hang_seconds" if hangs else "server.ready_timeout_seconds"
                    what = f"hangs, silent for {watch.silence():.0f} s" if hangs else f"is not ready after {elapsed:.0f} s"
                    raise self.failure(
                        f"the server {what} ({state}; {watch.describe()}; {watch.save_stacks()})",
                        cure=f"set {option} if it needs longer",
                    )
                progress.set_description_str(f"server: {state}", refresh=False)
                progress.update()
                time.sleep(POLL_SECONDS)

    def _state(self) -> str:
        try:
            self.get("/health", timeout_seconds=HEALTH_SECONDS)
        except urllib.error.HTTPError as error:
            return LOADING if error.code == 503 else f"answers {error.code}"
        except TimeoutError:
            return f"its port is open, /health does not answer in {HEALTH_SECONDS:.0f} s"
        except OSError:
            return NO_PORT
        return READY

    def _guard(self) -> None:
        """In a thread, while the server works: one that no longer answers is told about, and at last ended.

        Its clients then hear that it is gone, and `failure` says why. One that was attached to is only told about.
        """
        every, watch = max(POLL_SECONDS, self.config.silence_seconds / 4), self._watch
        watch.ignore_log()  # into which SGLang writes at every /health that fails
        while not self._stopping.wait(every):
            if not self.is_alive():
                return
            state = self._state()
            if state == READY:
                watch.alive()
                continue
            state = "/health fails (503)" if state == LOADING else state
            if said := watch.look(state):
                tqdm.write(said, file=sys.stderr)
            process = self._process
            if watch.hangs() and process is not None:
                self.hung = f"it hung, silent for {watch.silence():.0f} s ({state}; {watch.describe()}); {watch.save_stacks()}"
                process.kill()
                return

    def _check_model(self) -> None:
        try:
            served = self.get("/model_info")
        except OSError as error:
            raise self.failure(f"{self.url}/model_info does not answer ({error})", cure="is this SGLang?") from error
        architecture, found = architecture_of(self.target), served.get("architectures") or []
        path = Path(served.get("model_path", ""))
        if architecture not in found or (self._process and path != self.target.resolve()):
            raise ValueError(
                f"the server at {self.url} serves {path} ({', '.join(found)}), this run asks for {self.target} "
                f"({architecture}): set target= to that model, or server.url to another server"
            )

    def _check_plugin(self) -> None:
        """The plugin has written what it captures; with `server.url` it may be another capture than this run's."""
        spool, cure = self.capturing.spool, "start it with the command that mode=command prints"
        said = [json.loads(path.read_text()) for path in spool.glob("server-*.json")]
        if not said:
            raise self.failure(f"the server at {self.url} does not capture into {spool}", cure=cure)
        for about in said:
            if about.get("format") != FORMAT:
                raise ValueError(f"another version of Eyas has started the server at {self.url}: stop it, and {cure}")
            if "error" in about:
                raise self.failure(f"SGLang cannot capture from this model ({about['error']})", cure="see the log")
            if about["layer_ids"] != self.capturing.layer_ids:
                raise ValueError(
                    f"the server at {self.url} captures layer ids {about['layer_ids']}, this run needs "
                    f"{self.capturing.layer_ids}: {cure}"
                )
        if not self._process:
            if not os.access(spool, os.W_OK):
                raise ValueError(
                    f"the rows that the server at {self.url} writes into {spool} cannot be taken out of it: the folder is "
                    f"another user's; make it yourself before that server starts, as mode=command does"
                )
            forget_abandoned(spool, seconds=ROWS_SECONDS)  # of runs that were killed
        self.num_ranks = len({about["rank"] for about in said})
        if self._process:
            self._watch.schedulers = [about["pid"] for about in said if "pid" in about]
            self._schedulers = _processes(self._watch.schedulers, since=self._made - 2.0)
        self.state_bytes = 4 if said[0]["dtype"] == "float32" else 2


def _interval() -> float:
    """Seconds between two looks of a progress bar: often on a terminal, seldom in a log."""
    return 0.5 if sys.stderr.isatty() else 30.0


def _fetch(url: str, *, timeout_seconds: float) -> bytes:
    """Raises OSError, also where the server ends within its answer."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_seconds) as answer:
            return answer.read()
    except http.client.HTTPException as error:
        raise ConnectionResetError(f"{url} broke off ({error})") from error


def version_at(url: str) -> str:
    """The SGLang version of a running server.

    Raises ValueError if nothing answers at `url`, or something else than an SGLang that Eyas was read against.
    """
    url, version = url.rstrip("/"), None
    for path in ("/server_info", "/get_server_info"):  # the older name too, to say which version it is
        try:
            version = json.loads(_fetch(url + path, timeout_seconds=HEALTH_SECONDS))["version"]
            break
        except urllib.error.HTTPError as error:
            said = f"{path} says {error.code}"
        except (ValueError, KeyError, TypeError):
            said = f"{path} tells no version"
        except OSError as error:
            raise ValueError(
                f"no SGLang server answers at server.url={url} ({error}): start it there, or leave server.url out to "
                f"have one started"
            ) from error
    if version is None:
        raise ValueError(f"what answers at server.url={url} is no SGLang ({said}): give the url of an SGLang server")
    check_version(str(version), f"the server at server.url={url} is")
    return version


def _processes(pids: list[int], *, since: float) -> list[psutil.Process]:
    """Those that began then or later: a server in a container counts its processes otherwise, and these are strangers."""
    found = []
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.create_time() >= since:
                found.append(process)
    return found


def _runs(process: psutil.Process) -> bool:
    """Not so one that has ended, and of which its parent, or a container without an init, has not heard."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _group_runs(group: int) -> bool:
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and _runs(process):
                return True
    return False


def _die_with_parent() -> None:
    """In the child, before it becomes the server: if this process is killed, so is the server."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

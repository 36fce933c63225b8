"""One process alone holds a lock, others hear who it is, and a death lets it go."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from data import locks
from data.locks import claim, claim_when_free, is_claimed

ROOT = Path(__file__).resolve().parent.parent
HOLDS = "import sys, pathlib, time; from data.locks import claim; f = claim(pathlib.Path(sys.argv[1]), taken='', cure=''); print('held', flush=True); time.sleep(600)"


def test_what_another_process_holds_is_refused_with_its_name_until_it_is_killed(tmp_path):
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n" and is_claimed(path)
        with pytest.raises(ValueError, match=rf"^it is taken \(process {holder.pid} on \S+\): wait$"):
            claim(path, taken="it is taken", cure="wait")
    finally:
        holder.kill()
        holder.communicate()
    assert not is_claimed(path)
    with claim(path, taken="", cure=""):
        assert path.read_text() == f"process {os.getpid()} on {os.uname().nodename}\n"


def test_who_waits_gets_it_when_it_is_free(tmp_path):
    path, order = tmp_path / "lock", []

    def wait() -> None:
        with claim_when_free(path):
            order.append("waited")

    with claim_when_free(path):
        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.2)
        order.append("first")
    waiting.join(20)
    assert order == ["first", "waited"]


def test_a_lock_is_for_everybody_whom_the_umask_lets_write(tmp_path):
    """In a group's folder another user continues, merges, or fills the cache."""
    before = os.umask(0o002)
    try:
        claim(tmp_path / "lock", taken="", cure="").close()
    finally:
        os.umask(before)
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o664


def test_a_lock_that_nobody_made_is_free(tmp_path):
    assert not is_claimed(tmp_path / "lock") and not list(tmp_path.iterdir())


def test_where_the_file_system_knows_no_locks_nobody_is_kept_out(tmp_path, monkeypatch):
    def refuse(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    path = tmp_path / "lock"
    with claim(path, taken="", cure=""), claim(path, taken="", cure=""), claim_when_free(path):
        assert not is_claimed(path)


def test_any_other_error_of_a_lock_is_told(tmp_path, monkeypatch):
    def refuse(file, how):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        claim(tmp_path / "lock", taken="", cure="")


def test_a_full_disk_takes_the_lock_without_a_name(tmp_path):
    """/dev/full takes no byte; a link to it is a lock as good as another."""
    path = tmp_path / "lock"
    path.symlink_to("/dev/full")
    with claim(path, taken="", cure=""):
        assert is_claimed(path)

"""A process among others of a run: what it hears of them when its own main thread hears nothing."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.launched import ROOT
from train.running import Agreement, Watch

# Its main thread waits, as for a GPU; a checkpoint needs another second to the disk when the other process dies.
STUCK = """
import ctypes, os, subprocess, sys, time
from train.running import Termination, Watch, _machine

class Two:
    def gather(self, value):
        return [value, (_machine(), other.pid)]

other = subprocess.Popen(["sleep", "600"])
died = float("inf")
with Termination(), Watch(Two(), busy=lambda: time.monotonic() < died + 1):
    print("open", flush=True)
    time.sleep(float(sys.argv[1]))  # all is well
    other.kill()
    other.wait()
    died = time.monotonic()
    os.kill(os.getpid(), 15)  # as the launcher does, to no avail
    ctypes.CDLL(None).sleep(60)
print("never")
"""


def test_a_process_that_is_stuck_ends_with_the_one_that_it_waits_for():
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, "1.5"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "open\n"
    started = time.monotonic()
    printed, said = process.communicate(timeout=50)
    assert process.returncode == 1 and not printed, said
    assert "has died: the same command goes on" in said
    assert 2.5 <= time.monotonic() - started < 30


def test_one_process_agrees_with_itself_and_watches_nobody():
    agreement = Agreement(1)
    assert agreement.gather("a") == ["a"]
    with Watch(agreement, busy=lambda: False) as watch:
        watch.part()
    assert watch.others == [] and watch.over.is_set()


def test_an_error_of_gloo_is_one_line_that_says_what_to_do(monkeypatch):
    def closed(*_, **__):
        raise RuntimeError("[pair.cc:538] Connection closed by peer\nmore lines")

    monkeypatch.setattr("train.running.dist.all_reduce", closed)
    agreement = Agreement(1)
    agreement.group = object()
    with pytest.raises(ValueError, match="another process of this run has ended.*Connection closed by peer.:"):
        agreement.sum(None)

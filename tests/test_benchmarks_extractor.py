"""The extractor's benchmark runs to its end, and says its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_extractor_is_measured_behind_a_stand_in(tmp_path):
    command = [
        sys.executable, "benchmarks/extractor.py", "--hidden", "16", "--prompts", "40", "--length", "9", "--processes", "1",
        "--repeats", "1", "--out", tmp_path / "work", "--json", tmp_path / "found.json",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == {"gigabytes_per_second", "cpu_seconds_per_gigabyte", "changes_of_hands_per_prompt"}
    assert all(value >= 0 for value in found.values()) and found["cpu_seconds_per_gigabyte"] > 0
    assert not (tmp_path / "work").exists()

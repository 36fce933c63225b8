"""The loader's benchmark feeds real shards through the loop's own data path, and says how that compares."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_it_measures_every_case_and_compares_with_the_step(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/loader.py", "--shapes", "tiny", "--workers", "0", "1", "--codecs", "bf16", "fp8",
               "--gigabytes", "0.01", "--seconds", "0.2", "--folder", tmp_path, "--json", tmp_path / "figures.json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert {(row["codec"], row["workers"]) for row in rows} == {("bf16", 0), ("bf16", 1), ("fp8", 0), ("fp8", 1)}
    for row in rows:
        assert row["tokens_per_second"] > 0 and row["ratio"] == row["tokens_per_second"] / 33_226
        size = row["gigabytes_per_second"] * 1e9 / row["tokens_per_second"]
        states = 4 * 128 * 2 if row["codec"] == "bf16" else 4 * 128 + 4 * 4
        assert states + 5 <= size <= 1.05 * (states + 5), "tokens, mask, and what a tar and its headers add"

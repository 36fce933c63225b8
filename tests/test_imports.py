"""The rooms and who may import whom: data <- extract, data <- train, all <- launch and tests."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("data", "extract", "train", "launch", "tests", "benchmarks")
MAY_IMPORT = {"data": {"data"}, "extract": {"data", "extract"}, "train": {"data", "train"}}
GUARD = re.compile(r"sys\.path\.insert\(0, str\((pathlib\.)?Path\(__file__\)\.resolve\(\)\.parent\.parent\)\)$")
STAGES = [
    "data/main.py", "extract/main.py", "train/main.py", "train/evaluate.py", "train/export.py",
    "launch/quickstart.py", "launch/serve.py", "launch/bench.py", "launch/verify.py", "launch/merge.py", "launch/recode.py",
]  # fmt: skip


def python_files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported_rooms(file: Path) -> set[str]:
    """Rooms that `file` imports anywhere, inside functions too."""
    rooms = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute here"
            names = [node.module]
        rooms |= {name.split(".")[0] for name in names} & set(ROOMS)
    return rooms


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_lies_upstream_of_it(room: str):
    wrong = {str(f.relative_to(ROOT)): imported_rooms(f) - MAY_IMPORT[room] for f in python_files(room)}
    assert {file: rooms for file, rooms in wrong.items() if rooms} == {}


def test_nothing_imports_the_launchers_or_the_tests():
    wrong = [
        str(file.relative_to(ROOT))
        for room in ("data", "extract", "train")
        for file in python_files(room)
        if imported_rooms(file) & {"launch", "tests", "benchmarks"}
    ]
    assert wrong == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_finds_its_rooms_wherever_it_is_started_from(stage: str):
    """The guard is the first thing after the standard library, before any room is imported."""
    lines = (ROOT / stage).read_text().splitlines()
    guard = next(i for i, line in enumerate(lines) if GUARD.match(line))
    first_room = next(i for i, line in enumerate(lines) if re.match(rf"(from|import) ({'|'.join(ROOMS)})\b", line))
    assert guard < first_room


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_a_help(stage: str, tmp_path: Path):
    """Run from another folder, with an isolated Python (-I): an installed Eyas cannot be what is found."""
    done = subprocess.run([sys.executable, "-I", ROOT / stage, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"python {stage} " in done.stdout or f"accelerate launch {stage} " in done.stdout


def test_the_plugin_needs_only_what_sglang_has():
    """It is loaded into somebody else's environment, with every module of ours that it imports at its top."""
    allowed = set(sys.stdlib_module_names) | {"torch", "safetensors", "numpy"}
    seen, todo = set(), [ROOT / "extract" / "plugin.py"]
    while todo:
        file = todo.pop()
        seen.add(file)
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in getattr(node, "names", [])]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            elif not isinstance(node, ast.Import):
                continue
            for name in names:
                if name.split(".")[0] not in ROOMS:
                    assert name.split(".")[0] in allowed, f"{file.relative_to(ROOT)} imports {name}"
                    continue
                module = ROOT / name.replace(".", "/")
                found = [f for f in (module.with_suffix(".py"), module.parent.with_suffix(".py")) if f.exists()]
                todo += [f for f in found[:1] if f not in seen]

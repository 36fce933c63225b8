"""The rooms and who may import whom: data <- extract, data <- train, all <- launch and tests."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("data", "extract", "train", "launch", "tests", "benchmarks")
MAY_IMPORT = {"data": {"data"}, "extract": {"data", "extract"}, "train": {"data", "train"}}
GUARD = "sys.path.insert(0, str(Path(__file__).resolve().parent.parent))"
STAGES = [
    "data/main.py", "extract/main.py", "train/main.py", "train/evaluate.py", "train/export.py",
    "launch/quickstart.py", "launch/serve.py", "launch/bench.py",
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
    guard = lines.index(GUARD)
    first_room = next(i for i, line in enumerate(lines) if line.split(" ")[0] == "from" and line.split(" ")[1].split(".")[0] in ROOMS)
    assert guard < first_room


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_a_help(stage: str, tmp_path: Path):
    """Run from another folder, with an isolated Python (-I): an installed Eyas cannot be what is found."""
    done = subprocess.run([sys.executable, "-I", ROOT / stage, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"python {stage} " in done.stdout or f"accelerate launch {stage} " in done.stdout


def test_the_plugin_needs_nothing_of_ours_to_be_imported():
    """It is loaded into somebody else's SGLang environment: only the standard library, torch and safetensors."""
    top = {
        name.split(".")[0]
        for node in ast.parse((ROOT / "extract" / "plugin.py").read_text()).body
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [node.module] if isinstance(node, ast.ImportFrom) else []
        )
    }  # fmt: skip
    assert top - set(sys.stdlib_module_names) <= {"torch", "safetensors", "numpy", "data", "extract"}

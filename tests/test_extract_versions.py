"""Another version of SGLang, started as users start it, where a folder of it is named; without any, nothing runs.

    pip install --no-deps --target /tmp/sglang-0.5.16 sglang==0.5.16 transformers==5.12.1 tokenizers==0.22.2
    EYAS_TEST_SGLANG=/tmp/sglang-0.5.16 python -m pytest tests/test_extract_versions.py

Several folders with a colon between them; a server takes a minute. What is not in a folder comes from this
environment. `PYTHONPATH=/tmp/sglang-0.5.16 python -m pytest tests/test_extract_matrix.py tests/test_extract_capture.py`
runs every family on it, with servers that start in seconds.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from extract.command import WHOLE_ON_CPU, installation, numbers_of
from tests.targets import engine_config
from tests.test_extract_capture import check_live_acceptance
from tests.test_extract_matrix import CHUNKED, TP2, Shape, check

FOLDERS = [Path(folder) for folder in os.environ.get("EYAS_TEST_SGLANG", "").split(os.pathsep) if folder]
CASES = [("llama", CHUNKED), ("deepseek_v3", TP2)]
VERSIONS = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def python_with(folder: Path, at: Path) -> str:
    """An executable that plays a Python whose SGLang is the one in `folder`."""
    at.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}${{PYTHONPATH:+:$PYTHONPATH}}" exec {sys.executable} "$@"\n')
    at.chmod(0o755)
    return str(at)


@VERSIONS
@pytest.mark.parametrize(("name", "shape"), CASES, ids=lambda value: getattr(value, "name", value))
def test_another_versions_records_are_hugging_faces_too(folder, name, shape, models, tmp_path):
    python = python_with(folder, tmp_path / "python")
    found = installation(engine_config(python=python, device="cpu"))
    assert f"-{found.version}" in folder.name, "the folder's name ends in its version"
    check(name, Shape(shape.name, {**shape.engine, "python": python, "warm": False}, shape.num_ranks), models, tmp_path)


@VERSIONS
def test_another_versions_live_acceptance_is_what_the_pair_was_constructed_for(folder, tmp_path):
    version = re.search(r"\d+\.\d+\.\d+$", folder.name)[0]
    if numbers_of(version) < WHOLE_ON_CPU:
        pytest.skip(f"SGLang {version} verifies drafts wrongly on a CPU")
    check_live_acceptance(tmp_path, python=python_with(folder, tmp_path / "python"), warm=False)

"""Targets that tests share: made once a run, in a temporary folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from data.config import TargetConfig, typed
from data.embedded import ensure_target

CONF = Path(__file__).resolve().parent.parent / "conf"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that plays EYAS_MODELS."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_llama(models: Path) -> TargetConfig:
    """conf/target/tiny_llama.yaml, made."""
    described = OmegaConf.load(CONF / "target" / "tiny_llama.yaml")
    config = typed(TargetConfig, OmegaConf.merge(described, {"path": f"{models}/tiny_llama"}))
    ensure_target(config)
    return config

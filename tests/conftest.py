"""Targets that tests share: made once a run, in a temporary folder. And Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Read when Triton and the kernels are imported, so before any test does it; the processes that tests start go without.
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.experimental.gluon  # which Triton imports at the first launch, and which looks at the variable too

    import train.kernels.attention
    import train.kernels.linear_loss  # noqa: F401

    del os.environ["TRITON_INTERPRET"]

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

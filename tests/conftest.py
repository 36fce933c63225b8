"""What tests share: a target and shards of it, made once a run, and an S3 server. And Triton's interpreter without a GPU."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch

for number in (signal.SIGINT, signal.SIGHUP):
    # A process that ignores a signal hands that on, and nohup or a shell's & make it do so; tests start what must hear them.
    if signal.getsignal(number) == signal.SIG_IGN:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(number, lambda number, frame: None)

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


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory, tiny_llama: TargetConfig) -> Path:
    """24 conversations of tiny_llama to train on and 6 to validate with, with their states. Nobody writes to it."""
    from tests.datasets import write_dataset  # which imports Transformers

    return write_dataset(tmp_path_factory.mktemp("data") / "shards", Path(tiny_llama.path), name="tiny_llama")


@pytest.fixture(scope="module")
def s3():
    """A real S3 server on loopback, as fsspec sees it."""
    import fsspec
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    before = dict(os.environ)
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://{host}:{port}", AWS_ACCESS_KEY_ID="eyas", AWS_SECRET_ACCESS_KEY="eyas",
        AWS_DEFAULT_REGION="us-east-1",
    )  # fmt: skip
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # they remember the address of an earlier server
    yield fsspec.filesystem("s3")
    os.environ.clear()
    os.environ.update(before)
    server.stop()


@pytest.fixture
def bucket(s3, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """s3://… of a bucket of the test's own; and a home of its own, where the small files of what is read lie."""
    name = f"eyas-{abs(hash(request.node.name))}"
    s3.mkdir(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EYAS_CACHE", raising=False)
    return f"s3://{name}/toy"

"""serve with a real server: a drafter of random weights on the tiny Llama, on the CPU."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from data.boundaries import text_config
from data.config import TargetConfig, typed
from extract.claims import check_port, claim_folder
from launch.drafting import checked_drafting
from launch.serve import first_record
from train.config import DrafterConfig
from train.export import export
from train.model import Drafter
from train.shape import DrafterShape
from tests.datasets import write_dataset

ROOT = Path(__file__).resolve().parent.parent
PROMPT = [11, 12, 13, 14]


@pytest.fixture(scope="module")
def drafter(tiny_llama: TargetConfig, tmp_path_factory) -> Path:
    """Two depths, random weights: next to nothing that it proposes is right, and no output may change for it."""
    described = OmegaConf.load(ROOT / "conf" / "drafter" / "eagle3.yaml")
    settings = typed(DrafterConfig, OmegaConf.merge(described, {"draft_vocab_size": 128, "depths": 2}))
    shape = DrafterShape.resolve(settings, text_config(tiny_llama.path), num_boundaries=3)
    kept = torch.arange(shape.vocab_size) < shape.draft_vocab_size
    module = Drafter(shape, d2t=torch.zeros(shape.draft_vocab_size, dtype=torch.int64), t2d=kept)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.05, generator=generator)
    folder = tmp_path_factory.mktemp("drafter") / "export"
    export(
        module.state_dict(), shape=shape, boundaries=tiny_llama.boundaries, depths=2, target_name="tiny_llama",
        target_path=Path(tiny_llama.path), out=folder, engine="sglang", engine_version="0.5.23",
    )  # fmt: skip
    return folder


@pytest.fixture
def environment(tiny_llama: TargetConfig) -> dict[str, str]:
    return os.environ | {"EYAS_MODELS": str(Path(tiny_llama.path).parent)}


def copy_of(drafter: Path, folder: Path, **changed) -> Path:
    """The drafter's folder again, its config.json changed."""
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(drafter / "model.safetensors")
    config = json.loads((drafter / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    return folder


def checked(drafter: Path, target: TargetConfig):
    return checked_drafting(
        drafter, target=target, target_path=Path(target.path), num_drafts=None, engine_version="0.5.23"
    )


def test_a_drafter_is_served_with_as_many_drafts_as_it_was_trained_for(drafter: Path, tiny_llama: TargetConfig):
    assert checked(drafter, tiny_llama).num_steps == 2


def test_layer_ids_shifted_by_one_are_refused_with_the_right_ones(drafter: Path, tiny_llama: TargetConfig, tmp_path):
    """Boundaries 2, 3, 5 are ids 1, 2, 4 to SGLang's Llama; 2, 3, 5 as ids would be boundaries 3, 4, 6."""
    wrong = {"eagle_aux_hidden_state_layer_ids": [2, 3, 5], "use_aux_hidden_state": True}
    with pytest.raises(ValueError, match=r"boundaries \[2, 3, 5\].*layer ids \[1, 2, 4\].*says \[2, 3, 5\]"):
        checked(copy_of(drafter, tmp_path / "shifted", eagle_config=wrong), tiny_llama)


def test_a_drafter_of_another_target_is_refused(drafter: Path, tiny_llama: TargetConfig, tmp_path):
    told = json.loads((drafter / "config.json").read_text())["eyas"] | {"target": "tiny_qwen3"}
    with pytest.raises(ValueError, match="was trained for tiny_qwen3, this run serves tiny_llama"):
        checked(copy_of(drafter, tmp_path / "other", eyas=told), tiny_llama)


def test_a_drafter_exported_for_vllm_is_refused(drafter: Path, tiny_llama: TargetConfig, tmp_path):
    told = json.loads((drafter / "config.json").read_text())["eyas"] | {"engine": "vllm"}
    with pytest.raises(ValueError, match="export its checkpoint again with engine=sglang"):
        checked(copy_of(drafter, tmp_path / "vllm", eyas=told), tiny_llama)


def test_a_config_without_depths_or_layer_ids_is_refused_by_name(drafter: Path, tiny_llama: TargetConfig, tmp_path):
    told = json.loads((drafter / "config.json").read_text())
    without = {name: value for name, value in told["eyas"].items() if name != "depths"}
    with pytest.raises(ValueError, match="has no depths in eyas or eagle_config"):
        checked(copy_of(drafter, tmp_path / "depths", eyas=without), tiny_llama)
    with pytest.raises(ValueError, match="has no eagle_aux_hidden_state_layer_ids in eyas or eagle_config"):
        checked(copy_of(drafter, tmp_path / "ids", eagle_config={}), tiny_llama)


def test_a_port_that_is_taken_is_told_without_a_cure_that_serve_refuses():
    """A drafter is given to a server at its start: there is no attaching to one."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match="set server.port=0 for a free one$"):
            check_port("127.0.0.1", port, attachable=False)
        with pytest.raises(ValueError, match=f"attach to the server there with server.url=http://127.0.0.1:{port}"):
            check_port("127.0.0.1", port)


def test_with_nothing_to_compare_the_wiring_with_no_server_is_started(drafter: Path, environment: dict, tmp_path: Path):
    """A server of a large target takes many minutes to its start."""
    command = [sys.executable, "launch/serve.py", "target=tiny_llama", f"drafter={drafter}", f"out={tmp_path}", "probe.reference=off"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "give shards=" in done.stderr and not (tmp_path / "server").exists()


def test_shards_of_other_boundaries_are_no_proof_of_the_wiring(tiny_llama: TargetConfig, tmp_path: Path):
    """Compared with them, a right server would be accused; and one that is wrong in the same way would pass."""
    target = Path(tiny_llama.path)
    shards = write_dataset(tmp_path / "shards", target, name="tiny_llama", train=1, validation=1)
    record = first_record(str(shards), target=tiny_llama, target_path=target, boundaries=[2, 3, 5])
    assert record.aux.shape[1] == 3
    for boundaries in ([1, 2, 4], [2, 3]):
        with pytest.raises(ValueError, match=r"captured at boundaries \[2, 3, 5\].*give the shards that the drafter learnt from"):
            first_record(str(shards), target=tiny_llama, target_path=target, boundaries=boundaries)


@pytest.mark.parametrize("stage", ["serve", "bench"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_told_to_end_while_its_server_starts_says_so_in_a_line(drafter: Path, environment: dict, tmp_path, stage, number):
    """A large target takes many minutes to its start, and this is when one sees that an option is wrong."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"prompt_ids": PROMPT, "response_ids": [5] * 4}) + "\n")
    more = [f"prompts={questions}"] if stage == "bench" else ["server.port=0"]
    command = [sys.executable, f"launch/{stage}.py", "target=tiny_llama", f"drafter={drafter}", f"out={tmp_path / 'out'}", *more]
    log = tmp_path / "out" / ("server" if stage == "serve" else "with-drafts") / "server.log"
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            started = time.monotonic()
            while not (log.exists() and log.stat().st_size) and time.monotonic() - started < 60:
                time.sleep(0.1)
            process.send_signal(number)
            said = process.stdout.read()
        finally:
            process.kill()
    assert process.returncode == 128 + number and "Traceback" not in said, said
    assert said.splitlines()[-1].startswith(f"ended by {number.name}: it")
    claim_folder(log.parent, cure="").close()  # its server is gone


def test_serve_checks_the_wiring_answers_and_ends_with_ctrl_c(drafter: Path, environment: dict, tmp_path: Path):
    command = [
        sys.executable, "launch/serve.py", "target=tiny_llama", f"drafter={drafter}", f"out={tmp_path / 'serve'}",
        "server.port=0",
    ]  # fmt: skip
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            said = []
            for line in process.stdout:
                said.append(line)
                if line.startswith("serving tiny_llama at "):
                    break
            assert said and said[-1].startswith("serving"), "".join(said)
            assert "--speculative-draft-model-path" in "".join(said)
            url = said[-1].split()[3]
            asked = json.dumps({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6, "temperature": 0}})
            request = urllib.request.Request(
                f"{url}/generate", asked.encode(), headers={"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert len(json.loads(answer.read())["output_ids"]) == 6
            process.send_signal(signal.SIGINT)
            started = time.monotonic()
            rest = process.stdout.read()
            assert process.wait(30) == 0, rest
            assert time.monotonic() - started < 30
        finally:
            process.kill()
    summary = json.loads((tmp_path / "serve" / "summary.json").read_text())
    assert summary["probe_passed"] is True

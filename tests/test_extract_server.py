"""Every way in which a server does not become ready has its own words. Stand-ins play the servers."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

import extract.server as server_module
from extract import claims
from extract.command import Capturing, Drafting, command, install_plugin, installation
from extract.fetch import ROWS_SECONDS
from extract.readiness import Watch, loading_progress
from extract.server import Server, version_at
from extract.spool import FORMAT, append_line
from tests.targets import ROOT, engine_config, server_config

STAND_IN = '''\
#!{python}
"""Plays a Python that has SGLang: says its version, or serves in the state that its file name asks for."""
import http.server, json, os, pathlib, subprocess, sys, time
state = pathlib.Path(__file__).name
if sys.argv[1] == "-c":
    if state == "no_sglang":
        sys.exit("importlib.metadata.PackageNotFoundError: No package metadata was found for sglang")
    print(json.dumps(["0.4.1" if state == "old" else "0.5.23", None]))
    sys.exit()
options = dict(zip(sys.argv, sys.argv[1:]))
VERSIONS = {{"serves_0_5_15": "0.5.15.post1", "serves_0_5_24": "0.5.24", "serves_a_post": "0.5.16.post1"}}
print("starting", state, flush=True)
if state == "exits":
    print("RuntimeError: CUDA out of memory", flush=True)
    sys.exit(3)
if state in ("waits", "slow"):
    time.sleep(600 if state == "waits" else 2)
if state == "computes":
    while True:
        pass
if state == "loads":
    print("Loading safetensors checkpoint shards:  20% Completed | 1/5 [00:01<00:04]", flush=True)
    print("Loading safetensors checkpoint shards:  40% Completed | 2/5 [00:02<00:03]", flush=True)
asked_health = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global asked_health
        asked_health += self.path == "/health"
        if state == "stalls" and asked_health > 1:
            stand_still()
        if state == "fails" and asked_health > 1:
            print("Health check failed. Server couldn't get a response from detokenizer", flush=True)
        if state == "breaks_off":
            self.wfile.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 100\\r\\n\\r\\nhalf")
            self.wfile.flush()
            os._exit(4)
        loading = self.path == "/health" and (state == "loads" or state == "fails" and asked_health > 1)
        answer = {{"architectures": ["Qwen3ForCausalLM" if state == "other" else "LlamaForCausalLM"],
                  "model_path": options["--model-path"], "version": "0.5.20"}}
        if state in VERSIONS:
            answer["version"] = VERSIONS[state]
        if state == "no_version":
            del answer["version"]
        self.send_response(503 if loading else 200)
        self.end_headers()
        self.wfile.write(b"" if self.path == "/health" else json.dumps(answer).encode())
    def log_message(self, *arguments):
        pass
SCHEDULER = """
import os, pathlib, sys, time
parent, spool, died = os.getppid(), pathlib.Path(sys.argv[1]), None
while died is None or time.monotonic() < died + 0.5:
    spool.mkdir(exist_ok=True)
    (spool / f"piece-{{time.monotonic()}}").touch()
    if died is None and os.getppid() != parent:
        died = time.monotonic()
    time.sleep(0.01)
"""
def stand_still():
    time.sleep(600)
asked = json.loads(os.environ.get("EYAS_CAPTURE", "null"))
if asked and state != "no_plugin":
    ids = [7] if state == "other_ids" else asked["layer_ids"]
    said = {{"layer_ids": ids, "rank": 0, "dtype": "bfloat16", "format": 1 if state == "old_plugin" else {format}}}
    if state == "cannot":
        said["error"] = "AttributeError: no set_eagle3_layers_to_capture"
    if state == "dies_slowly":
        said["pid"] = subprocess.Popen([sys.executable, "-c", SCHEDULER, asked["spool"]], start_new_session=True).pid
    (pathlib.Path(asked["spool"]) / "server-1.json").write_text(json.dumps(said))
http.server.HTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
'''


@pytest.fixture
def stand_in(tmp_path):
    def make(state: str) -> str:
        file = tmp_path / state
        file.write_text(STAND_IN.format(python=sys.executable, format=FORMAT))
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        return str(file)

    return make


def server(python, tiny_llama, tmp_path, *, capture=False, seconds=30.0, **config):
    return Server(
        Path(tiny_llama.path),
        engine=engine_config(python=python, device="cuda"),
        config=server_config(ready_timeout_seconds=seconds, **config),
        out=tmp_path / "out",
        capturing=Capturing(tmp_path / "spool" if capture is True else capture, [1, 2, 4]) if capture else None,
    )


def refused(*arguments, **options) -> str:
    with pytest.raises(ValueError) as caught:
        with server(*arguments, **options):
            pass
    return str(caught.value)


def test_a_server_that_dies_within_an_answer_has_exited(stand_in, tiny_llama, tmp_path):
    assert "the server exited with status 4" in refused(stand_in("breaks_off"), tiny_llama, tmp_path)


def test_a_ready_server_is_used_and_then_gone(stand_in, tiny_llama, tmp_path):
    with server(stand_in("ready"), tiny_llama, tmp_path, capture=True) as running:
        assert running.is_alive() and running.get("/model_info")["architectures"] == ["LlamaForCausalLM"]
        assert (running.num_ranks, running.state_bytes) == (1, 2)
        assert version_at(running.url) == "0.5.20"
        process = psutil.Process(running._process.pid)
    assert not process.is_running()


def test_a_server_loads_while_its_caller_does_something_else(stand_in, tiny_llama, tmp_path):
    """The stand-in opens its port after two seconds."""
    began = server(stand_in("slow"), tiny_llama, tmp_path)
    began.begin()
    try:
        process = psutil.Process(began._process.pid)
        with pytest.raises(OSError):
            began.get("/model_info")
        assert began.ready() is began and began.get("/model_info")["architectures"] == ["LlamaForCausalLM"]
        assert began.ready()._process.pid == process.pid, "asked again, it is the same one"
    finally:
        began.stop()
    assert not process.is_running()


def test_a_temporary_spool_goes_with_its_server_and_not_with_another_that_may_not_write_to_it(
    stand_in, tiny_llama, tmp_path
):
    first, second = (server(stand_in("ready"), tiny_llama, tmp_path, capture=True) for _ in range(2))
    first.spool_is_temporary = second.spool_is_temporary = True
    with first:
        with pytest.raises(ValueError, match="another process has a server that writes to"):
            second.begin()
        second.out = tmp_path / "elsewhere"
        with pytest.raises(ValueError, match="another process has a server that writes to .*spool"):
            second.begin()
        assert (tmp_path / "spool/server-1.json").exists() and (tmp_path / "spool/.lock").exists()
    assert not (tmp_path / "spool").exists()


def test_what_a_scheduler_writes_while_it_dies_goes_with_the_spool(stand_in, tiny_llama, tmp_path):
    """It may outlive the first process, which a wrapper has started in a session of its own; gigabytes of memory would stay."""
    running = server(stand_in("dies_slowly"), tiny_llama, tmp_path, capture=True)
    running.spool_is_temporary = True
    with running:
        scheduler = psutil.Process(running._watch.schedulers[0])
        while not list((tmp_path / "spool").glob("piece-*")):
            time.sleep(0.01)
    assert not server_module._runs(scheduler) and not (tmp_path / "spool").exists()


def test_a_server_that_exits_shows_its_last_lines_and_what_to_do(stand_in, tiny_llama, tmp_path):
    message = refused(stand_in("exits"), tiny_llama, tmp_path)
    assert "exited with status 3" in message and "RuntimeError: CUDA out of memory" in message
    assert "lower engine.mem_fraction" in message and str(tmp_path / "out/server.log") in message


@pytest.mark.parametrize(("state", "words"), [("waits", "processes wait"), ("computes", "processes compute")])
def test_a_port_that_never_opens_says_whether_the_processes_compute(stand_in, tiny_llama, tmp_path, state, words):
    message = refused(stand_in(state), tiny_llama, tmp_path, seconds=1.5)
    assert "not ready after" in message and "port not open yet" in message and words in message
    assert "server.ready_timeout_seconds" in message


@pytest.mark.parametrize(("state", "words"), [("waits", "processes wait"), ("computes", "processes compute")])
def test_a_silent_server_is_told_of_in_time_and_ended_with_its_stacks_saved(
    stand_in, tiny_llama, tmp_path, capsys, state, words
):
    """Silence is told after half a second and ends the server after two; its stack names the line it stands at."""
    began = time.monotonic()
    message = refused(stand_in(state), tiny_llama, tmp_path, silence_seconds=0.5, hang_seconds=2.0)
    assert 2.0 <= time.monotonic() - began < 20
    told = capsys.readouterr().err
    assert "the server has said nothing for" in told and words in told and told.count("has said nothing") == 1
    assert "hangs, silent for 2 s" in message and words in message and "server.hang_seconds" in message
    stacks = sorted((tmp_path / "out").glob("stacks-*.txt"))
    assert len(stacks) == 2 and str(stacks[1]) in message
    assert f"<module> ({state}:" in stacks[1].read_text(), "py-spy's stack of the stand-in, whose file has that name"


def test_stacks_that_cannot_be_written_do_not_hide_what_was_seen(tmp_path):
    """Else a full disk would end the thread that ends a server which hangs."""
    watch = Watch(tmp_path / "gone/server.log", os.getpid(), silence_seconds=0.0, hang_seconds=1.0)
    assert watch.save_stacks() == f"the stacks of its processes cannot be written to {tmp_path}/gone/stacks-0.txt: No such file or directory"


def test_a_server_that_is_only_slow_is_told_of_and_used(stand_in, tiny_llama, tmp_path, capsys):
    with server(stand_in("slow"), tiny_llama, tmp_path, silence_seconds=0.5, hang_seconds=30.0) as running:
        assert running.get("/model_info")
    assert "the server has said nothing for" in capsys.readouterr().err


def test_a_server_that_loads_for_ever_is_told_from_one_without_a_port_and_how_far_it_got(stand_in, tiny_llama, tmp_path):
    message = refused(stand_in("loads"), tiny_llama, tmp_path, seconds=2.0)
    assert "loading (503), Loading safetensors checkpoint shards 40 %" in message


@pytest.mark.parametrize(
    ("state", "words", "function"),
    [("stalls", "/health does not answer", "stand_still"), ("fails", "/health fails (503)", "serve_forever")],
)
def test_a_ready_server_that_stops_answering_is_ended_and_the_error_says_what_was_seen(
    stand_in, tiny_llama, tmp_path, monkeypatch, capsys, state, words, function
):
    """Also one whose log grows meanwhile: SGLang writes a line at every /health that its scheduler does not answer."""
    monkeypatch.setattr(server_module, "HEALTH_SECONDS", 0.3)
    with server(stand_in(state), tiny_llama, tmp_path, silence_seconds=0.5, hang_seconds=1.5) as running:
        deadline = time.monotonic() + 30
        while running.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        error = str(running.failure("the server ended while extracting", cure="the same command continues there"))
    assert "it hung, silent for" in error and words in error and "processes wait" in error
    assert "the server has said nothing for" in capsys.readouterr().err
    stacks = sorted((tmp_path / "out").glob("stacks-*.txt"))
    assert f"{function} (" in stacks[-1].read_text()


def test_a_server_attached_to_that_stops_answering_is_told_about_and_left_alone(
    stand_in, tiny_llama, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(server_module, "HEALTH_SECONDS", 0.3)
    with server(stand_in("ready"), tiny_llama, tmp_path) as running:
        with server(None, tiny_llama, tmp_path / "other", url=running.url, silence_seconds=0.4, hang_seconds=0.5):
            os.kill(running._process.pid, signal.SIGSTOP)
            deadline, told = time.monotonic() + 30, ""
            while "has said nothing for" not in told:
                assert time.monotonic() < deadline
                time.sleep(0.05)
                told += capsys.readouterr().err
            time.sleep(0.5)
            os.kill(running._process.pid, signal.SIGCONT)
        assert running.is_alive() and "its stacks are not ours to see" in told


def test_a_second_server_for_the_same_folder_or_spool_is_refused_and_disturbs_nothing(stand_in, tiny_llama, tmp_path):
    """Two extractors with one out, or two with one server.spool: the first one's rows and plugin stay where they are."""
    with server(stand_in("ready"), tiny_llama, tmp_path, capture=True) as running:
        rows = tmp_path / "spool/eyas-1-train-0"
        rows.mkdir()
        message = refused(stand_in("ready"), tiny_llama, tmp_path, capture=True)
        assert f"another process has a server that writes to {tmp_path}/out" in message and "choose another out=" in message
        other = server(stand_in("ready"), tiny_llama, tmp_path, capture=True)
        other.out = tmp_path / "other"
        with pytest.raises(ValueError, match=f"writes to {tmp_path}/spool .*: wait for it to end, or set another server.spool="):
            other.__enter__()
        assert rows.exists() and (running.out / "plugin/extract/plugin.py").exists() and running.get("/model_info")
    with server(stand_in("ready"), tiny_llama, tmp_path, capture=True) as running:
        assert running.is_alive() and not rows.exists()


def test_a_folder_that_cannot_be_written_is_one_clear_error(stand_in, tiny_llama, tmp_path):
    (tmp_path / "out").write_text("a file where a folder is to be")
    message = refused(stand_in("ready"), tiny_llama, tmp_path)
    assert f"cannot write {tmp_path}/out: File exists" in message and "choose another out=" in message


@pytest.mark.parametrize(
    ("log", "progress"),
    [
        ("", ""),
        ("[12:00:00 TP0] Load weight begin. avail mem=79.1 GB", "loads the weights"),
        ("Loading pt checkpoint shards: 100% Completed | 1/1 [00:00<00:00]", "Loading pt checkpoint shards 100 %"),
        ("[12:00:05 TP0] Capture cuda graph begin.\nCapturing batches (bs=8 avail_mem=4.1 GB):  25%|##  | 1/4",
         "Capturing batches (bs=8 avail_mem=4.1 GB) 25 %"),
        ("[12:00:09 TP0] Capture cuda graph end. Time elapsed: 4 s", "has its CUDA graphs"),
    ],
)  # fmt: skip
def test_the_log_tells_how_far_a_start_has_got(log, progress):
    assert loading_progress(log) == progress


def test_a_server_of_another_model_is_refused_naming_both(stand_in, tiny_llama, tmp_path):
    message = refused(stand_in("other"), tiny_llama, tmp_path)
    assert "Qwen3ForCausalLM" in message and "LlamaForCausalLM" in message and "set target=" in message


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("no_plugin", "does not capture into"),
        ("old_plugin", "another version of Eyas has started the server at .*: stop it, and start it with the command"),
        ("cannot", "no set_eagle3_layers_to_capture"),
        ("other_ids", r"captures layer ids \[7\], this run needs \[1, 2, 4\]"),
    ],
)
def test_a_server_that_captures_nothing_or_something_else_is_refused(stand_in, tiny_llama, tmp_path, state, words):
    with pytest.raises(ValueError, match=words):
        with server(stand_in(state), tiny_llama, tmp_path, capture=True):
            pass


def test_a_port_in_use_is_refused_before_anything_starts(stand_in, tiny_llama, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused(stand_in("ready"), tiny_llama, tmp_path, port=port)
    assert f"port {port} of 127.0.0.1" in message and "server.port=0" in message
    assert not (tmp_path / "out").exists()


def test_a_free_port_has_the_ports_free_that_sglang_takes_with_it(monkeypatch):
    with socket.socket() as other, socket.socket() as derived:
        other.bind(("127.0.0.1", 0))
        derived.bind(("127.0.0.1", 0))
        taken, beside = other.getsockname()[1], derived.getsockname()[1] - claims.DERIVED_PORTS[1]
        good = claims.free_port("127.0.0.1")
        assert good in claims.PORTS
        monkeypatch.setattr(claims.random, "sample", lambda ports, count: [taken, beside, good])
        assert claims.free_port("127.0.0.1") == good
        monkeypatch.setattr(claims.random, "sample", lambda ports, count: [taken, beside])
        with pytest.raises(ValueError, match="no free port in 20000 .. 31999: set server.port="):
            claims.free_port("127.0.0.1")


def test_attaching_to_nothing_is_refused(tiny_llama, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert f"nothing answers at server.url={url}" in refused(None, tiny_llama, tmp_path, url=url)
    with pytest.raises(ValueError, match="no SGLang server answers"):
        version_at(url)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("serves_0_5_15", r"the server at server.url=\S+ is SGLang 0.5.15.post1: Eyas needs 0.5.16 to 0.5.23"),
        ("serves_0_5_24", r"is SGLang 0.5.24: Eyas needs 0.5.16 to 0.5.23"),
        ("no_version", r"what answers at server.url=\S+ is no SGLang"),
    ],
)
def test_attaching_to_a_version_that_eyas_does_not_know_is_refused(stand_in, tiny_llama, tmp_path, state, words):
    """As one that is to be started is. It goes on; a stage says so in one line, before it does anything."""
    with server(stand_in(state), tiny_llama, tmp_path) as running:
        with pytest.raises(ValueError, match=words):
            version_at(running.url)
        with pytest.raises(ValueError, match=words):
            with server(None, tiny_llama, tmp_path, url=running.url):
                pass
        assert running.is_alive()


def test_a_post_release_counts_as_its_release(stand_in, tiny_llama, tmp_path):
    with server(stand_in("serves_a_post"), tiny_llama, tmp_path) as running:
        assert version_at(running.url + "/") == "0.5.16.post1"


def test_attaching_leaves_the_server_running(stand_in, tiny_llama, tmp_path):
    with server(stand_in("ready"), tiny_llama, tmp_path) as running:
        with server(None, tiny_llama, tmp_path, url=running.url):
            pass
        assert running.is_alive() and running.get("/model_info")


def test_attaching_removes_what_killed_runs_have_left_in_the_spool_and_nothing_that_may_be_awaited(
    stand_in, tiny_llama, tmp_path
):
    spool = tmp_path / "spool"
    with server(stand_in("ready"), tiny_llama, tmp_path, capture=True) as running:
        for number, age in enumerate((0, ROWS_SECONDS + 10)):
            append_line(spool / f"eyas-run-{number}/steps.jsonl", {})
            (spool / f"piece-run-1-{number}.safetensors").write_bytes(b"rows")
            for path in (spool / f"eyas-run-{number}", spool / f"piece-run-1-{number}.safetensors"):
                os.utime(path, (time.time() - age,) * 2)
        with server(None, tiny_llama, tmp_path / "other", capture=spool, url=running.url):
            left = sorted(path.name for path in spool.iterdir())
    assert left == [".lock", "eyas-run-0", "piece-run-1-0.safetensors", "server-1.json"]


def test_a_spool_that_rows_cannot_be_taken_out_of_is_refused(stand_in, tiny_llama, tmp_path, monkeypatch):
    """A server in a container makes it as root; mode=command makes it before."""
    with server(stand_in("ready"), tiny_llama, tmp_path, capture=True) as running:
        monkeypatch.setattr(server_module.os, "access", lambda path, mode: False)
        said = refused(None, tiny_llama, tmp_path / "other", capture=tmp_path / "spool", url=running.url)
    assert f"{tmp_path / 'spool'} cannot be taken out of it: the folder is another user's" in said


@pytest.mark.parametrize(("state", "words"), [("old", "has SGLang 0.4.1"), ("no_sglang", "no usable sglang")])
def test_a_python_without_a_known_sglang_is_refused(stand_in, state, words):
    with pytest.raises(ValueError, match=words):
        installation(engine_config(python=stand_in(state), device="cuda"))
    with pytest.raises(ValueError, match="cannot be run"):
        installation(engine_config(python="/nowhere/python", device="cuda"))


def test_a_server_dies_with_the_process_that_started_it(stand_in, tiny_llama, tmp_path):
    script = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from extract.server import Server
        from tests.targets import engine_config, server_config
        server = Server(Path({tiny_llama.path!r}), engine=engine_config(python={stand_in("ready")!r}, device="cuda"),
                        config=server_config(), out=Path({str(tmp_path)!r}))
        server.__enter__()
        print(server._process.pid, flush=True)
        time.sleep(600)
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    gone, alive = psutil.wait_procs([child], timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


# ---- the command --------------------------------------------------------------------------------


def test_the_command_for_a_gpu_is_sglangs_own_and_asks_for_nothing_it_need_not(tmp_path):
    engine = engine_config(python="py", device="cuda", tensor_parallel=8, extra_args=["--quantization", "w4a16"])
    found = type(installation(engine_config()))("py", "0.5.23", "cuda")
    line = command(
        Path("/models/kimi"), found, engine=engine, host="0.0.0.0", port=30000, capturing=True,
        drafting=Drafting(Path("/drafter"), 3, unquantized=True), trust_remote_code=True,
    )  # fmt: skip
    assert line[:5] == ["py", "-m", "sglang.launch_server", "--model-path", "/models/kimi"]
    text = " ".join(line)
    assert "--tp-size 8" in text and "--disable-radix-cache" in text and "--trust-remote-code" in text
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in text
    assert "--speculative-draft-model-quantization unquant" in text and text.endswith("--quantization w4a16")
    assert "--enforce-disable-flashinfer-allreduce-fusion" in text
    assert "--max-total-tokens" not in text and "--mem-fraction-static" not in text and "intel_amx" not in text


def test_a_drafter_on_a_cpu_is_refused_by_the_versions_that_verify_wrongly_there(tmp_path):
    """0.5.16 answers other tokens with drafts than without them; 0.5.19 does not, and 0.5.16 may capture."""
    def line(version, drafting):
        found = type(installation(engine_config()))("py", version, "cpu")
        return command(
            tmp_path, found, engine=engine_config(), host="h", port=1, capturing=True, drafting=drafting,
            trust_remote_code=False,
        )  # fmt: skip

    drafting = Drafting(Path("/drafter"), 3)
    with pytest.raises(ValueError, match="SGLang 0.5.18 does not verify drafts rightly on a CPU: use 0.5.19 or newer"):
        line("0.5.18", drafting)
    assert "EAGLE3" in line("0.5.19", drafting) and line("0.5.16", None)


def test_the_plugin_needs_nothing_of_eyas_but_its_folder(tmp_path):
    """A Python without this repository finds the entry point and imports it, from the folder alone."""
    folder = install_plugin(tmp_path / "plugin")
    code = (
        "import importlib.metadata, sys; (found,) = importlib.metadata.entry_points(group='sglang.srt.plugins');"
        "register = found.load(); import extract, extract.feed, extract.cpu.shim;"
        "print(found.name, found.value, extract.__file__, sorted({'data', 'train', 'sglang'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split(maxsplit=2)[:2] == ["eyas", "extract.plugin:register"]
    assert f"{folder}/extract/__init__.py []" in done.stdout


def test_mode_command_prints_what_starts_a_server_by_hand(tiny_llama, tmp_path):
    done = subprocess.run(
        [sys.executable, "extract/main.py", "mode=command", "target=tiny_llama", f"out={tmp_path}"],
        cwd=ROOT, env={**os.environ, "EYAS_MODELS": str(Path(tiny_llama.path).parent)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "EYAS_CAPTURE='{" in done.stdout and '"layer_ids": [1, 2, 4]' in done.stdout
    assert f"--model-path {tiny_llama.path}" in done.stdout and "server.url=" in done.stdout
    assert json.loads((tmp_path / "summary.json").read_text())["command"] in done.stdout
    assert (tmp_path / "spool").is_dir(), "made here, so that what a container's root writes there can be taken out"

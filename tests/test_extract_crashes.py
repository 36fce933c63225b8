"""Killed thirty times at random moments, the same call continues: every conversation is in one record, nothing is left.

Most kills hit a stand-in for the server that speaks its protocol, since a start of the real one takes seconds; the real
one is killed in test_extract_main.py. EYAS_SEED=n repeats what was printed.
"""

from __future__ import annotations

import errno
import functools
import json
import multiprocessing
import os
import random
import re
import signal
import stat
import sys
import time
from pathlib import Path

import numpy as np
import psutil

from data.prompts import Prompt
from data.schema import Provenance
from data.shards import ShardReader
from extract.spool import FORMAT
from launch.verify import verify
from tests.targets import engine_config, server_config

NUM_KILLS, NUM_PROMPTS, SHARD_BYTES = 30, 1200, 16_000
HIDDEN, BOUNDARIES, VOCAB = 8, (1, 2), 1000
KINDS = ("extractor", "scheduler", "server", "full disk")

# Two processes, as SGLang has more: the first answers HTTP, the second writes captured rows; it ends with either.
# States are token + 1000 * column. Standard library only, so that a start takes a tenth of a second.
STAND_IN = '''\
#!{python} -S
import array, http.server, json, os, pathlib, signal, struct, sys, threading, time
if sys.argv[1] == "-c":
    print(json.dumps(["0.5.23", None]))
    sys.exit()
options = dict(zip(sys.argv, sys.argv[1:]))
spool = pathlib.Path(json.loads(os.environ["EYAS_CAPTURE"])["spool"])
layer_ids = json.loads(os.environ["EYAS_CAPTURE"])["layer_ids"]
asked, (told_read, told) = os.pipe(), os.pipe()
scheduler = os.fork()
if scheduler == 0:
    os.close(asked[1])
    number = 0
    for line in os.fdopen(asked[0]):
        rid, tokens = json.loads(line)
        middle = len(tokens) // 2
        for start, part in ((middle, tokens[middle:]), (0, tokens[:middle])):
            if not part:
                continue
            columns = [array.array("f", [t + 1000 * c for t in part for c in cs for _ in range({hidden})]) for cs in ((0, 1), (2,))]
            content = [*(c.tobytes() for c in columns), array.array("i", part).tobytes()]
            header = {{"__metadata__": {{"rank": "0", "segments": json.dumps([[rid, start, len(part)]])}}}}
            at = 0
            for name, dtype, shape, data in zip(("aux", "last", "tokens"), ("F32", "F32", "I32"),
                                                ([len(part), 2, {hidden}], [len(part), {hidden}], [len(part)]), content):
                header[name] = {{"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}}
                at += len(data)
            text = json.dumps(header).encode()
            text += b" " * (-(len(text) + 8) % 64)
            number += 1
            file = spool / f"piece-{{rid.split('-')[1]}}-{{os.getpid()}}-{{number:09d}}.safetensors"
            temporary = spool / f".{{file.name}}.tmp"
            temporary.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(content))
            temporary.rename(file)
        os.write(told, (rid + "\\n").encode())
    os._exit(0)
signal.signal(signal.SIGCHLD, lambda *_: os._exit(1))
done, changed = set(), threading.Condition()
def hear():
    for line in os.fdopen(told_read):
        with changed:
            done.add(line.strip())
            changed.notify_all()
threading.Thread(target=hear, daemon=True).start()
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self, content):
        content = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    def do_GET(self):
        self.answer({{"architectures": ["LlamaForCausalLM"], "model_path": options["--model-path"], "version": "0.5.23"}})
    def do_POST(self):
        said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with changed:
            for rid, tokens in zip(said["rid"], said["input_ids"]):
                os.write(asked[1], (json.dumps([rid, tokens]) + "\\n").encode())
            changed.wait_for(lambda: done.issuperset(said["rid"]))
        self.answer([{{"output_ids": [], "meta_info": {{"finish_reason": {{"type": "length", "length": 0}}}}}} for _ in said["rid"]])
    def log_message(self, *arguments):
        pass
about = {{"layer_ids": layer_ids, "rank": 0, "dtype": "float32", "pid": scheduler, "format": {format}}}
(spool / "server-1.json").write_text(json.dumps(about))
http.server.ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
'''


@functools.cache
def prompts() -> list[Prompt]:
    dice = np.random.default_rng(0)
    return [
        Prompt(
            id=f"talk/{i}", source="toy", split="validation" if i % 9 == 0 else "train",
            tokens=dice.integers(0, VOCAB, length, dtype=np.int32), loss_mask=(np.arange(length) % 2).astype(np.uint8),
        )
        for i, length in enumerate(dice.integers(1, 20, NUM_PROMPTS).tolist())
    ]  # fmt: skip


PROVENANCE = Provenance(
    target="toy", config_hash="c", weights_fingerprint="w", tokenizer_hash="t", chat_template_hash="m",
    boundaries=BOUNDARIES, num_layers=4, hidden_size=HIDDEN, vocab_size=VOCAB, codec="fp32", engine="sglang",
    engine_version="0.5.23",
)  # fmt: skip


def run(target: str, python: str, out: str, log: str, room: int | None) -> None:
    """The extractor, in a process of its own: what extract/main.py does after the probe. room: bytes of the disk."""
    from extract.command import Capturing
    from extract.server import Server
    from extract.sink import extract

    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if room is not None:
        fill_the_disk_after(room)
    capturing = Capturing(Path(out) / "spool", [0, 1])
    try:
        with Server(
            Path(target), engine=engine_config(python=python, device="cuda"), config=server_config(),
            out=Path(out) / "server", capturing=capturing,
        ) as server:  # fmt: skip
            extract(
                prompts(), server=server, out=Path(out), provenance=PROVENANCE, shard_bytes=SHARD_BYTES,
                in_flight_bytes=20_000, retries=3,
            )  # fmt: skip
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    os._exit(0)


def fill_the_disk_after(room: int) -> None:
    """Every write fails with ENOSPC once `room` bytes are written, as on a small disk."""
    left, write = [room], os.write

    def write_if_there_is_room(descriptor, chunk):
        left[0] -= len(chunk)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, chunk)

    os.write = write_if_there_is_room


def ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_thirty_kills_at_random_moments_cost_no_record_and_leave_nothing(tiny_llama, tmp_path):
    seed = int(os.environ.get("EYAS_SEED", random.randrange(10**6)))
    print(f"EYAS_SEED={seed}")
    dice, out, log = random.Random(seed), tmp_path / "shards", tmp_path / "log.txt"
    out.mkdir()
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, hidden=HIDDEN, format=FORMAT))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.test_extract_crashes", "extract.sink", "extract.server"])
    kills = [KINDS[i % len(KINDS)] for i in range(NUM_KILLS)]
    dice.shuffle(kills)
    seen, said = [], []
    for kind in kills:
        room = dice.randrange(0, 60_000) if kind == "full disk" else None
        extractor = processes.Process(target=run, args=(tiny_llama.path, str(python), str(out), str(log), room))
        (out / "spool/server-1.json").unlink(missing_ok=True)  # of the server before: its absence tells when this one is up
        log.write_text("")
        extractor.start()
        me = psutil.Process(extractor.pid)
        wait_until = time.monotonic() + 30
        while not (out / "spool/server-1.json").exists() and extractor.is_alive() and time.monotonic() < wait_until:
            time.sleep(0.002)
        server = me.children() if extractor.is_alive() else []
        family = [me, *server, *(child for process in server for child in process.children())]
        if kind != "full disk":
            time.sleep(dice.random() * 0.35)
            victim = {"extractor": me, "server": family[1], "scheduler": family[2]}[kind]
            try:
                victim.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                pass
        extractor.join(30)
        said.append((kind, extractor.exitcode, log.read_text().strip().splitlines()[-1:]))
        deadline = time.monotonic() + 5
        while not all(ended(process) for process in family) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert all(ended(process) for process in family), f"{kind}: a process of the server outlives it"
        assert extractor.exitcode == (-signal.SIGKILL if kind == "extractor" else 2), said[-1]
        if (out / "manifest.json").exists():
            seen.append(len(json.loads((out / "manifest.json").read_text())["shards"]))
    assert seen == sorted(seen) and seen[-1] > seen[0], "finished shards stay, and more come"
    for kind, words in {"scheduler": "server ended while", "server": "server ended while", "full disk": "No space left"}.items():
        assert any(kind == name and lines and re.search(words, lines[0]) for name, _, lines in said), (kind, said)

    extractor = processes.Process(target=run, args=(tiny_llama.path, str(python), str(out), str(log), None))
    extractor.start()
    extractor.join(120)
    assert extractor.exitcode == 0, log.read_text()
    found = verify(out)
    assert len(json.loads((out / "manifest.json").read_text())["shards"]) > seen[-1], "there was something left to kill"
    assert found.problems == {} and found.complete and found.records == NUM_PROMPTS
    by_id = {record.id: record for split in ("train", "validation") for record in ShardReader(out, split=split)}
    assert len(by_id) == NUM_PROMPTS
    for prompt in prompts():
        record = by_id[prompt.id]
        assert record.tokens.tolist() == prompt.tokens.tolist() and record.loss_mask.tolist() == prompt.loss_mask.tolist()
        assert record.aux[:, :, 3].tolist() == [[t, t + 1000] for t in prompt.tokens.tolist()]
        assert record.last[:, 0].tolist() == [t + 2000 for t in prompt.tokens.tolist()]
    assert [path.name for path in out.rglob("*") if ".tmp" in path.name] == []
    assert [path for path in (out / "spool").iterdir() if path.is_dir() or path.name.startswith("piece-")] == []

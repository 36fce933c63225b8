"""One extraction: what it is of, what is left of it to do, and doing it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data.boundaries import architecture_of, engine_layer_ids, logits_cap, text_config
from data.codecs import Codec, TeacherHead
from data.config import fingerprint, finished
from data.manifest import FILE, Manifest, finished_ids, parse_part, remove_shards
from data.prompts import PromptSet
from data.schema import Provenance, check_same
from data.shards import ShardReader, ShardWriter
from data.storage import Uploader
from data.vocab import check_tokenizer
from extract.agreement import measure
from extract.capture import head_weight, teacher_head
from extract.command import Capturing, installation
from extract.config import ExtractConfig
from extract.preflight import Plan, choose_spool
from extract.probe import load_reference, probe_server
from extract.server import Server, version_at
from extract.sink import ended_first, extract


@dataclass(frozen=True)
class Extraction:
    """What is captured: of which target, at which boundaries, by which engine."""

    config: ExtractConfig
    target: Path
    version: str  # of the engine
    capturing: Capturing
    provenance: Provenance

    @property
    def out(self) -> Path:
        """Of the dataset."""
        return Path(self.config.out)

    @classmethod
    def of(cls, config: ExtractConfig, target: Path) -> Extraction:
        """Raises ValueError if there is no engine that Eyas knows, or it cannot be asked for these boundaries."""
        version = version_at(config.server.url) if config.server.url else installation(config.engine).version
        layer_ids = engine_layer_ids(
            config.target.boundaries,
            architecture=architecture_of(target),
            engine=config.engine.name,
            engine_version=version,
            num_layers=text_config(target)["num_hidden_layers"],
        )
        provenance = Provenance.of_target(
            target,
            name=config.target.name,
            boundaries=config.target.boundaries,
            codec=config.codec,
            engine=config.engine.name,
            engine_version=version,
        )
        out = Path(config.out)
        spool = Path(config.server.spool or out / "spool")
        if config.mode != "command" and not config.server.url:  # else it is the folder that the server was told
            spool = choose_spool(config.server.spool, out=out, in_flight_bytes=config.in_flight_bytes)
        return cls(config, target, version, Capturing(spool, layer_ids), provenance)

    def run(self, prompts: Path, *, start: Callable[[], Server]) -> dict[str, Any]:
        """Captures what of `prompts` (a folder) is not in the dataset; `start` gives a server that is starting, if one
        is needed.

        Raises ValueError if the disk cannot hold it, the wiring is wrong, or the server ends.
        """
        config, out, wanted = self.config, self.out, self._wanted(prompts)
        files = [prompts / f"prompts.{end}" for end in ("jsonl", "safetensors")]
        inputs = fingerprint(asdict(self.provenance), config.part, *files)
        uploader = Uploader(out, config.upload, keep_local=config.keep_local) if config.upload else None
        changed = shards_of_changed(out, wanted)
        if not changed and (done := finished(out, inputs)) and finished_ids(out) >= set(wanted.ids):
            if uploader:
                uploader.close()
            return {**done, "line": f"nothing to do, {out} holds all {len(wanted)} records"}

        if config.plan:  # changes nothing: a run may be at work there
            if (out / FILE).exists() and (there := Manifest.load(out)).shards:
                check_same(there.provenance, self.provenance, where=str(out))
            plan = self._said_plan(wanted, without=changed)
            return {"plan": True, **asdict(replace(plan, out=str(out))), "line": plan.line}
        self._prepare(prompts, without=changed)
        self._said_plan(wanted).require_room()
        captured = self._capture(wanted, start=start, uploader=uploader)
        return {
            "fingerprint": inputs,
            "target": config.target.name,
            "records": len(wanted),
            "tokens": len(wanted.tokens),
            "boundaries": config.target.boundaries,
            "engine_ids": self.capturing.layer_ids,
            "engine": f"{config.engine.name} {self.version}",
            **captured,
            **self._agreement(),
            "line": f"{len(wanted)} records, {len(wanted.tokens)} tokens at boundaries {config.target.boundaries} in {out}",
        }

    def _wanted(self, prompts: Path) -> PromptSet:
        """Those of this part. Raises ValueError if another tokenizer made them, or there are none."""
        everything, part = PromptSet.load(prompts), self.config.part
        check_tokenizer(prompts, self.target)
        wanted = everything if part is None else everything.part(*parse_part(part))
        if len(wanted) == 0:
            raise ValueError(f"part={part} of the {len(everything)} prompts in {prompts} is empty: use fewer parts")
        return wanted

    def _prepare(self, prompts: Path, *, without: set[str]) -> None:
        """The dataset's folder, ready to be written. Raises ValueError if it holds other data, or another process writes to it."""
        config, out = self.config, self.out
        ShardWriter(
            out, provenance=self.provenance, split="train", shard_bytes=config.shard_bytes, part=config.part
        ).close()
        shutil.copy(prompts / "vocabulary.safetensors", out / "vocabulary.safetensors")
        if without:
            print(f"prompts have changed: {', '.join(sorted(without))} are taken out and captured again", file=sys.stderr)
            remove_shards(out, without)

    def _said_plan(self, wanted: PromptSet, *, without: set[str] = frozenset()) -> Plan:
        """What is to be done, shown. without: names of shards that will be taken out"""
        out, done = self.out, finished_ids(self.out)
        if without:
            done -= {entry.id for split in ("train", "validation") for shard in ShardReader(out, split=split).shards
                     if shard.info.name in without for entry in shard.entries}  # fmt: skip
        missing = [prompt for prompt in wanted if prompt.id not in done]
        plan = Plan.of(
            missing, self.provenance, out=out, done=len(wanted) - len(missing), shard_bytes=self.config.shard_bytes,
            keep_local=self.config.keep_local or not self.config.upload,
        )  # fmt: skip
        print(plan.line, flush=True)
        return plan

    def _capture(self, wanted: PromptSet, *, start: Callable[[], Server], uploader: Uploader | None) -> dict[str, Any]:
        """Has the server's wiring proved, and what is missing written; the figures of both."""
        config = self.config
        server = start()  # its processes load beside the reference
        reference = load_reference(self.target, config.probe, trust_remote_code=config.target.trust_remote_code)
        report = probe_server(server, boundaries=config.target.boundaries, reference=reference, config=config.probe)
        del reference  # its memory, during a long extraction
        with uploader or nullcontext(), ended_first(server):
            extracted = extract(
                wanted,
                server=server,
                out=self.out,
                provenance=self.provenance,
                shard_bytes=config.shard_bytes,
                in_flight_bytes=config.in_flight_bytes,
                retries=config.retries,
                part=config.part,
                head=self._head(),
                uploader=uploader,
            )
            server.stop()  # its cores are wanted, also while the last shard is sent
        return {
            "probe_passed": report.passed,
            "records_now": extracted.records,
            "records_earlier": extracted.earlier,
        }

    def _head(self) -> TeacherHead | None:
        """The target's head, where the codec stores the tokens that it finds most likely."""
        if Codec.parse(self.config.codec).last != "topk":
            return None
        try:
            return teacher_head(self.target, device=self.config.head_device)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"the GPU has no room for the target's head beside its server ({error}): lower engine.mem_fraction, or "
                f"set head_device=cpu, which is slow for a large vocabulary"
            ) from error

    def _agreement(self) -> dict[str, float]:
        """Of the supervised tokens with the target's own choice; warns if the answers are not its own."""
        if not self.config.keep_local:
            return {}  # the shards are elsewhere
        found = measure(self.out, head_weight(self.target), cap=logits_cap(text_config(self.target)))
        if found is None:
            return {}
        if found.warning:
            print(found.warning, file=sys.stderr)
        return {"supervised_is_argmax": found.share, "expected_of_own_words": found.expected}


def shards_of_changed(out: Path, wanted: PromptSet) -> set[str]:
    """Names of finished shards that hold a prompt under its id with other tokens or another mask.

    Lengths are compared from the indexes, contents where the shard is on this disk.
    """
    if not (out / FILE).exists():
        return set()
    number, changed = {id: i for i, id in enumerate(wanted.ids)}, set()
    splits = {shard.split for shard in Manifest.load(out).shards}
    for shard in (shard for split in splits for shard in ShardReader(out, split=split).shards):
        here = (out / shard.info.name).exists()
        for i, entry in enumerate(shard.entries):
            if entry.id not in number:
                continue
            prompt = wanted[number[entry.id]]
            same = (entry.num_tokens, entry.num_supervised) == (len(prompt.tokens), int(prompt.loss_mask.sum()))
            if same and here:
                record = shard.read(i)
                same = torch.equal(record.tokens, torch.from_numpy(prompt.tokens)) and torch.equal(
                    record.loss_mask, torch.from_numpy(prompt.loss_mask)
                )
            if not same or shard.info.split != prompt.split:
                changed.add(shard.info.name)
                break
    return changed

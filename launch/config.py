"""What the launchers are told: types, units and checks. The defaults stand in conf/{bench,serve,quickstart}.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from data.config import TargetConfig, require
from extract.config import EngineConfig, ProbeConfig, ServerConfig


@dataclass
class BenchConfig:
    """One drafter on a live server, against the same server without it. YAML: conf/bench.yaml.

    drafter         folder that train/export.py wrote
    prompts         what data/main.py wrote (its validation split is used), or a conversation file
    out             folder for the summary and the servers' logs
    max_new_tokens  longest answer; null: as long as the answer that the prompt came with
    limit           use only the first so many questions; null: all
    concurrency     requests in flight
    num_drafts      drafts a step; null: as many depths as the drafter was trained for
    baseline        also run without drafting, and compare the outputs token by token
    """

    target: TargetConfig
    drafter: str
    prompts: str
    out: str
    max_new_tokens: int | None
    limit: int | None
    concurrency: int
    num_drafts: int | None
    baseline: bool
    engine: EngineConfig
    server: ServerConfig

    def __post_init__(self) -> None:
        require(self.max_new_tokens is None or self.max_new_tokens >= 2, "max_new_tokens", self.max_new_tokens,
                "null, or at least 2 (the first token needs no draft)")  # fmt: skip
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "null or at least 1")
        require(self.concurrency >= 1, "concurrency", self.concurrency, "at least 1")
        _check_serving(self.num_drafts, self.server)


@dataclass
class ServeConfig:
    """A target with its drafter, in the foreground. YAML: conf/serve.yaml.

    drafter     folder that train/export.py wrote
    out         folder for the summary and the server's log
    num_drafts  drafts a step; null: as many depths as the drafter was trained for
    shards      that the drafter learnt from: the wiring is compared with them where the Hugging Face reference
                does not fit in memory; null: there are none
    """

    target: TargetConfig
    drafter: str
    shards: str | None
    out: str
    num_drafts: int | None
    probe: ProbeConfig
    engine: EngineConfig
    server: ServerConfig

    def __post_init__(self) -> None:
        _check_serving(self.num_drafts, self.server)


@dataclass
class StageOptions:
    """More options for a stage of the quickstart, as on its own command line: ["epochs=2"]."""

    data: list[str]
    extract: list[str]
    train: list[str]
    evaluate: list[str]
    bench: list[str]


@dataclass
class QuickstartConfig:
    """The whole way once, on one machine. YAML: conf/quickstart.yaml.

    conversations        file, one JSON object a line
    out                  folder for what all stages write
    experiment           of conf/experiment/, for train/main.py
    validation_fraction  0 .. 1, of the conversations: what tau is measured on
    """

    target: TargetConfig
    conversations: str
    out: str
    experiment: str
    validation_fraction: float
    options: StageOptions


def _check_serving(num_drafts: int | None, server: ServerConfig) -> None:
    require(num_drafts is None or num_drafts >= 1, "num_drafts", num_drafts, "null or at least 1")
    cure = "null: the drafter is given to a server at its start; engine.python= chooses the environment to start it in"
    require(server.url is None, "server.url", server.url, cure)

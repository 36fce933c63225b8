"""Configuration of stage 2. YAML: conf/extract.yaml, conf/engine/, conf/server/."""

from __future__ import annotations

from dataclasses import dataclass

from data.codecs import Codec
from data.config import TargetConfig, require
from data.manifest import parse_part

MODES = ("extract", "generate", "generate_and_extract", "command")


@dataclass
class EngineConfig:
    """The inference engine that computes the states and later serves the drafter.

    name                 sglang
    python               the Python that has it; null: this one. It needs nothing of Eyas.
    device               auto | cpu | cuda; auto: cuda where PyTorch sees a GPU
    dtype                of weights and states; auto: float32 on a CPU, the checkpoint's elsewhere
    tensor_parallel      GPUs (or, on a CPU, processes) that one copy of the target is split over
    data_parallel        copies of the target, each with its own GPUs
    dp_attention         the copies share GPUs and experts, and only attention is done in each by itself (DeepSeek, Kimi)
    radix_cache          keep it while states are captured, for other traffic; requests of ours never hit it
    overlap_schedule     prepare a batch while the one before it runs; null: the engine's choice (on a CPU false)
    context_length       longest request, tokens; null: the target's own
    max_total_tokens     KV cache, tokens; null: what the memory allows (on a CPU 16384)
    max_running_requests at once; null: the engine's choice (on a CPU 16)
    mem_fraction         of the memory, for weights and KV cache; null: the engine's choice
    extra_args           further options of `python -m sglang.launch_server`, as they are
    """

    name: str
    python: str | None
    device: str
    dtype: str
    tensor_parallel: int
    data_parallel: int
    dp_attention: bool
    radix_cache: bool
    overlap_schedule: bool | None
    context_length: int | None
    max_total_tokens: int | None
    max_running_requests: int | None
    mem_fraction: float | None
    extra_args: list[str]

    def __post_init__(self) -> None:
        require(self.name == "sglang", "engine.name", self.name, "sglang")
        require(self.device in ("auto", "cpu", "cuda"), "engine.device", self.device, "auto, cpu or cuda")
        require(self.tensor_parallel >= 1, "engine.tensor_parallel", self.tensor_parallel, "at least 1")
        require(self.data_parallel >= 1, "engine.data_parallel", self.data_parallel, "at least 1")
        shared = not self.dp_attention or self.tensor_parallel % self.data_parallel == 0 and self.data_parallel > 1
        expected = f"false, or engine.tensor_parallel a multiple of engine.data_parallel={self.data_parallel} above 1"
        require(shared, "engine.dp_attention", self.dp_attention, expected)
        fraction = self.mem_fraction
        require(fraction is None or 0 < fraction < 1, "engine.mem_fraction", fraction, "null or a share below 1")


@dataclass
class ServerConfig:
    """Where the engine's server is, or is to be.

    url                    of a running one to attach to, like http://host:30000; null: start one
    host, port             to start one at; port 0: any free one
    ready_timeout_seconds  from start to the first answer
    silence_seconds        without a word in the log, or of a ready server without an answer, until that is told
    hang_seconds           likewise, until the server is ended
    answer_timeout_seconds longest wait for one answer
    spool                  folder for captured rows on their way, on both sides the same; null: on tmpfs where there is
                           room for in_flight_bytes, else <out>/spool
    """

    url: str | None
    host: str
    port: int
    ready_timeout_seconds: float
    silence_seconds: float
    hang_seconds: float
    answer_timeout_seconds: float
    spool: str | None

    def __post_init__(self) -> None:
        require(0 <= self.port < 65536, "server.port", self.port, "0 (any free one) .. 65535")
        known = self.url is None or self.url.startswith(("http://", "https://"))
        require(known, "server.url", self.url, "null or http://host:port")
        require(self.ready_timeout_seconds > 0, "server.ready_timeout_seconds", self.ready_timeout_seconds, "above 0")
        require(self.silence_seconds > 0, "server.silence_seconds", self.silence_seconds, "above 0")
        above = self.hang_seconds >= self.silence_seconds
        require(above, "server.hang_seconds", self.hang_seconds, f"at least server.silence_seconds={self.silence_seconds}")
        answer = self.answer_timeout_seconds
        require(answer > 0, "server.answer_timeout_seconds", answer, "above 0")


@dataclass
class ProbeConfig:
    """The wiring probe, before the first shard.

    reference  auto: Hugging Face on the CPU in float32 where the target fits in memory | off
    tolerance  largest relative error of a sequence; null: 1e-3 for float32 states, 5e-2 for 16-bit ones
    """

    reference: str
    tolerance: float | None

    def __post_init__(self) -> None:
        require(self.reference in ("auto", "off"), "probe.reference", self.reference, "auto or off")
        require(self.tolerance is None or self.tolerance > 0, "probe.tolerance", self.tolerance, "null or above 0")


@dataclass
class SamplingConfig:
    """How mode=generate lets the target answer.

    temperature     0: greedy          top_p  0 .. 1
    max_new_tokens  of one answer      seed   of each answer's own generator; null: the engine's. SGLang minds it only
                                              with engine.extra_args=[--enable-deterministic-inference]
    max_requests    in flight
    """

    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int | None
    max_requests: int

    def __post_init__(self) -> None:
        require(self.temperature >= 0, "sampling.temperature", self.temperature, "at least 0")
        require(0 < self.top_p <= 1, "sampling.top_p", self.top_p, "0 < top_p <= 1")
        require(self.max_new_tokens >= 1, "sampling.max_new_tokens", self.max_new_tokens, "at least 1")
        require(self.max_requests >= 1, "sampling.max_requests", self.max_requests, "at least 1")


@dataclass
class ExtractConfig:
    """Stage 2: tokenized prompts to shards of hidden states. YAML: conf/extract.yaml.

    mode             extract | generate (the target answers conversations) | generate_and_extract (both, with one start of
                     the server) | command (print how to start a server)
    prompts          extract: what data/main.py wrote
    conversations    generate, generate_and_extract: a conversation file, one JSON object a line
    out              folder to write
    plan             print what there is to capture, and stop before a server is started
    part             i/n, i = 0 .. n-1: only that of n disjoint parts of the prompts; null: all
    codec            of the states on disk, see data/codecs.py: bf16 | fp32 | fp8 | fp8+bf16 | fp8+topk64
    shard_bytes      a shard is finished once it is this large
    in_flight_bytes  of states asked for and not yet in a shard; bounds memory and the spool
    retries          of a conversation whose request failed
    head_device      auto | cpu | cuda: where codec topk asks the target's head; auto: cuda where PyTorch sees a GPU
    upload           s3://bucket/path or a folder: finished shards are sent there; null: they stay in `out`
    keep_local       also keep them in `out`; else the disk holds two shards at a time
    """

    mode: str
    target: TargetConfig
    prompts: str | None
    conversations: str | None
    out: str
    plan: bool
    part: str | None
    codec: str
    shard_bytes: int
    in_flight_bytes: int
    retries: int
    head_device: str
    upload: str | None
    keep_local: bool
    probe: ProbeConfig
    sampling: SamplingConfig
    engine: EngineConfig
    server: ServerConfig

    def __post_init__(self) -> None:
        require(self.mode in MODES, "mode", self.mode, f"one of {', '.join(MODES)}")
        Codec.parse(self.codec)
        require(self.shard_bytes >= 1, "shard_bytes", self.shard_bytes, "at least 1")
        require(self.in_flight_bytes >= 1, "in_flight_bytes", self.in_flight_bytes, "at least 1")
        require(self.retries >= 0, "retries", self.retries, "at least 0")
        require(self.head_device in ("auto", "cpu", "cuda"), "head_device", self.head_device, "auto, cpu or cuda")
        if self.part is not None:
            parse_part(self.part)
        given = self.conversations if self.mode.startswith("generate") else self.prompts
        option = "conversations=FILE" if self.mode.startswith("generate") else "prompts=DIR (from data/main.py)"
        if given is None and self.mode != "command":
            raise ValueError(f"mode={self.mode} needs {option}: give it on the command line, see --help")

"""The plan of a run against what is true: PyTorch's own counts, a GPU's own memory, tensors that exist."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cases import KIMI, LLAMA_8B
from data.config import typed
from data.shards import ShardReader
from tests.datasets import write_dataset
from tests.packs import pack_of, small_drafter, small_shape, small_target
from train import attention, loss, optim, plan
from train.attention import Documents
from train.briefing import briefing
from train.config import OptimConfig, TrainConfig
from train.plan import GIB, Engine
from train.progress import Meter, described
from train.shape import DrafterShape
from train.target import Target
from train.unroll import TrainingTimeTest, counted_rows

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("changes", [{}, {"fc_norm": True}, {"norm_before_fc": True}, {"num_key_value_heads": 4}])
def test_parameters_are_counted_as_the_drafter_has_them(changes):
    drafter = small_drafter(small_target(), **changes)
    counts = plan.num_parameters(drafter.shape)
    assert sum(counts.values()) == sum(p.numel() for p in drafter.parameters())
    assert counts["head"] == drafter.lm_head.weight.numel()
    assert counts["norms"] == sum(p.numel() for p in drafter.parameters() if p.dim() == 1)


def test_operations_are_those_that_pytorch_counts():
    """One depth, every row asks. PyTorch sees the tokens' half of q, k, v without a gradient of its input: a
    rearrangement of ours, which the definition does not have. Scores are by hand: causal, 2 products and 5 back."""
    target = small_target()
    drafter = small_drafter(target)
    module = TrainingTimeTest(
        drafter, target, depths=1, gamma=0.8, attention=attention.dense, head=loss.PLAIN, dtype=torch.float64
    )
    lengths = (7, 5)
    batch = pack_of([(list(range(3, 3 + n)), [1] * n) for n in lengths])
    counted = counted_rows(batch, depths=1)
    documents = Documents.of(batch, counted=torch.ones(12, dtype=torch.bool))
    with FlopCounterMode(display=False) as counter:
        module(batch, documents, counted, counted.sum(1))[0].backward()
    shape = drafter.shape
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    saved = 12 * 2 * shape.hidden_size * (4 + 2 * 2) * 8  # 4 heads of queries, 2 of keys and of values, 8 wide
    scores = 7 * (7 * 7 + 5 * 5) * 32  # 7 n^2 D in place of 14: causal
    assert plan.flops_per_step(shape, lengths, depths=1) == products + saved + scores


def test_rows_that_do_not_ask_give_a_key_and_a_value_and_no_more():
    """By hand, from one document of 10 rows of which 4 ask: 2 (4 * 10 - 6) = 64 pairs counted twice."""
    shape = small_shape()
    assert plan.pairs_seen(10, 4) == sum(2 * (10 - 4 + i) + 2 for i in range(4)) - 4
    whole = plan.flops_per_step(shape, [10], depths=3)
    some = plan.flops_per_step(shape, [10], depths=3, asking=[4])
    none = plan.flops_per_step(shape, [10], depths=3, asking=[0])
    assert plan.flops_per_step(shape, [10], depths=3, asking=[10]) == whole > some > none
    hidden, kv_width = 16, 16
    assert none == 10 * (4 * 3 * hidden * hidden + 6 * 2 * hidden * 2 * kv_width)


def test_the_benchmarks_step_has_the_operations_that_the_log_says():
    """docs/LOG.md: 8B, 4 x 2048: 246.6 ms at 578 TFLOP/s; Kimi-like, 2 x 4096: 529.9 ms at 594."""
    assert plan.flops_per_step(LLAMA_8B, [2048] * 4, depths=7) == pytest.approx(0.2466 * 578e12, rel=2e-3)
    assert plan.flops_per_step(KIMI, [4096] * 2, depths=7) == pytest.approx(0.5299 * 594e12, rel=2e-3)


# docs/LOG.md, one H200, benchmarks/memory.py: GiB at the peak, each case in a process of its own
MEASURED = [
    (LLAMA_8B, 8192, 7, 18.3),
    (LLAMA_8B, 8192, 3, 13.5),
    (KIMI, 8192, 7, 32.2),
    (KIMI, 8192, 3, 25.2),
    (KIMI, 32768, 7, 72.8),
]


@pytest.mark.parametrize(("shape", "tokens", "depths", "gib"), MEASURED)
def test_memory_is_estimated_a_little_high_and_never_low(shape: DrafterShape, tokens: int, depths: int, gib: float):
    estimate = sum(plan.memory(shape, tokens=tokens, depths=depths).values()) / GIB
    assert gib <= estimate <= 1.15 * gib


def test_each_engine_keeps_what_it_says():
    """By hand for 8 devices, P float32 numbers: DDP 4P of masters, 4P of gradients, 8P of AdamW; ZeRO-1 cuts AdamW's
    and adds a flat eighth of the masters, ZeRO-2 cuts the gradients too."""
    count = sum(plan.num_parameters(KIMI).values())
    found = {zero: plan.memory(KIMI, tokens=8192, depths=7, engine=Engine(8, zero)) for zero in range(4)}
    assert [found[zero]["gradients"] / count for zero in range(4)] == pytest.approx([4, 4, 0.5, 0.5], rel=1e-6)
    assert [found[zero]["adamw's state"] / count for zero in range(4)] == pytest.approx([8, 1, 1, 1], rel=1e-6)
    assert [found[zero]["masters, float32"] / count for zero in range(3)] == pytest.approx([4, 4.5, 4.5], rel=1e-6)
    totals = [sum(parts.values()) for parts in found.values()]
    assert totals[0] > totals[1] > totals[2]


def test_what_is_computed_again_need_not_be_kept():
    kept = {how: plan.memory(KIMI, tokens=32768, depths=7, checkpointing=how) for how in ("none", "mlp", "layer")}
    totals = {how: sum(parts.values()) for how, parts in kept.items()}
    assert totals["none"] > totals["mlp"] > totals["layer"]
    assert "MLP, 7 depths" not in kept["mlp"]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_checkpoint_takes_what_its_tensors_take(name):
    """Of a drafter that exists, after a step of its optimizers; a step's counter per parameter is left out."""
    target = small_target(dtype=torch.float32)
    drafter = small_drafter(target)
    optimizers = optim.build(drafter, OptimConfig(name, 1e-3, [0.9, 0.95], 0.0, 0.0, 0.0, 1.0, None))
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    weights = sum(t.numel() * t.element_size() for t in drafter.state_dict().values())
    states = sum(
        t.numel() * t.element_size() for o in optimizers for s in o.state.values() for t in s.values() if t.dim()
    )
    assert plan.optimizer_bytes(drafter.shape, optimizer=name) == states
    assert plan.checkpoint_bytes(drafter.shape, optimizer=name, ema=False) == weights + states
    assert plan.checkpoint_bytes(drafter.shape, optimizer=name, ema=True) == 2 * weights + states


def test_communication_is_that_of_rings():
    """By hand, 8 devices, P numbers of 4 bytes: DDP 2 x 7/8 x 4P; in bf16 half of it; ZeRO-3 a round more."""
    count = sum(plan.num_parameters(KIMI).values())
    sent = {zero: plan.communication_bytes(KIMI, Engine(8, zero)) for zero in range(4)}
    assert [sent[zero] / count for zero in range(4)] == pytest.approx([7, 7, 7, 10.5], rel=1e-6)
    assert plan.communication_bytes(KIMI, Engine(8), gradient_bytes=2) / count == pytest.approx(3.5, rel=1e-6)
    assert plan.communication_bytes(KIMI, Engine(1)) == 0


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.1),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA L40", None),
        ("CPU", None),
    ],
)
def test_a_device_is_known_by_its_whole_name(device: str, peak: float | None):
    assert plan.peak_tflops(device) == peak


def test_mfu_is_the_models_operations_over_the_devices():
    """The benchmark's 8B step: 246.6 ms on one H200 are 578 of 989.4 TFLOP/s, 58.4 %; on two, half of it."""
    for devices in (1, 2):
        meter = Meter(LLAMA_8B, depths=7, device_name="NVIDIA H200", devices=devices, peak_tflops=None)
        pairs = 4 * plan.pairs_seen(2048, 2048)
        assert meter.mfu(tokens=8192, rows=8192, pairs=pairs, seconds=0.2466) == pytest.approx(0.584 / devices, rel=3e-3)
    meter = Meter(LLAMA_8B, depths=7, device_name="CPU", devices=1, peak_tflops=None)
    assert meter.mfu(tokens=1, rows=1, pairs=1, seconds=1.0) is None
    meter = Meter(LLAMA_8B, depths=7, device_name="CPU", devices=1, peak_tflops=1e-12)
    assert meter.mfu(tokens=1, rows=0, pairs=0, seconds=1.0) == plan.flops(LLAMA_8B, tokens=1, rows=0, pairs=0, depths=7)


def test_the_bar_says_what_is_known_and_nothing_else():
    figures = {"epoch": 1.114, "loss": 3.2141, "tau": 2.314, "tokens_per_second": 43564.0, "mfu": 0.5243, "data_wait_share": 0.003}
    assert described(figures) == "epoch 1.11 | loss 3.214 | tau 2.31 | 43.6k tok/s | MFU 52 % | data wait 0.3 %"
    assert described({"loss": 3.0, "tokens_per_second": 812.0}) == "loss 3.000 | 812 tok/s"
    assert described({}) == ""


def test_the_block_at_the_start_says_what_will_happen(tmp_path, tiny_llama):
    """Six conversations, three a step: two steps an epoch, four in two."""
    shards = write_dataset(tmp_path / "shards", Path(tiny_llama.path), name="tiny_llama", train=6, validation=2)
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        told = ["target=tiny_llama", f"shards={shards}", f"out={tmp_path}/run", "epochs=2", "batch.conversations_per_step=3",
                "batch.tokens_per_pack=48", "drafter.draft_vocab_size=256", "optim=adamw"]  # fmt: skip
        config = typed(TrainConfig, compose("train", told))
    target = Target.load(tiny_llama.path, device="cpu", dtype=torch.float32)
    shape = DrafterShape.resolve(config.drafter, target.config, num_boundaries=3)
    reader = ShardReader(shards, split="train")
    device = torch.device("cpu")
    text = briefing(config, shape, reader, held_out=2, device=device, num_processes=2)
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert "4 in 2 epochs, 3 conversations each" in lines["steps"]
    assert f"6 conversations, {int(reader.lengths.sum())} tokens" in lines["data"]
    assert "2 more for validation" in lines["data"]
    none = briefing(config, shape, reader, held_out=0, device=device, num_processes=1)
    assert "NONE FOR VALIDATION: no tau is measured" in none
    assert "2 x CPU, DDP" in lines["devices"] and "sent and received a step" in lines["devices"]
    assert "256 of 512 tokens" in lines["drafter"]
    assert "each, at most" in lines["checkpoints"] and "memory" not in lines, "a CPU run has no estimate"

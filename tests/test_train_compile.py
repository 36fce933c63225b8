"""torch.compile around the step: no graph breaks, and no compilation once a few steps have shown the shapes."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.packs import pack_of, small_drafter, small_target
from train.attention import Documents, dense
from train.loss import PLAIN
from train.unroll import TrainingTimeTest, counted_rows

DEPTHS = 4


def step(model: TrainingTimeTest, *, prompt: int, seed: int, bucket: int = 8) -> float:
    """One pack of 64 tokens, padding included; `prompt` tokens of each document are not the assistant's."""
    documents = [(list(range(seed, seed + 20)), [0] * prompt + [1] * (20 - prompt)) for _ in range(3)]
    batch = pack_of([*documents, ([0] * 4, [0] * 4)], seed=seed)
    counted = counted_rows(batch, depths=DEPTHS)
    loss, _ = model(batch, Documents.of(batch, counted=counted[0], bucket=bucket), counted, counted.sum(1))
    loss.backward()
    return loss.item()


def new_model() -> TrainingTimeTest:
    target = small_target()
    drafter = small_drafter(target, fc_norm=True, norm_output=True)
    return TrainingTimeTest(
        drafter, target, depths=DEPTHS, gamma=0.8, attention=dense, head=PLAIN, dtype=torch.float64
    )


def test_nothing_is_compiled_after_the_first_steps():
    """The share of prompts changes from pack to pack, and with it the number of active rows."""
    torch._dynamo.reset()
    counter = CompileCounter()
    model = new_model()
    model.drafter.compile(backend=counter)
    for seed, prompt in enumerate((3, 9, 15)):
        step(model, prompt=prompt, seed=seed)
    warm = counter.frame_count
    for seed, prompt in enumerate((1, 5, 7, 12, 17, 18, 2)):
        step(model, prompt=prompt, seed=seed)
    assert counter.frame_count == warm
    torch._dynamo.reset()


@pytest.mark.parametrize(("matrices", "float8"), [(False, False), (True, False), (True, True)])
def test_the_compiled_step_has_the_loss_of_the_plain_one(matrices, float8):
    torch._dynamo.reset()
    plain, compiled = new_model(), new_model()
    for model in (plain, compiled):
        model.float8 = float8
    compiled.drafter.compile(backend="aot_eager", matrices=matrices)
    assert abs(step(plain, prompt=5, seed=1) - step(compiled, prompt=5, seed=1)) < 1e-9
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    torch._dynamo.reset()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("what", ["mlp", "layer"])
def test_computing_activations_again_changes_no_gradient(what, float8, compiled):
    torch._dynamo.reset()
    plain, again = new_model(), new_model()
    again.drafter.activation_checkpointing = what
    for model in (plain, again):
        model.float8 = float8
        if compiled:
            model.drafter.compile(backend="aot_eager")
    assert abs(step(plain, prompt=5, seed=1) - step(again, prompt=5, seed=1)) < 1e-9
    for a, b in zip(plain.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    torch._dynamo.reset()


def test_what_is_computed_again_is_not_kept():
    """Bytes that the backward pass holds on to, of one document of 64 tokens."""

    def kept(what: str) -> int:
        model = new_model()
        model.drafter.activation_checkpointing = what
        batch = pack_of([(list(range(64)), [1] * 64)], seed=0)
        counted = counted_rows(batch, depths=DEPTHS)
        seen = {}

        def pack(tensor):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss, _ = model(batch, Documents.of(batch, counted=counted[0]), counted, counted.sum(1))
        return sum(seen.values())

    assert kept("layer") < kept("mlp") < kept("none")

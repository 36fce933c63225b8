"""Every Triton kernel compiles for Hopper and for the RTX PRO 6000, without a GPU, within sm_120's shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED_BYTES = 99 * 1024  # what one block may have on sm_120; sm_90 has 227 KiB

# In a process of its own: the other tests interpret their kernels, and an interpreted kernel cannot be compiled.
SCRIPT = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from train.kernels import attention, linear_loss

def compiled(kernel, pointers, constants, warps):
    signature = {**pointers, **{name: "constexpr" for name in constants}}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options={"num_warps": warps})
    return made.metadata.shared

found = {}
for low, group, head_dim, depths in (("bf16", 4, 128, 6), ("bf16", 7, 96, 2), ("fp16", 1, 64, 7)):
    tensor, wide = f"*{low}", "*fp32"
    padded = triton.next_power_of_2(group)
    sizes = dict(KV_HEADS=8, GROUP=group, GROUP_PADDED=padded, D=head_dim, D_PADDED=triton.next_power_of_2(head_dim),
                 DEPTHS=depths, ROWS=max(attention.QUERIES // padded, 1))
    many = (tensor,) * depths
    forward = dict(query=tensor, out=tensor, lse=wide, keys=many, values=many, merged=tensor, merged_lse=wide,
                   num_rows="i32", scale="fp32")
    backward = dict(query=tensor, merged=tensor, merged_lse=wide, grad=tensor, grad_query=tensor, keys=many,
                    values=many, grad_keys=many, grad_values=many, num_rows="i32", scale="fp32")
    name = f"{low}, groups of {group}, heads of {head_dim}, {depths} depths"
    found[f"merge forward, {name}"] = compiled(attention._merge_forward, forward, sizes, 4)
    found[f"merge backward, {name}"] = compiled(attention._merge_backward, backward, sizes, 4)
    block = dict(BLOCK=linear_loss.BLOCK)
    warps = linear_loss.WARPS
    for cap in (None, 30.0):
        found[f"normalizer, {low}, cap {cap}"] = compiled(
            linear_loss._normalizer, dict(logits=tensor, log_normalizer=wide, top1="*i64", num_columns="i32"),
            block | dict(CAP=cap), warps)
    loss = dict(logits=tensor, teacher=tensor, seen="*i64", log_normalizer=wide, draft_normalizer=wide, weight=wide,
                entropy=wide, top1="*i64", alpha=wide, num_columns="i32")
    for cap in (None, 30.0):
        found[f"loss rows, {low}, cap {cap}"] = compiled(linear_loss._loss_rows, loss, block | dict(CAP=cap), warps)
    found[f"multiply, {low}"] = compiled(linear_loss._multiply, dict(x=tensor, factor=wide, size="i64"), block, warps)
print(json.dumps(found))
"""


@pytest.mark.parametrize("capability", [90, 120])
def test_every_kernel_compiles_and_fits(capability):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(capability)],
        cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    shared = json.loads(done.stdout.splitlines()[-1])
    assert len(shared) == 16
    assert {name: size for name, size in shared.items() if size > SHARED_BYTES} == {}

"""Each gradient is summed by itself, in the dtype that was asked for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from train.replicated import sum_gradients


@pytest.fixture
def alone(tmp_path):
    """A group of one process: its sums are the summands, as they were sent."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_gradients_come_back_as_they_were_sent(alone, monkeypatch, dtype):
    sent, reduce = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **options: (sent.append(tensor.clone()), reduce(tensor, **options))[1])
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    model.register_comm_hook(None, lambda _, bucket: sum_gradients(bucket, dtype))
    rows = torch.randn(4, 5)
    expected = torch.autograd.grad(plain(rows).square().sum(), list(plain.parameters()))
    for _ in range(2):  # one bucket, then those that DDP makes of what it saw
        sent.clear()
        plain.zero_grad()
        model(rows).square().sum().backward()
        for parameter, gradient in zip(plain.parameters(), expected, strict=True):
            assert parameter.grad.dtype == torch.float32
            assert torch.equal(parameter.grad, gradient.to(dtype or gradient.dtype).float())
        assert sorted(one.shape for one in sent) == sorted(one.shape for one in expected)
        assert all(one.dtype == (dtype or torch.float32) for one in sent)

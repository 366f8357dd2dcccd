"""Arguments that are missing, or in the place of another, are refused with what to write instead."""

from __future__ import annotations

import pytest

hvd = pytest.importorskip("horovod.torch")
import torch  # noqa: E402 - imported by Horovod if it is there

from torch_hooks import DistributedOptimizer, LoadBalance  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


def test_names_in_the_place_of_the_balance():
    model = torch.nn.Linear(2, 1)
    with pytest.raises(TypeError, match=r"balance.*generator.*DistributedOptimizer\(optimizer, balance, named_"):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


def test_no_global_batch():
    with pytest.raises(TypeError, match=r"global_batch.*global_batch=batch_size \* hvd\.size\(\)"):
        LoadBalance("bsp")

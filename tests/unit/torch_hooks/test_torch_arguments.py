"""Arguments that a script brings along from Horovod or PyTorch are refused with what to write instead."""

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


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ({"op": hvd.Sum}, r"op=.*leave it out.*hvd\.Sum"),
        ({"backward_passes_per_step": 4}, r"step\(\).*max_micro_batch"),
        ({"process_set": hvd.global_process_set}, r"process_set.*leave it out"),
        ({"gradient_predivide_factor": 2.0}, r"gradient_predivide_factor.*leave it out"),
        ({"num_groups": 2}, r"num_groups.*leave it out"),
        ({"compresion": None}, r"compresion.*help\(DistributedOptimizer\)"),
    ],
)
def test_of_horovods_optimizer(argument, instead):
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=instead):
        DistributedOptimizer(inner, LoadBalance("bsp", global_batch=4), model.named_parameters(), **argument)


def test_names_in_the_place_of_the_balance():
    model = torch.nn.Linear(2, 1)
    with pytest.raises(TypeError, match=r"balance.*generator.*DistributedOptimizer\(optimizer, balance, named_"):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        ({"batch_size": 32}, r"batch_size=32.*global_batch=batch_size \* hvd\.size\(\)"),
        ({"global_batch": 32, "max_micro_batch": 8}, r"policy=BSP\(max_micro_batch="),
        ({}, r"global_batch.*global_batch=batch_size \* hvd\.size\(\)"),
    ],
)
def test_of_a_loader(arguments, instead):
    with pytest.raises(TypeError, match=instead):
        LoadBalance("bsp", **arguments)

"""What sums gradients or shards parameters by itself is refused by name, with a remedy."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from hvd_hetero.testing import run_on_threads  # noqa: E402
from torch_hooks import DistributedOptimizer, LoadBalance  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrap(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balance = LoadBalance("bsp", global_batch=4)
    try:
        DistributedOptimizer(optimizer, balance)
    finally:
        balance.close()


def zero(model):
    wrap(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))


def ddp(model):
    holds = DistributedDataParallel(model)
    wrap(model)  # as accelerate's users do, whose optimizer knows the plain model
    del holds


CASES = {
    "ddp": (ddp, "DistributedDataParallel.*leave DistributedDataParallel out"),
    "fsdp 1": (
        lambda model: wrap(FullyShardedDataParallel(model, device_id=torch.device("cpu"))),
        "FullyShardedDataParallel.*a plain model",
    ),
    "fsdp 1, original parameters": (
        lambda model: wrap(FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)),
        "FullyShardedDataParallel.*a plain model",
    ),
    "fsdp 2": (lambda model: wrap(fully_shard(model)), "fully_shard.*a plain model"),
    "zero": (zero, "ZeroRedundancyOptimizer.*the optimizer that it wraps"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")  # of a group with one rank
def test_what_synchronises_by_itself_is_refused_by_name(case):
    wrapped, message = CASES[case]

    def refused(rank):
        with pytest.raises(TypeError, match=message):
            wrapped(torch.nn.Linear(2, 1))

    run_on_threads(refused, 1)


def test_a_wrapper_that_nobody_uses_any_more_does_no_harm():
    def train(rank):
        model = torch.nn.Linear(2, 1)
        former = DistributedDataParallel(model)
        former.itself = former  # garbage that only a collection finds
        del former
        wrap(model)

    gc.disable()
    try:
        run_on_threads(train, 1)
    finally:
        gc.enable()

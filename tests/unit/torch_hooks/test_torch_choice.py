"""Which wire there is without Horovod: that of a process group; and what needs Horovod says what to use instead."""

from __future__ import annotations

import importlib
import sys
import weakref
from datetime import timedelta
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from hvd_hetero.errors import PeerLostError, RoundStateError  # noqa: E402
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance, average_by_samples  # noqa: E402
from torch_hooks.gradients.compression import compressor  # noqa: E402
from torch_hooks.wires.choice import wire_here  # noqa: E402
from torch_hooks.wires.torch_distributed import ProcessGroupWire, timeout_of, with_cpu  # noqa: E402


@pytest.fixture
def group(tmp_path):
    """This process is the only rank of a job of torch.distributed."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=timedelta(seconds=77)
    )
    yield
    dist.destroy_process_group()


def test_without_either_both_ways_are_named():
    with pytest.raises(ValueError, match=r"hvd\.init\(\).*torch\.distributed\.init_process_group\(\)"):
        LoadBalance("bsp", global_batch=4)
    with pytest.raises(ValueError, match=r"no process group.*init_process_group\(\)"):
        ProcessGroupWire()


def test_a_process_group_is_found_and_its_wire_stays_the_same(group):
    wire = wire_here()
    assert isinstance(wire, ProcessGroupWire)
    assert wire_here() is wire
    assert (wire.rank, wire.size, wire.thread_group) == (0, 1, None)
    assert timeout_of(wire._group) == timedelta(seconds=77)


def test_another_process_group_has_another_wire(group, tmp_path):
    wire = wire_here()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/other", rank=0, world_size=1)
    assert wire_here() is not wire


def test_a_lone_rank_trains(group):
    data = torch.utils.data.TensorDataset(torch.ones(10, 2))
    model = torch.nn.Linear(2, 1)
    balance = LoadBalance("lb-bsp", global_batch=4)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balance, model.named_parameters())
    for (x,) in BalancedLoader(data, balance):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    assert balance.rounds == 3
    assert average_by_samples(2.0, 3) == 2.0
    balance.close()


def test_no_group_outlives_its_end_in_what_the_collector_has_yet_to_find(tmp_path):
    """Where that is in a fork, as in a worker of a data loader, Gloo's destructor joins a thread that is not there."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    wire = ProcessGroupWire(dist.new_group([0]))
    balance = LoadBalance("bsp", global_batch=4, wire=wire)
    line = wire.new_group()
    groups = [weakref.ref(group) for group in (wire.of, wire._group, line._group)]
    dist.destroy_process_group()
    assert [group() for group in groups] == [None] * 3
    for ended in (
        wire.new_group,
        lambda: line.start_sum(torch.ones(1), "a sum"),
        lambda: average_by_samples(2.0, 3, balance),
    ):
        with pytest.raises(RoundStateError, match=r"LoadBalance.*init_process_group\(\)"):
            ended()


def test_a_wire_can_be_of_a_group(group):
    wire = ProcessGroupWire(dist.new_group([0]))
    balance = LoadBalance("bsp", global_batch=4, wire=wire)
    assert balance._session.wire is wire
    assert average_by_samples(2.0, 3, balance) == 2.0


def test_states_of_elastic_jobs_say_what_to_use_instead(group):
    elastic = pytest.importorskip("torch_hooks.elastic")
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"torch\.distributed.*torchrun --max-restarts.*torch_hooks"):
        elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_where_horovod_is_not_installed_elastic_says_what_to_use_instead(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"] + ["torch_hooks.elastic"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(ImportError, match=r"not installed.*torchrun --max-restarts.*torch_hooks"):
        importlib.import_module("torch_hooks.elastic")


def test_tables_have_a_backend_wherever_gradients_are():
    assert with_cpu("cuda:nccl") == "cpu:gloo,cuda:nccl"
    assert with_cpu("cpu:gloo,cuda:nccl") == "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_type_compresses(dtype):
    compression = compressor(dtype, SimpleNamespace(cannot_sum=()))
    sent, context = compression.compress(torch.tensor([1.0, 0.5], dtype=torch.float64))
    assert sent.dtype == dtype
    assert compression.decompress(sent, context).dtype == torch.float64
    whole, context = compression.compress(torch.tensor([3]))
    assert whole.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2])
def test_a_type_that_cannot_hold_gradients_is_refused(dtype):
    with pytest.raises(ValueError, match=rf"compression.*torch\.float16.* {dtype}"):
        compressor(dtype, SimpleNamespace(cannot_sum=()))


def test_a_type_that_the_wire_cannot_sum_is_refused():
    with pytest.raises(ValueError, match=r"compression=torch\.bfloat16.*torch\.float16"):
        compressor(torch.bfloat16, SimpleNamespace(cannot_sum=(torch.bfloat16,)))


def test_horovod_and_a_process_group_of_other_sizes_are_refused(group, monkeypatch):
    """Under torchrun a library may initialise Horovod, each process then alone: ranks would train apart in silence."""
    hvd = pytest.importorskip("horovod.torch")
    monkeypatch.setattr(hvd, "is_initialized", lambda: True)
    monkeypatch.setattr(hvd, "size", lambda: 2)
    with pytest.raises(ValueError, match=r"2 rank.*torch\.distributed.* 1\b"):
        wire_here()


def test_what_fails_while_objects_travel_is_a_lost_rank(group, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("Connection closed by peer")

    wire = wire_here()
    monkeypatch.setattr(torch.distributed, "all_gather_object", fails)
    with pytest.raises(PeerLostError, match=r"'state'.*Connection closed by peer"):
        wire.allgather_object(1, name="state")

"""What a GPU takes is timed by numbers that it has computed, and gradients wait for none of them.

No GPU is here. A modelled one is behind a processor whose host goes on while it works, on a clock that nothing else
moves; what TensorFlow would do on a GPU is read off the graph.
"""

from __future__ import annotations

import itertools
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest

hvd = pytest.importorskip("horovod.tensorflow")
import tensorflow as tf  # noqa: E402 - imported by Horovod if it is there

from hvd_hetero.policies import BSP, LBBSP, ElasticBSP, NonBlocking  # noqa: E402
from hvd_hetero.session import balancer_of  # noqa: E402
from keras_callbacks import LoadBalance, resize_batches, session  # noqa: E402
from keras_callbacks.step.device import Device, device_here  # noqa: E402
from keras_callbacks.step.graph_synchroniser import GraphAllreduce  # noqa: E402
from tests.distributed.workers.queued_device import Network, QueuedDevice  # noqa: E402
from tests.support.device_model import DeviceModel  # noqa: E402

SHARE = [0.5, 2.0, 4.0, 1.0, 0.0]
SLOPE_S, INTERCEPT_S, UPDATE_S = 1.0, 5.0, 0.25
X = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # a quarter of the time of a fit
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    hvd.shutdown()


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)

    def pass_s(seconds):
        now.s += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now.s)
    return DeviceModel(SLOPE_S, INTERCEPT_S, clock=lambda: now.s, sleep=pass_s)


def trained(monkeypatch, model, policy, device):
    """The records of two epochs, each of four rounds of twelve samples and one of two."""
    monkeypatch.setattr(session, "device_here", lambda policy, timed: device)
    balance = LoadBalance(policy, global_batch=12)
    records = []
    balance.on_round(records.append)
    network = Network(model)
    network.compile("sgd", "mse")
    y = np.stack([X.sum(1), np.arange(len(X))], 1)
    network.fit(resize_batches((X, y), balance), epochs=2, verbose=0, shuffle=False, callbacks=[balance])
    balance.close()
    assert sorted(itertools.chain(*network.seen)) == sorted([*range(len(X))] * 2)
    return records


@pytest.mark.parametrize(
    ("policy", "steps"),
    [(LBBSP(), 1), (LBBSP(max_micro_batch=5), 3), (ElasticBSP(3, updates="local"), 1)],
    ids=["one", "several", "local updates"],
)
def test_a_round_takes_what_the_device_takes_and_not_what_the_host_does(monkeypatch, clock, policy, steps):
    device = QueuedDevice(clock, UPDATE_S)
    records = trained(monkeypatch, clock, policy, device)
    whole = [r for r in records if r["samples"] == [12]]
    assert len(whole) >= 8
    for record in whole:
        work_s = SLOPE_S * 12 + INTERCEPT_S * record["micro_batches"][0]
        assert record["micro_batches"] == [steps]
        assert record["compute_s"][0] == pytest.approx(work_s + UPDATE_S * (record["round"] > 0))
    assert device.waits == len(records)


def test_by_the_hosts_clock_the_same_device_takes_no_time_at_all(monkeypatch, clock):
    """So what the device's own clock says is not of this model's making."""
    records = trained(monkeypatch, clock, LBBSP(), None)
    assert {r["compute_s"][0] for r in records} == {0.0}


def test_a_round_that_the_first_rank_ends_is_not_over_when_its_work_is_queued(monkeypatch, clock):
    """Another rank would stop for one that has merely queued all of its micro-batches."""
    queued = []
    monkeypatch.setattr(clock, "enqueue", lambda batch, real=clock.enqueue: (queued.append(clock.busy), real(batch)))
    trained(monkeypatch, clock, NonBlocking(4), QueuedDevice(clock))
    assert len(queued) > 8
    assert not any(queued), "each micro-batch began on an empty queue"


def graph_of(device, lengths, *, apart=False, looks=False):
    balance = LoadBalance("lb-bsp", global_batch=4)
    calls = balance._session.calls
    calls.host._timed, calls.apart, calls.looks = device, apart, looks
    synchroniser = GraphAllreduce(calls)
    specs = [tf.TensorSpec((length,), tf.float32) for length in lengths]
    traced = tf.function(lambda *g: synchroniser(list(g), tf.constant(SHARE, tf.float64)))
    return traced.get_concrete_function(*specs).graph


def ancestors(operation):
    seen, open_ = set(), [operation]
    while open_:
        new = [t.op for t in open_[-1].inputs] + list(open_.pop().control_inputs)
        open_ += [o for o in new if o not in seen]
        seen.update(new)
    return seen


def calls_of(graph):
    """The call that reports, which is first, and the one that agrees."""
    report, agree = (o for o in graph.get_operations() if o.type in ("PyFunc", "EagerPyFunc"))
    assert report in ancestors(agree)
    return report, agree


def test_the_clock_is_read_behind_a_number_on_the_device_that_was_queued_behind_all_gradients():
    graph = graph_of(Device("GPU:0"), [8, 3, 0], apart=True)
    report, agree = calls_of(graph)
    assert "CPU:0" in report.device
    _, number = report.inputs  # behind the learning rate
    assert "GPU:0" in number.op.device
    assert number.shape.num_elements() == 1
    gradients = {o for t in graph.inputs[:3] for o in [t.op]}
    assert gradients <= ancestors(number.op)
    sums = {o for o in graph.get_operations() if o.type == "HorovodGroupedAllreduce"}
    assert sums <= ancestors(agree), "what a rank does from then on is its update"


@pytest.mark.parametrize("lengths", [[8, 3, 2**19], [2**19, 8, 3], [8, 3]])
def test_no_gradient_waits_for_the_devices_clock_nor_its_update_for_the_table(lengths):
    graph = graph_of(Device("GPU:0"), lengths, apart=True)
    report, _ = calls_of(graph)
    *gradients, table = (o for o in graph.get_operations() if o.type == "HorovodGroupedAllreduce")
    assert not any(report in ancestors(o) for o in gradients)
    assert report in ancestors(table)
    assert ([t.dtype for t in table.inputs], "CPU:0" in table.device) == ([tf.float64], True)
    for output in graph.outputs:  # what a graph gives back waits for all that it has to do
        assert report not in ancestors(output.op.inputs[0].op)


def test_ranks_that_look_for_nan_and_those_on_a_device_that_do_not_send_as_many_numbers():
    sent = [
        [t.shape for o in graph_of(None, [8, 3], apart=True, looks=looks).get_operations()
         if o.type.startswith("HorovodGrouped") for t in o.inputs]
        for looks in (True, False)
    ]  # fmt: skip
    assert sent[0] == sent[1]


def test_a_processors_graph_is_what_it_was():
    report, _ = calls_of(graph_of(None, [8, 3]))
    assert len(report.inputs) == 1, "the learning rate"
    (only,) = (o for o in report.graph.get_operations() if o.type == "HorovodGroupedAllreduce")
    assert report in ancestors(only), "the table travels along"


def test_ranks_on_processors_send_the_table_as_those_with_a_device_do(monkeypatch):
    monkeypatch.setattr(session.TensorFlowWire, "sum", lambda self, value, name: value + 1)
    assert LoadBalance("lb-bsp", global_batch=4)._session.calls.apart
    assert not LoadBalance("bsp", global_batch=4)._session.calls.apart, "whose work is not timed"


def test_waiting_for_a_device_asks_it_for_a_number_of_its_own_each_time(monkeypatch):
    asked = []
    device = Device("CPU:0")
    real = tf.raw_ops.Neg
    monkeypatch.setattr(tf.raw_ops, "Neg", lambda x: (asked.append(x), real(x=x))[1])
    device.wait()
    device.wait()
    assert len(asked) == 2


def test_of_a_variable_on_a_device_the_host_copies_no_more_than_it_looks_at(monkeypatch):
    monkeypatch.setattr(session, "device_here", lambda policy, timed: Device("CPU:0"))
    variable = tf.Variable(tf.ones((100, 50)))
    norms = []
    for calls in (LoadBalance(BSP(), global_batch=4)._session.calls, plain_calls(monkeypatch)):
        calls.start(None, [variable])
        calls.prepare()
        norms.append(calls.witnesses.shown)
    assert norms[0] == norms[1]
    assert norms[0][0] > 4 * math.sqrt(5000) - 300


def plain_calls(monkeypatch):
    monkeypatch.setattr(session, "device_here", lambda policy, timed: None)
    return LoadBalance(BSP(), global_batch=4)._session.calls


def seen_by(monkeypatch, *kinds):
    found = [SimpleNamespace(name=f"/device:{kind}:{i}", device_type=kind) for i, kind in enumerate(kinds)]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda: found)


@pytest.mark.parametrize("kinds", [("CPU", "GPU", "GPU"), ("CPU", "TPU")])
def test_devices_that_have_no_one_queue_are_refused_where_their_time_matters(monkeypatch, kinds):
    seen_by(monkeypatch, *kinds)
    for policy in (LBBSP(), NonBlocking(2)):
        with pytest.raises(
            ValueError,
            match=r"GPU.*/device:.*hvd\.local_rank\(\).*bsp",
        ):
            LoadBalance(policy, global_batch=4)
    assert balancer_of(LoadBalance("bsp", global_batch=4)).meter.queued


def test_one_gpu_is_timed_and_without_one_nothing_is_added(monkeypatch):
    seen_by(monkeypatch, "CPU", "GPU")
    assert isinstance(device_here("lb-bsp", timed=True), Device)
    assert not balancer_of(LoadBalance("lb-bsp", global_batch=4)).meter.queued, "the clock waits for the device"
    seen_by(monkeypatch, "CPU", "CPU")
    assert device_here("lb-bsp", timed=True) is None

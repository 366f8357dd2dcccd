"""What a GPU takes is timed by numbers that it has computed, and a round that its memory is short for is done again.

No GPU is here. A modelled one is behind a processor whose host goes on while it works, on a clock that nothing else
moves; what TensorFlow would do on a GPU is read off the graph. Its memory is short for more than so many samples, or
as the test says; TensorFlow then ends the step as it does where an allocation fails.
"""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from hvd_hetero.errors import HeteroError
from hvd_hetero.policies import BSP, LBBSP, ElasticBSP, NonBlocking
from hvd_hetero.session import balancer_of
from keras_callbacks import LoadBalance, resize_batches, session
from keras_callbacks.step.device import Device, device_here
from keras_callbacks.step.graph_synchroniser import GraphAllreduce
from tests.distributed.workers.queued_device import Network, QueuedDevice
from tests.support.device_model import DeviceModel
from tests.unit.keras_callbacks.small import keras

SHARE = [0.5, 2.0, 4.0, 1.0, 0.0]
SLOPE_S, INTERCEPT_S, UPDATE_S = 1.0, 5.0, 0.25
SAMPLES, BATCH, EPOCHS = 50, 12, 2
X = np.random.default_rng(0).normal(size=(SAMPLES, 4)).astype("float32")
Y = np.stack([np.sin(X.sum(1)), np.arange(SAMPLES)], 1).astype("float32")


@pytest.fixture(autouse=True)
def few_optimisations():
    """A quarter of the time of a fit."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)

    def pass_s(seconds):
        now.s += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now.s)
    return DeviceModel(SLOPE_S, INTERCEPT_S, clock=lambda: now.s, sleep=pass_s)


def timed(monkeypatch, model, policy, device):
    """The records of two epochs, each of four rounds of twelve samples and one of two."""
    monkeypatch.setattr(session, "device_here", lambda policy, timed: device)
    balance = LoadBalance(policy, global_batch=BATCH)
    records = []
    balance.on_round(records.append)
    network = Network(model)
    network.compile("sgd", "mse")
    network.fit(resize_batches((X, Y), balance), epochs=EPOCHS, verbose=0, shuffle=False, callbacks=[balance])
    balance.close()
    assert sorted(itertools.chain(*network.seen)) == sorted([*range(len(X))] * EPOCHS)
    return records


@pytest.mark.parametrize(
    ("policy", "steps"),
    [(LBBSP(), 1), (LBBSP(max_micro_batch=5), 3), (ElasticBSP(3, updates="local"), 1)],
    ids=["one", "several", "local updates"],
)
def test_a_round_takes_what_the_device_takes_and_not_what_the_host_does(monkeypatch, clock, policy, steps):
    device = QueuedDevice(clock, UPDATE_S)
    records = timed(monkeypatch, clock, policy, device)
    whole = [r for r in records if r["samples"] == [12]]
    assert len(whole) >= 8
    for record in whole:
        work_s = SLOPE_S * 12 + INTERCEPT_S * record["micro_batches"][0]
        assert record["micro_batches"] == [steps]
        assert record["compute_s"][0] == pytest.approx(work_s + UPDATE_S * (record["round"] > 0))
    assert device.waits == len(records)


def test_by_the_hosts_clock_the_same_device_takes_no_time_at_all(monkeypatch, clock):
    """So what the device's own clock says is not of this model's making."""
    records = timed(monkeypatch, clock, LBBSP(), None)
    assert {r["compute_s"][0] for r in records} == {0.0}


def test_a_round_that_the_first_rank_ends_is_not_over_when_its_work_is_queued(monkeypatch, clock):
    """Another rank would stop for one that has merely queued all of its micro-batches."""
    queued = []
    monkeypatch.setattr(clock, "enqueue", lambda batch, real=clock.enqueue: (queued.append(clock.busy), real(batch)))
    timed(monkeypatch, clock, NonBlocking(4), QueuedDevice(clock))
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


def test_ranks_on_processors_send_the_table_as_those_with_a_device_do(monkeypatch):
    monkeypatch.setattr(session.TensorFlowWire, "sum", lambda self, value, name: value + 1)
    assert LoadBalance("lb-bsp", global_batch=4)._session.calls.apart
    assert not LoadBalance("bsp", global_batch=4)._session.calls.apart, "whose work is not timed"


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


@pytest.fixture
def device(monkeypatch):
    """This rank has one, whose memory may run short."""
    monkeypatch.setattr(session, "device_here", lambda policy, timed: Device("CPU:0"))


class Counted(Network):
    """Counts how often its step is traced."""

    traces = 0

    def train_step(self, data):
        Counted.traces += 1
        return super().train_step(data)


def network(memory=None):
    keras.utils.set_random_seed(1)
    model = Counted(DeviceModel(1e-9, 1e-9, out_of_memory=memory))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    return model


def trained(policy, memory=None, *, data=(X, Y), change=None, callbacks=()):
    model = network(memory)
    if change is not None:
        change(model)
    balance = LoadBalance(policy, global_batch=BATCH)
    records = []
    balance.on_round(records.append)
    batches = resize_batches(data, balance)
    told = model.fit(batches, epochs=EPOCHS, verbose=0, shuffle=False, callbacks=[balance, *callbacks])
    balance.close()
    return model, told.history, records


@pytest.fixture(scope="module")
def alone():
    """What one process comes to, which has memory for all."""
    model = network()
    told = model.fit(X, Y, batch_size=BATCH, epochs=EPOCHS, verbose=0, shuffle=False)
    return model, told.history


def assert_same(found, alone):
    for mine, theirs in zip(found[0].get_weights(), alone[0].get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-6)
    for name, values in alone[1].items():
        np.testing.assert_allclose(found[1][name], values, rtol=2e-6, err_msg=name)


POLICIES = {
    "curves": lambda: LBBSP(device="gpu"),
    "non-blocking": lambda: NonBlocking(1, anticipates=False),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_training_comes_to_what_it_would_with_memory_enough(caplog, alone, policy, device):
    """Metrics too, which have seen the micro-batches of the failed attempt that did fit."""
    found = trained(POLICIES[policy](), memory=5)
    assert_same(found, alone)
    _, _, records = found
    assert {r["samples"][0] for r in records} == {12, 2}
    (first,) = caplog.messages[:1]
    assert "round 0: rank 0 ran out of memory with 12 samples; they are done in parts of at most 6" in first
    limit = records[-1]["limit"][0]
    assert 1 <= limit <= 5
    assert all(r["samples"][0] <= limit * r["micro_batches"][0] for r in records[-4:])
    assert all(len(batch) <= limit for batch in found[0].seen[-10:])


def test_memory_may_run_short_at_any_micro_batch_of_a_round_and_twice_in_a_row(alone, device):
    struck, traces = [], set()

    def falters(model):
        real = model.device_model.allocate

        def allocate(batch):
            calls.append(batch)
            if len(calls) in (1, 7, 8):  # in the first round, which is traced; in the second micro-batch of another
                struck.append(batch)
                traces.add(Counted.traces)
                raise MemoryError("no memory")
            real(batch)

        calls: list[int] = []
        model.device_model.allocate = allocate

    assert_same(trained(BSP(max_micro_batch=8), change=falters), alone)
    assert struck == [6, 4, 2]
    assert traces == {Counted.traces}, "nothing is traced again for a batch that is done again"


def test_data_of_any_structure_are_kept_and_done_again(alone, device):
    """Among them strings, and what a map makes of the batch."""
    places = set()
    words = np.array([f"{i}" for i in range(SAMPLES)])

    def numbers(x, y):
        return x["x"], tf.concat([y[:, :1], tf.strings.to_number(x["word"])[:, None]], 1)

    class WithWords(Counted):
        def train_step(self, data):
            places.update(part.device for part in tf.nest.flatten(data))
            return super().train_step(numbers(*data))

    keras.utils.set_random_seed(1)
    model = WithWords(DeviceModel(1e-9, 1e-9, out_of_memory=5))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    balance = LoadBalance(LBBSP(device="gpu"), global_batch=BATCH)
    samples = tf.data.Dataset.from_tensor_slices(({"x": X, "word": words}, Y))
    batches = resize_batches(samples, balance).map(lambda x, y: (x, tf.identity(y)))
    history = model.fit(batches, epochs=EPOCHS, verbose=0, callbacks=[balance]).history
    assert_same((model, history, None), alone)
    assert places, "of the batch"
    assert all("CPU:0" in place for place in places), "a device has no memory for more than a micro-batch"


def test_what_a_failed_attempt_has_done_to_running_statistics_is_taken_back(device):
    """The second micro-batch of the third round does not fit: the first one's statistics count once all the same."""
    seen, normal = [], keras.layers.BatchNormalization(momentum=0.5)
    inputs = keras.layers.Input((4,))

    class Watched(keras.Model):
        def train_step(self, data):
            def note(x):
                seen.append(x)
                if len(seen) == 6:
                    raise MemoryError("no memory")
                return x

            x = tf.numpy_function(note, [data[0]], tf.float32)
            x.set_shape(data[0].shape)
            return super().train_step((x, data[1][:, :1]))

    model = Watched(inputs, keras.layers.Dense(1)(normal(inputs)))
    model.compile("sgd", "mse")
    balance = LoadBalance(BSP(max_micro_batch=6), global_batch=BATCH)
    model.fit(resize_batches((X, Y), balance), epochs=1, verbose=0, shuffle=False, callbacks=[balance])
    counted = [part for i, part in enumerate(seen) if i not in (4, 5)]  # those two are done again
    assert sum(map(len, counted)) == SAMPLES
    mean = np.zeros(4)
    for part in counted:
        mean = 0.5 * mean + 0.5 * part.mean(0)
    np.testing.assert_allclose(tf.convert_to_tensor(normal.moving_mean), mean, atol=1e-6)


@pytest.mark.parametrize("made", ["before", "by the first step"])
def test_a_metric_that_only_tracing_finds_counts_each_sample_once(made, device):
    """The first round ends in its second micro-batch; the metric is no attribute of the model."""
    metrics = [keras.metrics.Mean(name="place")] if made == "before" else []

    class Telling(Network):
        def train_step(self, data):
            logs = super().train_step(data)
            if not metrics:
                metrics.append(keras.metrics.Mean(name="place"))
            metrics[0].update_state(data[1][:, 1])
            return {**logs, "place": metrics[0].result()}

    def allocate(batch):
        sizes.append(batch)
        if len(sizes) == 2:
            raise MemoryError("no memory")

    sizes = []
    model = Telling(DeviceModel(1e-9, 1e-9))
    model.device_model.allocate = allocate
    model.compile("sgd", "mse")
    balance = LoadBalance(BSP(max_micro_batch=6), global_batch=BATCH)
    told = model.fit(resize_batches((X, Y), balance), epochs=1, verbose=0, shuffle=False, callbacks=[balance]).history
    assert sizes[:4] == [6, 6, 3, 3]
    assert metrics[0].count.numpy() == SAMPLES
    assert told["place"] == [pytest.approx(Y[:, 1].mean())]


def test_what_cannot_be_done_again_says_so(device):
    def never(model):
        def allocate(batch):
            raise MemoryError("no memory")

        model.device_model.allocate = allocate

    message = r"round 0: rank 0 .*memory.*max_micro_batch.*12"
    with pytest.raises(HeteroError, match=message):
        trained(BSP(), change=never)


def test_memory_that_ends_in_the_update_is_not_taken_for_that_of_the_round(device):
    class Short(keras.optimizers.SGD):
        def update_step(self, gradient, variable, *args):
            def ends(value):
                raise MemoryError("no memory")

            raised = tf.numpy_function(ends, [gradient], gradient.dtype)
            raised.set_shape(gradient.shape)
            super().update_step(raised, variable, *args)

    with pytest.raises(HeteroError, match=r"memory.*gradients"):
        trained(LBBSP(device="gpu"), change=lambda model: model.compile(Short(0.1), "mse"))


def test_a_round_whose_gradients_may_have_left_is_not_done_again(device):
    """Once the last micro-batch is done they may, before the table of the round has."""
    balance = LoadBalance(BSP(max_micro_batch=6), global_batch=BATCH)
    resize_batches((X, Y), balance)
    session = balance._session
    session.course.queue.prepare(new=True)
    session.calls.prepare()
    assert not session.calls.begin_again(), "no round has begun: memory was short elsewhere"
    session.calls.begin_round(BATCH)
    session.calls.proceed()
    assert session.calls.begin_again(), "in the second of two"
    session.calls.begin_round(BATCH)
    for _ in range(4):
        session.calls.proceed()
    assert session.balancer.computing
    with pytest.raises(HeteroError, match=r"round 0: rank 0 .*memory"):
        session.calls.begin_again()


@pytest.mark.parametrize(
    ("policy", "has_device", "repeats"),
    [
        (ElasticBSP(3, updates="local"), True, False),
        (ElasticBSP(3), True, True),
        (BSP(max_micro_batch=4), False, False),
        (LBBSP(device="gpu"), False, True),
    ],
    ids=["a rank's own updates", "micro-batches", "no device", "curves"],
)
def test_a_batch_is_kept_where_its_round_can_be_done_again(policy, has_device, repeats, monkeypatch):
    monkeypatch.setattr(session, "device_here", lambda policy, timed: Device("CPU:0") if has_device else None)
    assert LoadBalance(policy, global_batch=BATCH)._session.calls.micro_batches.repeats == repeats

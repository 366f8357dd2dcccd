"""A round that does not fit is done again in parts, and nothing of the failed attempt is left; on one modelled device.

The model's memory is short for more than so many samples, or as the test says; TensorFlow then ends the step as it does
where an allocation fails.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

hvd = pytest.importorskip("horovod.tensorflow")
import tensorflow as tf  # noqa: E402 - imported by Horovod if it is there

from hvd_hetero.errors import HeteroError  # noqa: E402
from hvd_hetero.policies import BSP, LBBSP, ElasticBSP, NonBlocking  # noqa: E402
from keras_callbacks import LoadBalance, resize_batches, session  # noqa: E402
from keras_callbacks.step.device import Device  # noqa: E402
from keras_callbacks.step.memory_shortage import MemoryShortage  # noqa: E402
from tests.distributed.workers.queued_device import Network  # noqa: E402
from tests.support.device_model import DeviceModel  # noqa: E402

keras = tf.keras
SAMPLES, BATCH, EPOCHS = 50, 12, 2
X = np.random.default_rng(0).normal(size=(SAMPLES, 4)).astype("float32")
Y = np.stack([np.sin(X.sum(1)), np.arange(SAMPLES)], 1).astype("float32")


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # a quarter of the time of a fit
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    hvd.shutdown()


@pytest.fixture(autouse=True)
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
def test_training_comes_to_what_it_would_with_memory_enough(caplog, alone, policy):
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


def test_memory_may_run_short_at_any_micro_batch_of_a_round_and_twice_in_a_row(alone):
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


def test_data_of_any_structure_are_kept_and_done_again(alone):
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


def test_what_a_failed_attempt_has_done_to_running_statistics_is_taken_back():
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
def test_a_metric_that_only_tracing_finds_counts_each_sample_once(made):
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


def test_what_cannot_be_done_again_says_so():
    def never(model):
        def allocate(batch):
            raise MemoryError("no memory")

        model.device_model.allocate = allocate

    message = r"round 0: rank 0 .*memory.*max_micro_batch.*12"
    with pytest.raises(HeteroError, match=message):
        trained(BSP(), change=never)


def test_memory_that_ends_in_the_update_is_not_taken_for_that_of_the_round():
    class Short(keras.optimizers.SGD):
        def update_step(self, gradient, variable, *args):
            def ends(value):
                raise MemoryError("no memory")

            raised = tf.numpy_function(ends, [gradient], gradient.dtype)
            raised.set_shape(gradient.shape)
            super().update_step(raised, variable, *args)

    with pytest.raises(HeteroError, match=r"memory.*gradients"):
        trained(LBBSP(device="gpu"), change=lambda model: model.compile(Short(0.1), "mse"))


@pytest.mark.parametrize(
    ("error", "failure", "begun"),
    [(ValueError("shapes"), None, True), (MemoryError(), ValueError("in a call"), True), (MemoryError(), None, False)],
    ids=["another", "a call from the graph", "before the round"],
)
def test_other_failures_are_what_they_were(error, failure, begun):
    def fails(iterator):
        raise error

    calls = SimpleNamespace(begin_again=lambda: begun)
    calls.host, calls.micro_batches = SimpleNamespace(failure=failure), SimpleNamespace(repeats=True)
    with pytest.raises(type(error)) as raised:
        MemoryShortage(calls, list).survived(fails, None)
    assert raised.value is error


def test_a_round_whose_gradients_may_have_left_is_not_done_again():
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


def test_updates_of_a_ranks_own_are_not_taken_back():
    assert not LoadBalance(ElasticBSP(3, updates="local"), global_batch=BATCH)._session.calls.micro_batches.repeats
    assert LoadBalance(ElasticBSP(3), global_batch=BATCH)._session.calls.micro_batches.repeats


def test_without_a_device_nothing_is_kept_for_another_attempt(monkeypatch):
    monkeypatch.setattr(session, "device_here", lambda policy, timed: None)
    assert not LoadBalance(BSP(max_micro_batch=4), global_batch=BATCH)._session.calls.micro_batches.repeats
    assert LoadBalance(LBBSP(device="gpu"), global_batch=BATCH)._session.calls.micro_batches.repeats

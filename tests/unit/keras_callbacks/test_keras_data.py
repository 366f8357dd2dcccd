"""Data: rounds are cut once, in order, and no earlier than known; streams are padded, and read to their end."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from hvd_hetero.balancer import Balancer
from hvd_hetero.data.permutation import SharedPermutation
from hvd_hetero.data.stream_orders import SharedStream
from hvd_hetero.errors import RoundStateError
from hvd_hetero.policies import BSP, NonBlocking
from hvd_hetero.rounds import RoundPlan
from keras_callbacks import LoadBalance, resize_batches
from keras_callbacks.data import indices_of
from keras_callbacks.pipeline.queue import RoundQueue
from keras_callbacks.pipeline.source_checks import check_same_data
from keras_callbacks.pipeline.sources import DatasetSource, SequenceSource
from keras_callbacks.pipeline.stream import StreamReader
from tests.unit.keras_callbacks.small import fit, keras, network

RANGE = tf.data.Dataset.range


def numbers(batch):
    return batch[0].numpy().tolist()


class Whole:
    """One rank's view of a stream that all ranks read."""

    def __init__(self, source, rank=0):
        self.reader = StreamReader(source)
        self.order = SharedStream(self.reader.samples)
        self.rank = rank

    def take(self, plan):
        return numbers(self.reader.batch_of(self.order.take(plan, self.rank).part))


def test_the_order_of_a_shuffled_stream_is_that_of_seed_and_epoch_whatever_the_ranks_global_seed():
    orders = []
    for rank in (0, 1):
        tf.random.set_seed(100 + rank)
        source = DatasetSource(RANGE(100).filter(lambda i: True), seed=3)
        orders.append([int(i) for epoch in (0, 1) for chunk in source.chunks(epoch) for i in chunk[0]])
    assert orders[0] == orders[1]
    first, second = orders[0][:100], orders[0][100:]
    assert first != second
    assert sorted(first) == sorted(second) == list(range(100))


def test_shuffles_by_the_same_seed_agree_unless_the_global_seed_differs():
    samples = lambda: RANGE(9).shuffle(3, seed=4).shard(2, 1)  # noqa: E731
    tf.random.set_seed(None)
    same = [check_same_data(samples(), 1, 2, certain=True) for _ in range(2)]
    tf.random.set_seed(7)
    assert same[0] == same[1] != check_same_data(samples(), 1, 2, certain=True)


class Batches(keras.utils.Sequence):
    """Three batches of unlike length, as (x, y, None)."""

    def __init__(self):
        super().__init__()
        self.epochs = 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        x = np.arange(4 * index, 4 * index + (4 if index < 2 else 2))
        return np.stack([x, x], 1).astype("float32"), x, None

    def on_epoch_end(self):
        self.epochs += 1


def test_a_sequence_of_batches_is_taken_apart_and_told_when_an_epoch_is_over():
    batches = Batches()
    stream, plan = Whole(SequenceSource(batches)), RoundPlan.of([7])
    batch = stream.reader.batch_of(stream.order.take(plan, 0).part)
    assert [part.numpy().ravel().tolist() for part in batch] == [sorted([*range(7)] * 2), [*range(7)]]
    assert batches.epochs == 0
    assert stream.take(plan) == [[7.0] * 2, [8.0] * 2, [9.0] * 2]
    assert not stream.order.holds(1)
    assert batches.epochs == 1
    shuffled = [
        [int(i) for chunk in SequenceSource(batches, seed=1).chunks(epoch) for i in chunk[1]] for epoch in range(4)
    ]
    assert len({tuple(epoch) for epoch in shuffled}) > 1
    assert all(sorted(epoch) == list(range(10)) for epoch in shuffled)


def generated():
    def generate():
        yield from ((np.float32([i, i]), np.float32([i])) for i in range(10))

    return tf.data.Dataset.from_generator(generate, output_signature=(tf.TensorSpec((2,)), tf.TensorSpec((1,))))


@pytest.mark.parametrize(
    ("data", "options", "rounds", "epochs"),
    [
        (generated, {"resized": {"stream": "whole"}, "epochs": 3}, 9, 3),
        (generated, {"resized": {"stream": "shard"}, "epochs": 3}, 9, 3),
        (Batches, {"epochs": 2}, 6, 2),
        (generated, {"epochs": 3, "steps_per_epoch": 2}, 5, 3),
        (lambda: generated().repeat(), {"epochs": 3, "steps_per_epoch": 5}, 15, 3),
    ],
    ids=["whole", "shard", "sequence", "the second epoch ends where the data do", "without end"],
)
def test_fit_ends_every_epoch_where_the_data_or_the_steps_end(data, options, rounds, epochs):
    history, balance = fit(network(keras.Model), data=data(), **options)
    assert (balance.rounds, len(history["loss"])) == (rounds, epochs)


@pytest.mark.parametrize("change", [None, lambda batches: batches.repeat()], ids=["samples", "batches"])
def test_endless_data_need_the_steps_of_an_epoch(change):
    options = {"data": generated().repeat()} if change is None else {"change": change}
    with pytest.raises(ValueError, match=r"steps_per_epoch.*repeat\(\)|must specify the number"):  # tf_keras's own
        fit(**options)


LENGTHS = [*range(1, 6), 70, *range(2, 90, 3), 4, 4]


def sentences():
    """Words and a label for each of these lengths, and a picture of two sides that are not known."""

    def samples():
        for i, length in enumerate(LENGTHS):
            yield np.arange(length) + 1, ["a"] * length, np.full((length, i % 3 + 1), 2.0), i

    parts = [((None,), tf.int64), ((None,), tf.string), ((None, None), tf.float32), ((), tf.int32)]
    return tf.data.Dataset.from_generator(samples, output_signature=tuple(tf.TensorSpec(*part) for part in parts))


@pytest.mark.parametrize("seed", [None, 5], ids=["in order", "shuffled"])
def test_a_ranks_batch_is_padded_by_itself_as_padded_batch_would(seed):
    whole = Whole(DatasetSource(sentences(), seed, padding=(-1, "", 0.5, 0)))
    whole.order.start(0)
    seen = []
    while whole.order.holds(1):
        handles = whole.order.take(RoundPlan.of([3, 2]), 0).part
        words, letters, pictures, numbers_ = (part.numpy() for part in whole.reader.batch_of(handles))
        lengths = [LENGTHS[i] for i in numbers_]
        assert words.shape == letters.shape == pictures.shape[:2] == (len(lengths), max(lengths))
        assert pictures.shape[2] == max(i % 3 + 1 for i in numbers_)
        for row, (i, length) in enumerate(zip(numbers_, lengths, strict=True)):
            assert words[row].tolist() == [*range(1, length + 1), *[-1] * (max(lengths) - length)]
            assert letters[row].tolist() == [b"a"] * length + [b""] * (max(lengths) - length)
            assert pictures[row].sum() == 2 * length * (i % 3 + 1) + 0.5 * (pictures[row].size - length * (i % 3 + 1))
        seen += numbers_.tolist()
        whole.order.finish((3, 2))
    assert len(set(seen)) == len(seen) > len(LENGTHS) // 2
    assert [len(part) for part in whole.reader.batch_of([])] == [1] * 4, "one stands in"


def test_fit_takes_samples_of_any_length_in_buckets_and_is_traced_once():
    traces = []

    class Counted(keras.layers.Layer):
        def call(self, x, training=None):
            if training:
                traces.append(tuple(x.shape))
            return x

    inputs = keras.layers.Input((None,), dtype="int64")
    hidden = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(100, 3)(Counted()(inputs)))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile("sgd", "mse")
    samples = sentences().map(lambda words, letters, pictures, i: (words, tf.cast(i, tf.float32)))
    buckets = samples.group_by_window(lambda x, y: tf.size(x, tf.int64) // 16, lambda _, window: window, window_size=8)
    _, balance = fit(model, data=buckets, global_batch=8, resized={"padding_values": 0})
    assert traces == [(None, None)]
    assert balance.rounds == -(-len(LENGTHS) // 8)
    first = next(iter(resize_batches(buckets, LoadBalance("bsp", global_batch=8), padding_values=0)))[0].numpy()
    assert first.shape[1] - min((row > 0).sum() for row in first) < 16


def queue_of(policy=None, *, rank=0, workers=2, samples=26, batch=8, rounds_ahead=0, shuffle=False, **options):
    balancer = Balancer(policy or BSP(), rank, workers, batch, clock=itertools.count().__next__)
    balancer.set_rounds_ahead(rounds_ahead)
    order = SharedPermutation(samples, shuffle=shuffle, seed=3)
    return RoundQueue(order, balancer, indices_of, **options), balancer


def finish(queue, balancer, cut, done=None):
    """What training does with a round that was taken; the other ranks have done their plans, or what is said."""
    for work in cut.micro_batches():
        balancer.begin(work)
        if not work.last:
            balancer.pause()
    table = balancer.report()
    columns = len(table) // balancer.workers
    for rank in range(balancer.workers):
        if rank != balancer.rank:
            table[rank * columns : (rank + 1) * columns] = table[balancer.rank * columns :][:columns]
            table[rank * columns] = (done or cut.plan.samples)[rank]
    balancer.agree(table)
    queue.finish(balancer.finished.table)


def epoch(queue, balancer):
    parts = []
    for index in range(queue.rounds):
        samples = queue.prepare(new=index == 0)
        parts.append(queue.part(index).tolist())
        cut = queue.take()
        assert cut.plan.samples[balancer.rank] == samples
        finish(queue, balancer, cut)
    return parts


def test_asking_again_for_a_batch_that_is_not_used_gives_the_same_one():
    """As Keras does, which draws a batch to build a model, and then begins again."""
    queue, balancer = queue_of(shuffle=True)
    assert queue.part(0).tolist() == queue.part(0).tolist() == epoch(queue, balancer)[0]
    with pytest.raises(RoundStateError, match=r"batch 1 .*one loop at a time"):
        queue.part(1)


def test_a_new_iteration_in_the_middle_of_an_epoch_begins_the_next_one():
    queue, balancer = queue_of(shuffle=True)
    first = queue.part(0).tolist()
    queue.prepare(new=True)
    finish(queue, balancer, queue.take())
    queue.prepare(new=True)
    assert queue.part(0).tolist() != first
    assert queue.take().epoch == 1


def test_the_epoch_that_fit_starts_with_decides_the_order():
    """Training that is resumed at epoch 1 sees the samples as training that came there."""
    queue, balancer = queue_of(shuffle=True)
    epoch(queue, balancer)
    resumed, other = queue_of(shuffle=True)
    resumed.wanted_epoch = 1
    resumed.prepare(new=True)
    assert epoch(resumed, other) == epoch(queue, balancer)


@pytest.mark.parametrize("rounds_ahead", [0, 1, 3])
def test_batches_are_known_as_far_ahead_as_plans_are_and_no_further(rounds_ahead):
    queue, balancer = queue_of(rounds_ahead=rounds_ahead)
    queue.part(rounds_ahead)
    with pytest.raises(RoundStateError, match=r"LoadBalance.*model\.fit\(batches, "):
        queue.part(rounds_ahead + 1)
    queue.prepare(new=True)
    with pytest.raises(RoundStateError, match=r"size.*resize_batches\(…, prefetch=…\)"):
        queue.part(rounds_ahead + 1)
    finish(queue, balancer, queue.take())
    if rounds_ahead < 3:
        queue.part(rounds_ahead + 1)


def test_what_a_round_that_ended_early_left_undone_comes_next():
    queue, balancer = queue_of(NonBlocking(2))
    assert queue.rounds is None, "not known beforehand"
    assert queue.part(0).tolist() == [0, 1, 2, 3]
    queue.prepare(new=True)
    finish(queue, balancer, queue.take(), done=(4, 2))  # rank 1 left 6 and 7
    assert queue.part(1).tolist() == [6, 7, 8, 9]
    assert not queue.at_end


@pytest.mark.parametrize("rounds_ahead", [0, 2])
def test_another_queue_goes_on_where_one_stood(rounds_ahead):
    """As after a failure: rounds that were cut ahead are cut again, and the next epoch follows."""
    queue, balancer = queue_of(rounds_ahead=rounds_ahead, shuffle=True)
    for _ in range(2):
        queue.prepare(new=not queue._used)
        finish(queue, balancer, queue.take())
    place = queue.cursor()
    later = [queue.part(2).tolist()]
    other, another = queue_of(rounds_ahead=rounds_ahead, shuffle=True)
    other.go_on(place)
    other.wanted_epoch = 7
    for index in range(2):
        other.prepare(new=index == 0)
        assert not other.at_end
        assert index or [other.part(0).tolist()] == later
        finish(other, another, other.take())
    assert other.at_end
    assert other.cursor() is None, "the next epoch begins at its beginning"

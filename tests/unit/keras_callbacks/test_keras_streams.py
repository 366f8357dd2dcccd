"""Streams of samples: cut by the plan, read alike or in parts of one's own, and refused where ranks would not agree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

hvd = pytest.importorskip("horovod.tensorflow")
import tensorflow as tf  # noqa: E402 - imported by Horovod if it is there

from hvd_hetero.balancer import Balancer  # noqa: E402
from hvd_hetero.columns import COLUMNS  # noqa: E402
from hvd_hetero.data.stream_orders import EndingShard, SharedStream  # noqa: E402
from hvd_hetero.policies import StaticAllocation  # noqa: E402
from hvd_hetero.rounds import RoundPlan, RoundReport, RoundTable  # noqa: E402
from keras_callbacks import LoadBalance, resize_batches  # noqa: E402
from keras_callbacks.pipeline.alike import check_alike  # noqa: E402
from keras_callbacks.pipeline.queue import RoundQueue  # noqa: E402
from keras_callbacks.pipeline.sources import DatasetSource, SequenceSource, is_sequence  # noqa: E402
from keras_callbacks.pipeline.stream import StreamReader  # noqa: E402

keras = tf.keras
RANGE = tf.data.Dataset.range
ZEROS = dict.fromkeys(COLUMNS, 0.0)


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


def table(done, ended=(0, 0)):
    rows = [
        RoundReport(**ZEROS | {"samples": samples, "ended": over}).vector(rank, len(done))
        for rank, (samples, over) in enumerate(zip(done, ended, strict=True))
    ]
    return RoundTable(sum(rows), len(done))


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

    def epoch(self, plan):
        self.order.start(0)
        batches = []
        while self.order.holds(1):
            batches.append(self.take(plan))
            self.order.finish(plan.samples)
        return batches


def test_a_stream_of_unknown_length_is_shared_out_to_its_end():
    plan = RoundPlan.of([30, 60])
    first, second = (Whole(DatasetSource(RANGE(200).filter(lambda i: True)), rank).epoch(plan) for rank in (0, 1))
    assert [len(part) for part in first] == [30, 30, 7]
    assert [i for pair in zip(first, second, strict=True) for part in pair for i in part] == list(range(200))


def test_samples_are_taken_from_chunks_in_as_few_pieces_as_there_are_runs(monkeypatch):
    """A slice for every sample would cost some ten microseconds each."""
    joined = []
    plain = tf.concat
    monkeypatch.setattr(tf, "concat", lambda parts, axis: joined.append(len(parts)) or plain(parts, axis))
    stream = Whole(DatasetSource(RANGE(200).filter(lambda i: True)), rank=1)
    assert stream.take(RoundPlan.of([30, 120])) == list(range(30, 150))
    assert joined == [3], "chunks of 64"


def test_the_order_of_a_shuffled_stream_is_that_of_seed_and_epoch_whatever_the_ranks_global_seed():
    plan, orders = RoundPlan.of([50, 50]), []
    for rank in (0, 1):
        tf.random.set_seed(100 + rank)
        source = DatasetSource(RANGE(100).filter(lambda i: True), seed=3)
        orders.append([int(i) for epoch in (0, 1) for chunk in source.chunks(epoch) for i in chunk[0]])
        assert len(Whole(source, rank).epoch(plan)) == 1
    assert orders[0] == orders[1]
    first, second = orders[0][:100], orders[0][100:]
    assert first != second
    assert sorted(first) == sorted(second) == list(range(100))


def test_a_rank_whose_part_ends_does_fewer_and_then_stands_in():
    reader = StreamReader(DatasetSource(RANGE(6).filter(lambda i: True)))
    order, plan = EndingShard(reader.samples, 1, 2), RoundPlan.of([4, 4])

    def take():
        cut = order.take(plan, 1)
        return numbers(reader.batch_of(cut.part)), cut.samples, cut.plan.samples

    assert (take(), order.ends_after(4)) == (([0, 1, 2, 3], 4, (4, 4)), False)
    order.finish((4, 4), (0, 0))
    assert (take(), order.ends_after(2)) == (([4, 5], 2, (4, 4)), True)
    order.finish((4, 2), (0, 1))
    assert take() == ([0], 0, (4, 0)), "the first one stands in"
    order.finish((3, 0), (1, 1))
    assert not order.holds(1)


def test_a_queue_of_unknown_length_counts_on_where_an_iteration_holds_several_epochs():
    """As with steps_per_epoch, which has fit go on in one iteration."""
    balancer = Balancer(StaticAllocation([1, 1]), 0, 2, 8, clock=itertools.count().__next__)
    reader = StreamReader(DatasetSource(RANGE(10).filter(lambda i: True)))
    queue = RoundQueue(SharedStream(reader.samples), balancer, reader.batch_of)
    assert queue.rounds is None
    got = []
    for index in range(4):
        queue.prepare(new=index == 0)
        got.append(numbers(queue.part(index)))
        cut = queue.take()
        queue.finish(table(cut.plan.samples))
        assert queue.at_end == (index % 2 == 1)
    assert got == [[0, 1, 2, 3], [8], [0, 1, 2, 3], [8]]


def test_a_stream_goes_on_where_another_stood():
    one, other = (Whole(DatasetSource(RANGE(20).filter(lambda i: True))) for _ in range(2))
    plan = RoundPlan.of([3, 4])
    one.order.start(2)
    one.take(plan)
    one.order.finish(plan.samples)
    other.order.load_state_dict(one.order.state_dict())
    assert other.take(plan) == one.take(plan) == [7, 8, 9]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("epoch", [0, 1], ids=["at all", "again"])
def test_a_stream_without_samples_is_refused(whole, epoch):
    left = iter([[1, 2]] if epoch else [])
    source = tf.data.Dataset.from_generator(lambda: next(left, []), output_signature=tf.TensorSpec((), tf.int64))
    reader = StreamReader(DatasetSource(source))
    order = SharedStream(reader.samples) if whole else EndingShard(reader.samples, 0, 1)
    for number in range(epoch):
        order.start(number)
        order.take(RoundPlan.of([2]), 0)
    order.start(epoch)

    def one_round():
        cut = order.take(RoundPlan.of([2]), 0)
        assert cut.samples == 0
        assert len(numbers(reader.batch_of(cut.part))) == 1, "of zeros, or of an earlier epoch"
        order.finish((0,), (True,))  # of a shard without samples the others hear by the table of the round

    where = "every rank" if whole else "rank 0"
    with pytest.raises(ValueError, match=rf"epoch {epoch} .*{where}.*read again"):
        one_round()


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (lambda: RANGE(9).shuffle(3), r"seed.*shuffle\(…, seed=…\).*stream='shard'"),
        (lambda: RANGE(9).shuffle(3).map(abs).filter(lambda i: True), r"shuffle\(…, seed=…\)"),
        (lambda: tf.data.Dataset.list_files("/dev/n*l*"), r"list_files\(…, seed=…\)"),
        (lambda: RANGE(9).map(abs, num_parallel_calls=2, deterministic=False), "deterministic=False"),
        (lambda: RANGE(9).shard(2, 1).map(abs), r"shard\(2, 1\).*stream='shard'.*stream='whole'"),
    ],
    ids=["shuffle", "behind others", "files", "map", "shard"],
)
def test_datasets_that_ranks_would_not_read_alike_are_refused(samples, message):
    tf.random.set_seed(None)
    with pytest.raises(ValueError, match=message):
        check_alike(samples(), 1, 2, certain=False)
    check_alike(samples(), 0, 1, certain=False)  # there is only one rank


def test_shuffles_by_the_same_seed_agree_unless_the_global_seed_differs():
    samples = lambda: RANGE(9).shuffle(3, seed=4).shard(2, 1)  # noqa: E731
    tf.random.set_seed(None)
    same = [check_alike(samples(), 1, 2, certain=True) for _ in range(2)]
    tf.random.set_seed(7)
    assert same[0] == same[1] != check_alike(samples(), 1, 2, certain=True)


class Batches(keras.utils.Sequence):
    """Three batches of unlike length, as (x, y, None)."""

    def __init__(self):
        super().__init__()
        self.epochs = 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        x = np.arange(4 * index, 4 * index + (4 if index < 2 else 2))
        return x.astype("float32")[:, None], x, None

    def on_epoch_end(self):
        self.epochs += 1


def test_a_sequence_of_batches_is_taken_apart_and_told_when_an_epoch_is_over():
    batches = Batches()
    assert is_sequence(batches)
    stream, plan = Whole(SequenceSource(batches)), RoundPlan.of([7])
    batch = stream.reader.batch_of(stream.order.take(plan, 0).part)
    assert [part.numpy().ravel().tolist() for part in batch] == [list(range(7))] * 2
    assert batches.epochs == 0
    assert stream.take(plan) == [[7.0], [8.0], [9.0]]
    assert not stream.order.holds(1)
    assert batches.epochs == 1
    shuffled = [
        [int(i) for chunk in SequenceSource(batches, seed=1).chunks(epoch) for i in chunk[1]] for epoch in range(4)
    ]
    assert len({tuple(epoch) for epoch in shuffled}) > 1
    assert all(sorted(epoch) == list(range(10)) for epoch in shuffled)


@pytest.mark.skipif(not hasattr(keras.utils, "PyDataset"), reason="tf_keras knows sequences by their length alone")
def test_a_sequence_may_say_its_number_of_batches_without_len_and_must_have_one():
    class Counted(keras.utils.PyDataset):
        def __init__(self, number):
            super().__init__()
            self.number = number

        @property
        def num_batches(self):
            return self.number

        def __getitem__(self, index):
            return np.float32([[index]]), np.float32([[index]])

    assert fit(Counted(9), epochs=2) == [6, 2]
    for number in (None, 0):
        with pytest.raises(ValueError, match=rf"data.* {number} batches.*from_generator\(function"):
            SequenceSource(Counted(number))


def model():
    inputs = keras.layers.Input((1,))
    made = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    made.compile("sgd", "mse")
    return made


def generated(**of):
    def generate():
        yield from ((np.float32([i]), np.float32([i])) for i in range(10))

    return tf.data.Dataset.from_generator(generate, output_signature=(tf.TensorSpec((1,)), tf.TensorSpec((1,))))


def fit(data, *, change=lambda batches: batches, stream=None, **options):
    balance = LoadBalance("bsp", global_batch=4)
    batches = change(resize_batches(data, balance, stream=stream))
    history = model().fit(batches, verbose=0, shuffle=False, callbacks=[balance], **options)
    return [balance.rounds, len(history.history["loss"])]


@pytest.mark.parametrize("stream", ["whole", "shard"])
def test_fit_ends_every_epoch_of_a_generator(stream):
    assert fit(generated(), stream=stream, epochs=3) == [9, 3]


def test_fit_takes_a_sequence():
    assert fit(Batches(), epochs=2) == [6, 2]


def test_fit_goes_on_for_as_many_steps_as_it_is_told():
    assert fit(generated(), epochs=3, steps_per_epoch=2) == [5, 3], "the second epoch ends where the data do"
    assert fit(generated().repeat(), epochs=3, steps_per_epoch=5) == [15, 3]


@pytest.mark.parametrize(
    "endless",
    [
        lambda: {"data": generated().repeat()},
        lambda: {"data": generated(), "change": lambda batches: batches.repeat()},
        lambda: {"data": (np.ones((8, 1)), np.ones((8, 1))), "change": lambda batches: batches.repeat()},
    ],
    ids=["samples", "batches", "arrays"],
)
def test_endless_data_need_the_steps_of_an_epoch(endless):
    # tf_keras has an error of its own.
    with pytest.raises(ValueError, match=r"steps_per_epoch.*repeat\(\)|must specify the number"):
        fit(**endless())


def test_stream_is_for_streams():
    balance = LoadBalance("bsp", global_batch=4)
    with pytest.raises(ValueError, match=r"stream.* 'all'"):
        resize_batches(generated(), balance, stream="all")
    with pytest.raises(ValueError, match=r"stream.* 'whole' .*ndarray"):
        resize_batches(np.ones((8, 1)), balance, stream="whole")


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
    balance = LoadBalance("bsp", global_batch=8)
    model.fit(resize_batches(buckets, balance, padding_values=0), verbose=0, shuffle=False, callbacks=[balance])
    assert traces == [(None, None)]
    assert balance.rounds == -(-len(LENGTHS) // 8)
    first = next(iter(resize_batches(buckets, LoadBalance("bsp", global_batch=8), padding_values=0)))[0].numpy()
    assert first.shape[1] - min((row > 0).sum() for row in first) < 16


def test_samples_that_differ_in_shape_are_told_of_padding():
    with pytest.raises(ValueError, match=r"shape.*padding_values=0"):
        list(DatasetSource(sentences()).chunks(0))
    balance = LoadBalance("bsp", global_batch=8)
    with pytest.raises(ValueError, match=r"padding_values.* 0 .*tup"):
        resize_batches((np.ones((3, 1)), np.ones(3)), balance, padding_values=0)
    with pytest.raises(ValueError, match=r"padding_values.* 4 "):
        resize_batches(sentences(), balance, padding_values=(0, 0))

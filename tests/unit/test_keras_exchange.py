"""What leaves in the graph together, and what it waits for: read off the graph, without a clock."""

from __future__ import annotations

import pytest

hvd = pytest.importorskip("horovod.tensorflow")
import tensorflow as tf  # noqa: E402 - imported by Horovod if it is there

from keras_callbacks import LoadBalance  # noqa: E402
from keras_callbacks.exchange import AllReduce  # noqa: E402

MIB = 2**18
"""float32 numbers"""


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


def collectives(*lengths):
    return of(*(tf.TensorSpec((length,), tf.float32) for length in lengths))


def of(*specs):
    """Each collective of a round with such gradients: what it holds, what it waits for, and its type.

    Gradients are told by their numbers, the table by "table".
    """
    exchange = AllReduce(LoadBalance("bsp", global_batch=4))
    round_ = tf.function(lambda *g: exchange(list(g), tf.constant(0.5, tf.float64)))
    graph = round_.get_concrete_function(*specs).graph
    numbers = {tensor.op.name: i for i, tensor in enumerate(graph.inputs)}
    found = []
    for operation in graph.get_operations():
        if operation.type == "HorovodGroupedAllreduce":
            assert "HorovodAllreduce" in operation.name, "by which elastic mode knows it"
            holds = [numbers.get(source(t).name, "table") for t in operation.inputs]
            waits_for = {numbers[o.name] for o in ancestors(operation) if o.name in numbers}
            found.append((holds, waits_for, operation.inputs[0].dtype))
    return found


def source(tensor):
    """The gradient, or the call, that a tensor is the first operand of."""
    while tensor.op.inputs and tensor.op.type not in ("PyFunc", "EagerPyFunc"):
        tensor = tensor.op.inputs[0]
    return tensor.op


def ancestors(operation):
    seen, open_ = set(), [operation]
    while open_:
        new = [t.op for t in open_[-1].inputs] + list(open_.pop().control_inputs)
        open_ += [o for o in new if o not in seen]
        seen.update(new)
    return seen


def test_a_bucket_waits_for_its_own_gradients_alone_and_the_table_for_all():
    found = collectives(*[MIB // 2] * 40)
    assert len(found) > 3
    for holds, waits_for, _ in found[:-1]:
        assert "table" not in holds
        assert waits_for == set(holds)
    holds, waits_for, _ = found[-1]
    assert holds[-1] == "table"
    assert waits_for == set(range(40))
    assert sorted(i for held, _, _ in found for i in held if i != "table") == list(range(40))


def test_the_last_variables_leave_first():
    assert collectives(8, 2 * MIB, 8, 2 * MIB)[0][0] == [3]


def test_a_large_gradient_travels_by_itself_and_does_not_take_the_table():
    found = collectives(2 * MIB, 8, 2 * MIB, 8)
    assert [holds for holds, _, _ in found] == [[2], [3, 1], [0], ["table"]]
    assert found[-1][2] == tf.float64, "of another type, so that Horovod does not fuse it with what leaves beside it"


def test_gradients_of_different_types_do_not_share_a_collective():
    found = of(*(tf.TensorSpec((4,), dtype) for dtype in (tf.float16, tf.float32, tf.float64, tf.float16)))
    assert [holds for holds, _, _ in found] == [[2], [1], [3, 0], ["table"]]


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_the_table_is_fused_with_a_small_last_bucket(dtype):
    (only,) = of(tf.TensorSpec((4, 4), dtype), tf.TensorSpec((4,), dtype))
    assert only == ([1, 0, "table"], {0, 1}, dtype)

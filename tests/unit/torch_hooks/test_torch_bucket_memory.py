"""Gradients that leave together: where they lie, by what they are multiplied, and what nobody may find changed."""

import math
import weakref

import pytest
import torch

from hvd_hetero.errors import RoundStateError
from torch_hooks.gradients.buckets import Bucket, Gradient
from torch_hooks.gradients.memory import BucketMemory


def parameters() -> list[torch.nn.Parameter]:
    """Plain, channels last, transposed, a single number, and nothing at all."""
    tensors = (
        torch.zeros(3, 5),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(4, 3).t(),
        torch.zeros(()),
        torch.zeros(0, 2),
    )
    return [torch.nn.Parameter(tensor) for tensor in tensors]


@pytest.fixture(autouse=True, params=[1, 100, 1 << 17], ids=["all large", "some large", "none large"])
def large(request, monkeypatch):
    monkeypatch.setattr("torch_hooks.gradients.buckets._LARGE", request.param)


def bucket_of(parameters: list[torch.nn.Parameter]) -> Bucket:
    return Bucket("bucket", [Gradient(parameter) for parameter in parameters])


def backward(parameters: list[torch.nn.Parameter], value: float) -> None:
    """As zero_grad(set_to_none=True) and a backward pass leave them."""
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, value)


def a_round(bucket: Bucket, parameters: list[torch.nn.Parameter], value: float, factor: float = 1.0) -> torch.Tensor:
    """Returns what left."""
    backward(parameters, value)
    _, wire = bucket.fill(factor)
    bucket.forget()
    return wire


def test_each_lies_as_its_parameter_does_and_none_in_the_place_of_another():
    given = parameters()
    memory = BucketMemory(given)
    for number, (parameter, slot) in enumerate(zip(given, memory.slots, strict=True), start=1):
        assert slot.shape == parameter.shape
        assert slot.stride() == parameter.stride()
        slot.fill_(number)
    for number, parameter in enumerate(given, start=1):
        assert int((memory.whole == number).sum()) == parameter.numel()
    assert int((memory.whole == 0).sum()) == memory.whole.numel() - sum(p.numel() for p in given)


def test_a_change_of_one_is_not_a_change_of_another():
    memory = BucketMemory(parameters())
    before = [slot._version for slot in memory.slots]
    memory.slots[1].add_(1)
    assert [slot._version - was for slot, was in zip(memory.slots, before, strict=True)] == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("factor", [1.0, 0.25, 0.0])
def test_what_leaves_is_multiplied_once_and_is_the_gradient(factor):
    given = parameters()
    bucket = bucket_of(given)
    backward(given, 2.0)
    given[2].grad = None  # none arose
    gradients, wire = bucket.fill(factor)
    assert all(p.grad is gradient for p, gradient in zip(given, gradients, strict=True))
    for number, gradient in enumerate(gradients):
        assert torch.equal(gradient, torch.full_like(gradient, 0.0 if number == 2 else 2.0 * factor))
    wire.add_(1.0)  # as the sum over the ranks would
    for number, gradient in enumerate(gradients):
        assert (gradient == (1.0 if number == 2 else 2.0 * factor + 1.0)).all()


def test_a_mean_over_no_samples_counts_as_zeros():
    given = parameters()
    bucket = bucket_of(given)
    backward(given, math.nan)
    assert not bucket.fill(0.0)[1].any()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_by_rows_and_such_as_have_a_graph_leave_as_plain_numbers():
    given = [torch.nn.Parameter(torch.ones(4, 2)), torch.nn.Parameter(torch.ones(4))]
    bucket = bucket_of(given)
    given[0].grad = torch.eye(4, 2).to_sparse()
    (given[1] ** 2).sum().backward(create_graph=True)
    assert given[1].grad.requires_grad
    bucket.fill(0.5)
    assert torch.equal(given[0].grad, torch.eye(4, 2) / 2)
    assert torch.equal(given[1].grad, torch.ones(4))
    assert not given[1].grad.requires_grad
    given[1].grad = None  # whose graph refers to the parameter


def test_memory_serves_in_every_round_so_that_a_kept_gradient_is_the_next_one_too():
    given = parameters()[:3]
    bucket = bucket_of(given)
    first = a_round(bucket, given, 1.0, 0.5)
    kept, cloned = given[1].grad, given[1].grad.clone()
    assert all(a_round(bucket, given, 2.0, 0.5) is first for _ in range(3))
    assert kept is given[1].grad
    assert (kept == 1.0).all()
    assert (cloned == 0.5).all()


def test_a_gradient_that_is_added_to_in_its_place_stays_there():
    given = parameters()[:3]
    bucket = bucket_of(given)
    first = a_round(bucket, given, 1.0)
    for _ in range(3):
        for parameter in given:  # zero_grad(set_to_none=False), and a backward pass
            parameter.grad.zero_()
            parameter.grad.add_(3.0)
        gradients, wire = bucket.fill(0.5)
        bucket.forget()
        assert wire is first
        assert all((gradient == 1.5).all() for gradient in gradients)


def test_parameters_that_lie_otherwise_have_gradients_that_lie_as_they_do():
    given = [torch.nn.Parameter(torch.zeros(2, 3, 4, 5)), torch.nn.Parameter(torch.zeros(3))]
    bucket = bucket_of(given)
    a_round(bucket, given, 1.0)
    given[0].data = given[0].data.to(memory_format=torch.channels_last)
    a_round(bucket, given, 1.0)
    assert given[0].grad.stride() == given[0].stride()
    for parameter in given:
        parameter.grad = None
        parameter.data = parameter.data.to(torch.float64)
    assert a_round(bucket, given, 1.0).dtype == torch.float64
    given[1].grad, given[1].data = None, torch.zeros(30, dtype=torch.float64)  # of another length, and the same stride
    a_round(bucket, given, 1.0, 0.5)
    assert (given[0].grad == 0.5).all()
    assert given[1].grad.shape == (30,)


def to_and_fro(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:  # as model.double(), model.float() do; model.cpu(), model.cuda() alike
        for dtype in (torch.float64, torch.float32):
            parameter.data = parameter.data.to(dtype)
            parameter.grad.data = parameter.grad.data.to(dtype)


def scaled_by_data(parameters: list[torch.nn.Parameter]) -> None:
    parameters[1].grad.data = parameters[1].grad.data * 2


def replaced_by_data(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """With the former memory kept, so that as many refer to it as before."""
    gradient = parameters[0].grad.data
    parameters[0].grad.data = gradient * 2
    return gradient


@pytest.mark.parametrize("what", [to_and_fro, scaled_by_data, replaced_by_data])
def test_gradients_that_were_taken_from_their_places_do_not_leave_the_next_ones_behind(what):
    given = parameters()[:3]
    bucket = bucket_of(given)
    a_round(bucket, given, 1.0)
    kept = what(given)
    for value in (2.0, 3.0):
        assert kept is None or (kept == 1.0).all()
        wire = a_round(bucket, given, value)
        assert int((wire == value).sum()) == sum(p.numel() for p in given)
        wire.add_(1.0)
        assert all((p.grad == value + 1.0).all() for p in given)


def test_one_that_is_taken_from_its_place_before_the_sum_is_there_is_found_out():
    given = parameters()[:3]
    bucket = bucket_of(given)
    backward(given, 1.0)
    bucket.fill(1.0)
    assert not bucket.moved()
    scaled_by_data(given)
    assert [member.parameter for member in bucket.moved()] == [given[1]]


def test_a_gradient_that_leaves_alone_is_freed_by_zero_grad():
    given = [torch.nn.Parameter(torch.zeros(5, 3).t())]
    bucket = bucket_of(given)
    assert bucket.fill(0.5)[1].data_ptr() == given[0].grad.data_ptr()
    gradient = weakref.ref(given[0].grad)
    given[0].grad = None
    assert gradient() is None


@pytest.mark.parametrize("lies", ["plain", "otherwise"])
def test_a_gradient_that_leaves_alone_stays_where_it_is(lies):
    given = [torch.nn.Parameter(torch.zeros(5, 3) if lies == "plain" else torch.zeros(3, 5).t())]
    bucket = bucket_of(given)
    a_round(bucket, given, 1.0, 0.5)
    where = given[0].grad.data_ptr()
    for _ in range(3):
        given[0].grad.zero_()
        given[0].grad.add_(1.0)
        bucket.fill(0.5)
        bucket.forget()
        assert given[0].grad.data_ptr() == where
        assert (given[0].grad == 0.5).all()


def test_places_for_which_there_was_no_memory_are_asked_for_again(monkeypatch):
    given = parameters()[:3]
    bucket = bucket_of(given)
    a_round(bucket, given, 1.0)
    bucket.release()

    def fails(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("torch_hooks.gradients.buckets.BucketMemory", fails)
        with pytest.raises(MemoryError):
            a_round(bucket, given, 2.0)
    assert int((a_round(bucket, given, 2.0) == 2.0).sum()) == sum(p.numel() for p in given)


def test_what_travels_along_has_room_behind_the_gradients_also_of_one_alone():
    for given in (parameters()[:3], parameters()[:1]):
        bucket = bucket_of(given)
        bucket.carry(5)
        for value in (1.0, 2.0):
            backward(given, value)
            gradients, wire = bucket.fill(0.5)
            bucket.room.fill_(7.0)
            assert (wire[-5:] == 7.0).all()
            assert all((gradient == 0.5 * value).all() for gradient in gradients)
            assert not bucket.nothing().any()
            assert len(bucket.nothing()) == len(wire)
            bucket.forget()


def test_gradients_of_several_types_do_not_travel_together():
    given = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))]
    bucket = bucket_of(given)
    given[1].data = given[1].data.double()
    with pytest.raises(RoundStateError, match="different types"):
        bucket.open()

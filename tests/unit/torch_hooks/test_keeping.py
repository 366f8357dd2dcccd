"""Copies of states into the memory of the copy before."""

import copy

import pytest
import torch

from torch_hooks.parameters.keeping import copied


def trained(steps, model=None):
    torch.manual_seed(0)
    model = model or torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def addresses(state):
    return [value.data_ptr() for value in state["model"].values()] + [
        value.data_ptr() for each in state["optimizer"]["state"].values() for value in each.values()
    ]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_a_copy_takes_the_memory_of_the_one_before_and_is_the_same_as_a_new_one():
    first = copied(trained(1))
    where = addresses(first)
    state = trained(5)
    second = copied(state, first)
    assert same(second, copy.deepcopy(state))
    assert addresses(second) == where
    assert second["model"]._metadata == state["model"]._metadata, "versions of modules, which load_state_dict reads"


def test_states_that_appear_later_and_go_again_are_copied_anew():
    fresh, used = trained(0), trained(2)  # an optimizer has no state before its first step
    assert same(copied(used, copied(fresh)), used)
    assert same(copied(fresh, copied(used)), fresh)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (torch.zeros(3), torch.ones(3, dtype=torch.float64)),
        (torch.zeros(2, 3), torch.ones(3, 2).t()),
        (torch.zeros(3), torch.ones(3).to_sparse()),
        (torch.zeros(3), torch.nn.Parameter(torch.ones(3))),
        (None, torch.ones(3)),
        ([torch.zeros(1)], [torch.ones(1), torch.ones(2)]),
    ],
)
def test_what_does_not_fit_is_copied_anew(before, now):
    kept = copied(now, before)
    assert kept is not before
    assert type(kept) is type(now)
    as_dense = [
        part.to_dense() if isinstance(part, torch.Tensor) and part.is_sparse else part for part in (kept, now)
    ]  # fmt: skip
    assert same(*as_dense)


def test_tensors_that_shared_their_memory_once_are_copied_each_for_itself_when_they_no_longer_do():
    best = torch.zeros(2)
    first = copied({"best": best, "last": best})
    state = {"best": torch.ones(2), "last": torch.zeros(2)}
    assert same(second := copied(state, first), state)
    state = {"best": torch.ones(2), "last": torch.full((2,), 3.0)}
    assert same(copied(state, second), state)


@pytest.mark.parametrize("kind", [lambda value: [value], lambda value: {"rate": value}], ids=["list", "dict"])
def test_a_dict_or_a_list_that_was_there_twice_is_copied_each_for_itself_when_they_are_two(kind):
    scores = kind(1)
    first = copied({"best": scores, "last": scores})
    state = {"best": kind(2), "last": kind(3)}
    assert same(copied(state, first), state)


def test_tied_weights_share_one_copy_from_commit_to_commit():
    weight = torch.zeros(2)
    kept = copied({"in": weight, "out": weight, "part": weight[1:]})
    weight.add_(1.0)
    again = copied({"in": weight, "out": weight, "part": weight[1:]}, kept)
    assert same(again, {"in": weight, "out": weight, "part": weight[1:]})
    assert again["in"].data_ptr() == again["out"].data_ptr() == again["part"].data_ptr() - 4


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(1).expand(3), torch.zeros(3, requires_grad=True), torch.nn.Parameter(torch.zeros(3))],
    ids=["expanded", "of a graph", "a parameter"],
)
def test_memory_that_cannot_be_written_to_is_not_used_again(tensor):
    kept = copied({"tensor": tensor})
    assert same(copied({"tensor": tensor}, kept), {"tensor": tensor})

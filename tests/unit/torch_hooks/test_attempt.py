"""What is undone when memory runs short: gradients of this micro-batch go, earlier ones come back, sent ones stay."""

from __future__ import annotations

import pytest
import torch

from torch_hooks.gradients.attempt import Attempt


def parameters(*gradients: float | None) -> list[torch.Tensor]:
    made = []
    for gradient in gradients:
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = None if gradient is None else torch.full((2,), gradient)
        made.append(parameter)
    return made


def add(attempt: Attempt, parameter: torch.Tensor) -> bool:
    """As a backward pass does, and then its hook."""
    parameter.grad = torch.ones(2) if parameter.grad is None else parameter.grad.add_(1.0)
    return attempt.touch(parameter)


def values(of: list[torch.Tensor]) -> list[float | None]:
    return [None if p.grad is None else float(p.grad[0]) for p in of]


def test_the_first_micro_batch_leaves_nothing():
    attempt, own = Attempt(), parameters(None, None, None)
    attempt.begin()
    add(attempt, own[2])
    assert attempt.undo(own, (), accumulating=False)
    assert values(own) == [None, None, None]


def test_a_later_one_gives_back_what_earlier_ones_have_gathered():
    attempt, own = Attempt(), parameters(3.0, 5.0, None)
    attempt.begin()
    attempt.guard(own)
    add(attempt, own[1])
    add(attempt, own[2])
    assert attempt.undo(own, (), accumulating=True)
    assert values(own) == [3.0, 5.0, None]


@pytest.mark.parametrize("accumulating", [False, True])
def test_a_gradient_that_has_left_is_not_wanted_again_until_the_round_is_over(accumulating):
    attempt, own = Attempt(), parameters(*((3.0, 5.0) if accumulating else (None, None)))
    attempt.begin()
    attempt.guard(own)
    assert add(attempt, own[1])
    assert attempt.undo(own, [own[1]], accumulating=accumulating)
    assert values(own) == [3.0 if accumulating else None, None]
    attempt.begin()
    assert not add(attempt, own[1])
    assert values(own)[1] is None, "and its memory is free at once"
    assert add(attempt, own[0])
    attempt.round_over()
    attempt.begin()
    assert add(attempt, own[1])


def test_a_sum_that_was_added_to_without_a_copy_cannot_be_undone():
    attempt, own = Attempt(), parameters(3.0, 5.0)
    attempt.begin()
    add(attempt, own[0])
    assert not attempt.undo(own, (), accumulating=True)


def test_memory_that_ends_while_copying_has_changed_nothing():
    attempt, own = Attempt(), parameters(3.0, 5.0)

    def failing():
        yield own[0]
        raise MemoryError

    attempt.begin()
    with pytest.raises(MemoryError):
        attempt.guard(failing())
    assert attempt.undo(own, (), accumulating=True)
    assert values(own) == [3.0, 5.0]


def test_from_the_step_on_nothing_is_open_to_be_undone():
    attempt = Attempt()
    attempt.begin()
    assert attempt.open
    attempt.over()
    assert not attempt.open

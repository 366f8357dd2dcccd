"""Whatever is done to one tensor alone shows within as many rounds as there are tensors."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hvd_hetero.consistency import PIECE  # noqa: E402
from torch_hooks.gradients.parameter_norm import ParameterNorm  # noqa: E402

TOLERANCE = 1e-3  # of the agreement between ranks


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(4)

    def drawn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    large, filters = drawn(3 * PIECE + 5), drawn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    return [drawn(8, 4), torch.zeros(8, dtype=dtype), large, filters, drawn(6, 8).t(), torch.ones(7, dtype=dtype)]


def shown(of, rounds):
    sketch = ParameterNorm({tensor: str(number) for number, tensor in enumerate(of)})
    return torch.tensor([sketch.at(round) for round in range(rounds)], dtype=torch.float64)


def differ(a, b, rounds):
    a, b = shown(a, rounds)[:, 0], shown(b, rounds)[:, 0]
    return bool(((a - b).abs() > TOLERANCE * b.abs()).any())


def scaled(tensor):
    tensor.mul_(0.99)


def moved(tensor):
    tensor.add_(0.1)


def negated(tensor):
    tensor.neg_()


def swapped(tensor):
    numbers = tensor.flatten()
    tensor.copy_(numbers.roll(1).view_as(tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("change", [scaled, moved, negated, swapped])
def test_a_change_of_one_tensor_is_seen(change, dtype):
    here, there = tensors(dtype), tensors(dtype)
    assert not differ(here, there, len(here))
    for number in range(len(here)):
        there = tensors(dtype)
        change(there[number])
        if not torch.equal(here[number], there[number]):
            assert differ(here, there, len(here)), number


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_millionth_of_one_tensor_shows_in_the_bits(dtype):
    here = tensors(dtype)
    for number in range(len(here)):
        there = tensors(dtype)
        there[number] *= 1 + 1e-6
        same = shown(here, len(here))[:, 1] == shown(there, len(here))[:, 1]
        assert (~same).nonzero().flatten().tolist() == ([] if torch.equal(here[number], there[number]) else [number])


def test_every_piece_has_its_turn():
    here, pieces = tensors(), -(-(3 * PIECE + 5) // PIECE)
    for piece in range(pieces):
        there = tensors()
        there[2][piece * PIECE :][:PIECE] *= 1.5
        assert differ(here, there, pieces * len(here))


def test_the_bits_do_not_depend_on_where_the_numbers_lie():
    here = tensors()
    for offset in range(1, 8):
        there = []
        for tensor in here:
            memory = torch.empty(tensor.numel() + offset)
            laid = torch.empty(0).set_(memory.untyped_storage(), offset, tensor.shape, tensor.stride())
            there.append(laid.copy_(tensor))
        assert torch.equal(shown(here, 24), shown(there, 24))


def test_what_cannot_be_shown_is_zero_and_keeps_its_turn():
    here = tensors()
    there = [tensor.to("meta") if number == 2 else tensor for number, tensor in enumerate(here)]
    without = shown(there, 12)
    assert without[[2, 8]].tolist() == [[0.0, 0.0]] * 2
    others = [round for round in range(12) if round not in (2, 8)]
    assert (without[others, 0] != 0).all()
    assert torch.equal(without[others], shown(here, 12)[others])
    assert ParameterNorm({torch.zeros(0): "a", torch.ones(3, dtype=torch.int64): "b"}).at(5) == (0.0, 0.0)

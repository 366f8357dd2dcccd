"""What a batch holds of the samples that collate_fn was given: as the user says, and not in silence if nobody does."""

from __future__ import annotations

import logging
import re

import pytest

torch = pytest.importorskip("torch")

from torch_hooks.data.counting import Collate, Weights  # noqa: E402


def test_no_samples_make_no_batch():
    assert Collate(None, counted=False)([]) is None


def test_samples_that_are_none_need_somebody_who_counts():
    samples = [torch.ones(2), None, torch.ones(2)]
    skip = lambda samples: torch.stack([s for s in samples if s is not None])  # noqa: E731
    with pytest.raises(ValueError, match=r"collate_fn.* 1 of 3 .*weight_of=lambda batch"):
        Collate(skip, counted=False)(samples)
    assert len(Collate(skip, counted=True)(samples)) == 2
    assert Weights(len, own_collate=True)(skip(samples), 3) == 2


@pytest.mark.parametrize("returned", [-1, float("nan"), float("inf"), "many", None])
def test_weights_that_cannot_be_are_refused(returned):
    with pytest.raises(ValueError, match=r"weight_of .*batch of 3 samples"):
        Weights(lambda batch: returned, own_collate=True)([], 3)


def test_a_function_that_fails_is_named_with_its_error():
    with pytest.raises(ValueError, match=r"weight_of failed .*KeyError: 'labels'"):
        Weights(lambda batch: batch["labels"], own_collate=False)({}, 3)


@pytest.mark.parametrize("returned", [0, 4, 2.5, torch.tensor(7), torch.tensor([7.0])])
def test_any_number_may_be_a_weight(returned):
    assert Weights(lambda batch: returned, own_collate=True)([], 3) == float(returned)


@pytest.mark.parametrize(
    ("batch", "suspicious"),
    [
        ((torch.ones(5, 7), torch.ones(5)), True),
        ({"x": torch.ones(5, 2), "y": [torch.ones(5)]}, True),
        ((torch.ones(8, 7), torch.ones(8)), False),  # padded
        ((torch.ones(5, 8, 3), torch.ones(8)), False),  # time comes first
        ((torch.ones(1, 90), torch.ones(1, 90)), False),  # one packed sequence
        ((torch.ones(90, 3), torch.ones(2, 200), torch.ones(90)), False),  # graphs
        ((torch.ones(5, 7), torch.tensor(5)), False),
        ("no tensors", False),
    ],
)
def test_tensors_with_fewer_rows_than_samples_are_pointed_at_once(batch, suspicious, caplog):
    weigh = Weights(None, own_collate=True)
    with caplog.at_level(logging.WARNING):
        assert [weigh(batch, 8) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == suspicious
    if suspicious:
        assert re.search("given 8 samples .* of 5 rows: if it leaves samples out.*weight_of", caplog.text)


def test_nobody_is_warned_who_says_how_many_or_leaves_collating_alone(caplog):
    batch = torch.ones(5, 7)
    assert Weights(len, own_collate=True)(batch, 8) == 5
    assert Weights(None, own_collate=False)(batch, 8) is None
    assert not caplog.records

"""What a batch holds of the samples that collate_fn was given: as the user says, and not in silence if nobody does."""

from __future__ import annotations

import logging
import re

import pytest

torch = pytest.importorskip("torch")

from torch_hooks.data.counting import Collate, Counter  # noqa: E402


def test_no_samples_make_no_batch():
    assert Collate(None, counted=False)([]) is None


def test_samples_that_are_none_need_somebody_who_counts():
    samples = [torch.ones(2), None, torch.ones(2)]
    skip = lambda samples: torch.stack([s for s in samples if s is not None])  # noqa: E731
    with pytest.raises(ValueError, match=r"collate_fn must use all.* 1 of 3 are None here; .*samples_of=lambda batch"):
        Collate(skip, counted=False)(samples)
    assert len(Collate(skip, counted=True)(samples)) == 2
    assert Counter(len, own_collate=True)(skip(samples), 3, required=True) == 2


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (4, "what samples_of returns must be at least 0 and below 4, got 4; return how many of the 3"),
        (-1, "what samples_of returns must be at least 0, got -1"),
        (2.0, r"what samples_of returns must be an integer, got 2\.0 .*return how many"),
        (True, "what samples_of returns must be an integer, got True"),
    ],
)
def test_numbers_that_cannot_be_are_refused(returned, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Counter(lambda batch: returned, own_collate=True)([], 3, required=False)


def test_a_batch_may_hold_nothing_but_where_other_ranks_wait_for_it_in_a_layer():
    nothing = Counter(lambda batch: 0, own_collate=True)
    assert nothing([], 3, required=False) == 0
    with pytest.raises(ValueError, match=r"must be at least 1 with SyncBatchNorm.*got 0 of 3 samples; .*GroupNorm"):
        nothing([], 3, required=True)


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
    counter = Counter(None, own_collate=True)
    with caplog.at_level(logging.WARNING):
        assert [counter(batch, 8, required=False) for _ in range(3)] == [8, 8, 8]
    assert len(caplog.records) == suspicious
    if suspicious:
        assert re.search("given 8 samples .* of 5 rows: if it leaves samples out.*samples_of", caplog.text)


def test_nobody_is_warned_who_says_how_many_or_leaves_collating_alone(caplog):
    batch = torch.ones(5, 7)
    assert Counter(len, own_collate=True)(batch, 8, required=False) == 5
    assert Counter(None, own_collate=False)(batch, 8, required=False) == 8
    assert not caplog.records

"""What a batch holds of the samples that collate_fn was given: as the user says, and not in silence if nobody does."""

from __future__ import annotations

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
    assert Weights(len)(skip(samples), 3) == 2


@pytest.mark.parametrize("returned", [-1, float("nan"), float("inf")])
def test_weights_that_cannot_be_are_refused(returned):
    with pytest.raises(ValueError, match=r"weight_of .*batch of 3 samples"):
        Weights(lambda batch: returned)([], 3)


@pytest.mark.parametrize("returned", [0, 4, 2.5, torch.tensor(7), torch.tensor([7.0])])
def test_any_number_may_be_a_weight(returned):
    assert Weights(lambda batch: returned)([], 3) == float(returned)

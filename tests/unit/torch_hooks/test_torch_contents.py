"""Ranks that hold other samples at the same indices are told from ranks that hold the same ones."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import Subset, TensorDataset  # noqa: E402

from hvd_hetero.data.same_data import drawn_rows, ranks_with_other_data  # noqa: E402
from torch_hooks.data.contents import rows_at  # noqa: E402

SAMPLES = 200
X = torch.randn(SAMPLES, 3, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(SAMPLES) % 2
WHOLE = TensorDataset(X, LABELS)


def told(dataset):
    return drawn_rows(len(dataset), lambda indices: rows_at(indices, dataset))


class Vision:
    """The data sets of torchvision hold these two."""

    def __init__(self, data, targets):
        self.data, self.targets = data, targets

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        raise AssertionError("no code of the user's runs")


IMAGES = np.random.default_rng(0).integers(0, 256, (SAMPLES, 28, 28), dtype=np.uint8)
SHARDED = {
    "tensors": [TensorDataset(X[rank::2], LABELS[rank::2]) for rank in range(2)],
    "subset": [Subset(WHOLE, range(rank, SAMPLES, 2)) for rank in range(2)],
    "subset of something": [Subset(SimpleNamespace(), range(rank, SAMPLES, 2)) for rank in range(2)],
    "the same part of parts": [Subset(TensorDataset(X[rank::2]), list(range(50))) for rank in range(2)],
    "images": [Vision(IMAGES[rank::2], torch.zeros(100)) for rank in range(2)],
    "unseeded": [TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(r))) for r in range(2)],
}
ALIKE = {
    "the same": [WHOLE, TensorDataset(X.clone(), LABELS.clone())],
    "another processor": [WHOLE, TensorDataset(X * (1 + 1e-4 * torch.rand_like(X)), LABELS)],
    "a few mended": [WHOLE, TensorDataset(torch.cat([X[:150], X[150:] + 1]), LABELS)],
    "numbers that are none": [TensorDataset(torch.full((9, 2), torch.nan))] * 2,
    "subset": [Subset(WHOLE, range(0, SAMPLES, 2))] * 2,
    "one told, one not": [WHOLE, Vision(["path"] * SAMPLES, None)],
    "nothing told": [Vision(["a"] * 100, None), Vision(["b"] * 100, None)],
    "keys": [Subset({"a": 1, "b": 2}, ["a", "b"]), Subset({"a": 3, "b": 4}, ["b", "a"])],
    "no attributes": [range(100), range(100, 200)],
    "other lengths, seen elsewhere": [WHOLE, TensorDataset(X[:50], LABELS[:50])],
}


@pytest.mark.parametrize("name", SHARDED)
def test_data_sharded_by_hand_are_seen(name):
    assert ranks_with_other_data([told(each) for each in [SHARDED[name][0], *SHARDED[name]]]) == [2]


@pytest.mark.parametrize("name", ALIKE)
def test_data_that_are_the_same_or_not_known_are_left_alone(name):
    assert ranks_with_other_data([told(each) for each in ALIKE[name]]) == []

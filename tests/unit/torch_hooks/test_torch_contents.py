"""Ranks that hold other samples at the same indices are told from ranks that hold the same ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import Dataset, Subset, TensorDataset  # noqa: E402

from hvd_hetero.data.same_data import ranks_apart, show  # noqa: E402
from torch_hooks.data.contents import columns_of, require_alike  # noqa: E402

SAMPLES = 200
X = torch.randn(SAMPLES, 3, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(SAMPLES) % 2
WHOLE = TensorDataset(X, LABELS)


def told(dataset):
    return show(len(dataset), columns_of(dataset))


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
    "halves": [TensorDataset(X[part], LABELS[part]) for part in (slice(100), slice(100, 200))],
    "subset": [Subset(WHOLE, range(rank, SAMPLES, 2)) for rank in range(2)],
    "subset of something": [Subset(SimpleNamespace(), range(rank, SAMPLES, 2)) for rank in range(2)],
    "the same part of parts": [Subset(TensorDataset(X[rank::2]), list(range(50))) for rank in range(2)],
    "images": [Vision(IMAGES[rank::2], torch.zeros(100)) for rank in range(2)],
    "unseeded": [TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(r))) for r in range(2)],
    "bfloat16": [TensorDataset(X[rank::2].bfloat16()) for rank in range(2)],
    "complex": [TensorDataset(torch.complex(X, -X)[rank::2]) for rank in range(2)],
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
    assert ranks_apart([told(each) for each in [SHARDED[name][0], *SHARDED[name]]]) == [2]


@pytest.mark.parametrize("name", ALIKE)
def test_data_that_are_the_same_or_not_known_are_left_alone(name):
    assert ranks_apart([told(each) for each in ALIKE[name]]) == []


class Own(Dataset):
    def __init__(self, length=100, **attributes):
        self._length = length
        vars(self).update(attributes)

    def __len__(self):
        return self._length

    def __getitem__(self, i):
        raise AssertionError("no code of the user's runs")


FILES = [f"images/{number}.png" for number in range(SAMPLES)]
OWN_PARTS = {
    "x": lambda rank: Own(x=X[rank::2], y=LABELS[:100]),
    "files": lambda rank: Own(files=FILES[rank::2], transform=lambda x: x),
    "samples": lambda rank: Own(samples=list(zip(FILES, range(SAMPLES), strict=True))[rank::2]),
    "names": lambda rank: Own(names=np.array(FILES)[rank::2], none=np.array(3)),
    "table": lambda rank: Own(
        table=pytest.importorskip("pandas").DataFrame({"file": FILES, "label": range(SAMPLES)})[rank::2]
    ),
    "paths": lambda rank: Own(paths=tuple(map(Path, FILES[rank * 100 : rank * 100 + 100]))),
    "rank": lambda rank: Own(rank=rank, files=FILES),
    "dataset.records": lambda rank: Subset(
        Own(records=[{"text": f"{i}"} for i in range(rank, SAMPLES, 2)]), range(100)
    ),
    "inner.files": lambda rank: Own(50, inner=Own(files=FILES[rank::2])),
}
OWN_ALIKE = {
    "the same": lambda rank: Own(files=list(FILES[:100]), x=X[:100], epoch=3),
    "augmented by seeds of their own": lambda rank: Own(files=list(FILES[:100]), seed=3 + rank),
    "folders of their own": lambda rank: Own(files=[f"/scratch/{rank}/{i}.png" for i in range(100)]),
    "a few that were added": lambda rank: Own(labels=[i if i < 90 else rank for i in range(100)]),
    "objects": lambda rank: Own(objects=[object() for _ in range(100)], cache={rank: rank}, device=f"cuda:{rank}"),
    "on one rank alone": lambda rank: Own(**{f"x{rank}": X[rank::2]}),
}


def told_to_all(of_rank):
    parts = [of_rank(rank) for rank in (0, 0, 1)]
    told = []
    for part in parts:
        require_alike(part, lambda mine: told.append(mine) or [mine])
    require_alike(parts[0], lambda mine: told)


@pytest.mark.parametrize("name", OWN_PARTS)
def test_own_data_sets_that_hold_parts_are_told_by_the_attribute_that_differs(name, caplog):
    told_to_all(OWN_PARTS[name])
    (record,) = caplog.records
    assert f"'{name}' of the dataset differs between rank 0 and ranks [2]" in record.getMessage()


@pytest.mark.parametrize("name", OWN_ALIKE)
def test_own_data_sets_that_are_the_same_are_left_alone(name, caplog):
    told_to_all(OWN_ALIKE[name])
    assert not caplog.records

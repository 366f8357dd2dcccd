"""Every pair of options trains as one process does, or is refused by name; ``pairs.py`` draws random cases, too."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

pytest.importorskip("torch")

import pairs
import torch

from hvd_hetero import late_tables
from hvd_hetero.testing import ThreadRankError, run_on_threads
from torch_hooks import DistributedOptimizer, LoadBalance

CASES = pairs.cases()
PAGE = Path(__file__).parents[3] / "docs" / "combinations.md"


@pytest.fixture(autouse=True)
def each_round_a_table(monkeypatch):
    monkeypatch.setattr(late_tables, "_SUM_CPU_S", 0.0)
    pairs.prepare()


def name_of(case):
    others = [f"{name}={value}" for name, value in case.items() if value != pairs.OPTIONS[name][0]]
    return ", ".join(others) or "plain"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_pair_of_options_is_exact_or_refused_by_name(case):
    pairs.judged(case)


def test_the_cases_hold_every_pair_that_goes_together():
    held = {
        frozenset([(one, case[one]), (other, case[other])])
        for case in CASES
        for one, other in combinations(pairs.OPTIONS, 2)
    }
    for one, other in combinations(pairs.OPTIONS, 2):
        for value in pairs.OPTIONS[one]:
            for another in pairs.OPTIONS[other]:
                together = {one: value, other: another}
                assert frozenset(together.items()) in held or pairs.without_meaning(together) or pairs.implied(together)


def test_the_page_has_each_refusal_once():
    section = PAGE.read_text().partition("## PyTorch")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    assert lines == list(dict.fromkeys(refusal.line for refusal in pairs.REFUSED))


def test_a_rank_without_a_batch_takes_the_mean_by_what_the_others_have_weighed():
    x, y, weights = pairs.data()
    given = [[[0, 1, 2], [3, 4]], [[], [5, 6, 7]], [[8], [9, 10]]]

    def train(rank):
        model = torch.nn.Linear(3, 1).double()
        balance = LoadBalance("bsp", global_batch=6)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balance, model.named_parameters())
        began = [p.detach().clone() for p in model.parameters()]
        for parts in given:
            index = torch.tensor(parts[rank], dtype=torch.int64)
            balance.batch(len(index))
            if len(index):
                weight = weights[index].sum()
                loss = (pairs.loss_of(model, x[index], y[index]) * weights[index]).sum() / weight
                balance.scale(loss, weight=weight).backward()
            else:
                (0.0 * model(x[:1]).sum()).backward()
            optimizer.step()
        balance.close()
        return began, [p.detach() for p in model.parameters()]

    (began, ours), (_, theirs) = run_on_threads(train, 2, 60.0)
    model = torch.nn.Linear(3, 1).double()
    for parameter, value in zip(model.parameters(), began, strict=True):
        parameter.data = value
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parts in given:
        index = torch.tensor([i for part in parts for i in part])
        optimizer.zero_grad()
        ((pairs.loss_of(model, x[index], y[index]) * weights[index]).sum() / weights[index].sum()).backward()
        optimizer.step()
    for of_rank in (ours, theirs):
        for ours_, expected in zip(of_rank, model.parameters(), strict=True):
            assert torch.allclose(ours_, expected, rtol=0.0, atol=1e-12)


def test_a_weight_in_scale_does_not_go_with_batches_that_are_done_again():
    def train(rank):
        model = torch.nn.Linear(3, 1)
        balance = LoadBalance("bsp", global_batch=4)
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balance)
        balance.batch()
        with balance.surviving_out_of_memory():
            balance.scale(model(torch.ones(2, 3)).sum(), weight=3)

    with pytest.raises(ThreadRankError, match=r"weight of scale\(\).*surviving_out_of_memory\(\)"):
        run_on_threads(train, 2, 60.0)


def test_each_loss_of_two_optimizers_is_scaled_when_it_comes():
    def train(rank):
        models = [torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)]
        balance = LoadBalance("bsp", global_batch=4)
        optimizers = [
            DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), each, model.named_parameters())
            for model, each in zip(models, [balance, balance.also()], strict=True)
        ]
        balance.batch()
        for model, optimizer in zip(models, optimizers, strict=True):
            balance.scale(model(torch.ones(2, 3)).sum()).backward()
            optimizer.step()
        return balance.rounds

    assert run_on_threads(train, 2, 60.0) == [1, 1]

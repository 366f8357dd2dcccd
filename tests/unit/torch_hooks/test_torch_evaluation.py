"""Evaluations that ranks share by speed: each sample once, figures of one process, and training is not disturbed."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from clocks import ThreadClock
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from hvd_hetero.errors import HeteroError, PlanMismatchError, RoundStateError
from hvd_hetero.policies import BSP
from hvd_hetero.rounds import FinishedRound, RoundTable
from hvd_hetero.session import balancer_of
from hvd_hetero.testing import ThreadRankError, run_on_threads
from torch_hooks import BalancedLoader, DistributedOptimizer, EvaluationLoader, LoadBalance

SPEEDS = [600.0, 300.0, 200.0]
X = torch.arange(220, dtype=torch.float64)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(X)


def told(balance, speeds):
    """Let the ranks be as fast as this."""
    balancer = balancer_of(balance)
    table = RoundTable(np.zeros(RoundTable.length(len(speeds))), len(speeds)).replaced("samples_per_s", speeds)
    balancer.finished = FinishedRound(0, 0, balancer.plan(), table, 1.0)


def means(batch):
    (x,) = batch
    return {"x": x.mean(), "square": (x * x).mean(), "both": torch.stack([x.mean(), -x.mean()])}


def on_ranks(case, ranks=3, **options):
    def run(rank):
        return case(rank, LoadBalance("bsp", global_batch=12, **options))

    return run_on_threads(run, ranks, 60.0)


@pytest.mark.parametrize("own", [False, True], ids=["beside", "own"])
@pytest.mark.parametrize(("samples", "size"), [(220, 16), (220, 1), (7, 4), (3, 2), (2, 5), (1, 1), (220, None)])
def test_figures_are_those_of_one_process_with_the_same_bits_on_all_ranks(own, samples, size):
    x = X[:samples]

    def case(rank, balance):
        if own:
            model = torch.nn.Linear(1, 1)
            DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balance, model.named_parameters())
        told(balance, SPEEDS)
        seen = []

        def function(batch):
            seen.extend(batch[0].tolist())
            assert len(batch[0]) <= (size or 4) + 1, "a sample more where there are too few for all"
            return means(batch)

        return balance.evaluate(TensorDataset(x), function, batch_size=size), seen

    (figures, _), *others = found = on_ranks(case)
    assert figures["x"] == pytest.approx(x.mean().item(), rel=1e-12)
    assert figures["square"] == pytest.approx((x * x).mean().item(), rel=1e-12)
    assert figures["both"].tolist() == pytest.approx([x.mean().item(), -x.mean().item()], rel=1e-12)
    assert figures.sums["x"] == pytest.approx(x.sum().item(), rel=1e-12)
    assert figures.weight == samples
    for other, _ in others:
        assert str(other) == str(figures)
        assert str(other.sums) == str(figures.sums)
    seen = [part for _, part in found]
    if samples < 3 and not own:
        assert seen == [x.tolist()] * 3, "all forward passes meet in the layers of a reducer"
    else:
        assert [i for part in seen for i in part] == x.tolist(), "each once, in the dataset's order"


def test_parts_go_by_speed_and_are_equal_before_any_is_known():
    def case(rank, balance):
        loader = EvaluationLoader(TensorDataset(X), balance, 16)
        before = [len(x) for (x,) in loader]
        told(balance, SPEEDS)
        after = [len(x) for (x,) in loader]
        told(balance, [*SPEEDS[:2], float("nan")])
        return before, after, [len(x) for (x,) in loader]

    before, after, unknown = zip(*on_ranks(case), strict=True)
    assert [sum(sizes) for sizes in before] == [74, 73, 73]
    assert [sum(sizes) for sizes in after] == [120, 60, 40]
    assert before == unknown
    for sizes in (before, after):
        assert len(set(map(len, sizes))) == 1, "as many forward passes on all ranks, for layers that wait"
    assert max(max(sizes) for sizes in after) <= 16


def test_means_by_tokens_leave_out_batches_that_have_none():
    masks = torch.arange(30) % 5 * (torch.arange(30) > 9)

    def case(rank, balance):
        told(balance, SPEEDS)
        data = TensorDataset(X[:30], masks)

        def function(batch):
            x, tokens = batch
            return {"loss": (x * tokens).sum() / tokens.sum()}

        return balance.evaluate(data, function, batch_size=2, weight_of=lambda batch: batch[1].sum())

    figures = on_ranks(case)
    for each in figures:
        assert each["loss"] == pytest.approx(((X[:30] * masks).sum() / masks.sum()).item(), rel=1e-12)
        assert each.weight == masks.sum().item()


@pytest.mark.parametrize("weight", [float("nan"), -1.0, float("inf")])
def test_a_weight_that_is_none_is_refused_instead_of_left_out(weight):
    with pytest.raises(ThreadRankError, match="weight_of must be finite and at least 0"):
        on_ranks(lambda rank, balance: balance.evaluate(TensorDataset(X), means, weight_of=lambda batch: weight))


@pytest.mark.parametrize("length", [lambda rank: 6, lambda rank: 6 + rank])
def test_parts_that_a_user_has_cut_are_refused_on_all_ranks_and_not_divided_again(length):
    def case(rank, balance):
        part = Subset(TensorDataset(X), range(rank, 3 * length(rank), 3))
        with pytest.raises(PlanMismatchError, match=r"average_by_samples"):
            balance.evaluate(part, means)

    on_ranks(case)


@pytest.mark.parametrize(
    ("policy", "micro_batches", "largest"), [(BSP(), 4, 2), (BSP(max_micro_batch=[6, 2]), 2, 2), (BSP(), 1, 8)]
)
def test_batches_are_those_of_training_at_equal_shares_and_keep_to_the_least_bound(policy, micro_batches, largest):
    def case(rank):
        balance, sizes = LoadBalance(policy, global_batch=16), []
        BalancedLoader(TensorDataset(X), balance, micro_batches=micro_batches)
        balance.evaluate(TensorDataset(X), lambda batch: sizes.append(len(batch[0])) or {"x": 0.0})
        return max(sizes)

    assert max(run_on_threads(case, 2, 60.0)) == largest


def test_a_rank_that_fails_ends_the_evaluation_on_all_of_them_and_training_can_go_on(caplog):
    def case(rank, balance):
        def fails(batch):
            if rank == 1:
                raise KeyError("label 7")
            return means(batch)

        with pytest.raises(KeyError if rank == 1 else HeteroError, match="label 7") as raised:
            balance.evaluate(TensorDataset(X), fails, batch_size=16)
        return str(raised.value), balance.evaluate(TensorDataset(X), means)["x"]

    for rank, (said, mean) in enumerate(on_ranks(case)):
        assert mean == pytest.approx(X.mean().item())
        assert "label 7" in caplog.text, "else what failed is not seen where others wait in a layer"
        assert rank == 1 or said.startswith("rank 1 failed in an evaluation: KeyError: 'label 7'")


@pytest.mark.parametrize(
    ("data", "function", "error"),
    [
        (TensorDataset(X[:0]), means, "nothing to average"),
        (TensorDataset(X), lambda batch: {f"of {len(batch[0])}": 1.0}, "the same names"),
        (TensorDataset(X), lambda batch: {"x": batch[0]}, "means over the samples"),
        (TensorDataset(X), lambda batch: batch[0].mean(), "means by name.*got Tensor"),
        (Stream(), means, "must have __len__"),
        (DataLoader(TensorDataset(X)), means, "the dataset of a DataLoader"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(data, function, error):
    with pytest.raises(ThreadRankError, match=error):
        on_ranks(lambda rank, balance: balance.evaluate(data, function, batch_size=7), ranks=2)


def test_a_loader_for_training_says_what_to_use_where_gradients_are_off():
    def case(rank, balance):
        with torch.no_grad(), pytest.raises(RoundStateError, match=r"balance\.evaluate.*EvaluationLoader"):
            next(iter(BalancedLoader(TensorDataset(X), balance)))

    on_ranks(case, ranks=2)


class Drawn(torch.utils.data.Dataset):
    """Samples that draw from every random state there is."""

    def __len__(self):
        return 20

    def __getitem__(self, i):
        return torch.tensor([random.random(), np.random.rand(), torch.rand(1).item()])


def test_an_evaluation_leaves_random_numbers_plans_speeds_and_the_cursor_as_they_are(monkeypatch):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    clock = ThreadClock()
    monkeypatch.setattr(time, "perf_counter", clock)

    def case(rank):
        balance = LoadBalance("lb-bsp", global_batch=8)
        model = torch.nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = BalancedLoader(TensorDataset(X[:48, None]), balance)
        states, compute_s = [], []
        for number, (x,) in enumerate(loader):
            if number == 3:  # at the top of the body, where a micro-batch is at work
                before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
                balance.evaluate(Drawn(), lambda batch: clock.pass_s(3.0) or {"x": 0.0}, batch_size=20)
                assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
            clock.pass_s(0.1)
            optimizer.zero_grad()
            balance.scale(model(x).pow(2).mean()).backward()
            optimizer.step()
            if number == 3:
                compute_s.append(balancer_of(balance).meter.batch.done_at - balancer_of(balance).meter.batch._began_at)
                state = balance.state_dict(), loader.state_dict()
                balance.evaluate(Drawn(), lambda batch: {"x": batch.mean()})
                states.append((state, (balance.state_dict(), loader.state_dict())))
        return states, compute_s, balance.rounds

    ((before, after),), (compute_s,), rounds = run_on_threads(case, 1)[0]
    assert str(before) == str(after)
    assert compute_s == pytest.approx(0.1), "the evaluation is no work on the batch"
    assert rounds == 6

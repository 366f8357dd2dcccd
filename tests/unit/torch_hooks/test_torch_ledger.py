"""One process that trains by a run's ledger ends with the parameters of the ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset

from hvd_hetero.errors import HeteroError
from hvd_hetero.policies import BSP, NonBlocking
from hvd_hetero.rounds import RoundPlan
from hvd_hetero.session import balancer_of
from hvd_hetero.telemetry import Telemetry, read_ledger, read_run
from hvd_hetero.testing import run_on_threads
from hvd_hetero.tools.cli.commands import main
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance, SavedTraining

SAMPLES, BATCH, FEATURES = 43, 12, 4
X = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
Y = torch.sin(X.sum(1, keepdim=True))
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports what all threads would import at once


class Indices(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Shifting(BSP):
    """LB-BSP's plans as speeds would make them that change every round."""

    name = "lb-bsp"

    def next(self, plan, finished):
        first = 1 + (5 * finished.round) % (BATCH - plan.workers)
        rest = BATCH - first
        others = [rest // (plan.workers - 1)] * (plan.workers - 1)
        others[-1] += rest - sum(others)
        return RoundPlan.of([first, *others], 4)

    def renegotiate(self, plan, speeds):
        return self.first(len(speeds), BATCH)


def linear(dropout: float = 0.0) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def trained(path: Path, policy=None, *, epochs=2, stop_at=None, dropout=0.0, saved=None, ends_early=False, ledger=True):
    """One rank's training; returns its parameters."""

    def run(rank: int) -> torch.Tensor:
        model = linear(dropout)
        balance = LoadBalance(policy or Shifting(), global_batch=BATCH, telemetry=Telemetry(path, ledger=ledger))
        if ends_early:
            balancer_of(balance).signals = Ends(rank)
        loader = BalancedLoader(Indices(), balance, shuffle=True, seed=7, stop_at=stop_at)
        inner = sgd(model)
        optimizer = DistributedOptimizer(inner, balance, model.named_parameters())
        if saved is not None:
            SavedTraining(saved, balance, loader, rounds_per_save=2, model=model, optimizer=optimizer)
        for _ in range(loader.epoch_at_hand, epochs):
            for index in loader:
                optimizer.zero_grad()
                functional.mse_loss(model(X[index]), Y[index]).backward()
                optimizer.step()
            if stop_at is not None and balance.rounds >= stop_at:
                break
        balance.close()
        return flat(model)

    return run


class Ends:
    """Another rank has always finished, but for rank 0, which does all."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def raised(self, round: int) -> bool:
        return self.rank > 0 and round % 3 != 2

    def raise_signal(self, round: int) -> None:
        pass


def replayed(*paths: Path, dropout: float = 0.0) -> torch.Tensor:
    """Train as a user's function does, and return the parameters."""
    model = linear(dropout)
    optimizer = sgd(model)
    for part in read_ledger(*paths):
        torch.manual_seed(part.seed)
        loss = functional.mse_loss(model(X[part.indices]), Y[part.indices])
        (part.share * loss).backward()
        if part.last:
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


def require_close(parameters: torch.Tensor, expected: torch.Tensor) -> None:
    assert (parameters - linear_start()).abs().max() > 0.01, "it has trained"
    torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-10)


def linear_start() -> torch.Tensor:
    return flat(linear())


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_run_whose_split_changes_every_round(tmp_path, ranks):
    parameters = run_on_threads(trained(tmp_path / "run.jsonl"), ranks)
    require_close(replayed(tmp_path / "run.jsonl"), parameters[-1])
    parts = [*read_ledger(tmp_path / "run.jsonl")]
    for epoch in range(2):
        assert sorted(i for p in parts if p.epoch == epoch for i in p.indices) == list(range(SAMPLES))
    assert {p.rank for p in parts} == set(range(ranks))
    assert max(p.number for p in parts) > 0, "in several micro-batches"
    assert len({len(p.indices) for p in parts}) > 2
    rounds = read_run(tmp_path / "run.jsonl")  # which passes over the ledger
    for round, samples in zip(rounds.round.tolist(), rounds.samples.tolist(), strict=True):
        for rank in range(ranks):
            assert sum(len(p.indices) for p in parts if (p.round, p.rank) == (round, rank)) == samples[rank]


def test_a_non_blocking_run_whose_rounds_end_early(tmp_path):
    path = tmp_path / "run.jsonl"
    parameters = run_on_threads(trained(path, NonBlocking(3, anticipates=False), ends_early=True), 2)
    require_close(replayed(path), parameters[0])
    run = read_run(path)
    assert (run.samples < run.plan).any(), "some ranks stopped early"
    assert sorted(i for p in read_ledger(path) if p.epoch == 0 for i in p.indices) == list(range(SAMPLES))


def test_a_run_whose_membership_has_changed(tmp_path):
    path = tmp_path / "run.jsonl"
    run_on_threads(trained(path, stop_at=5, saved=tmp_path / "saved"), 2)  # the last save is of 4 rounds
    parameters = run_on_threads(trained(path, epochs=3, saved=tmp_path / "saved"), 3)
    require_close(replayed(tmp_path / "run.1.jsonl", path), parameters[2])
    parts = [*read_ledger(tmp_path / "run.1.jsonl", path)]
    assert {p.rank for p in parts if p.round < 4} == {0, 1}
    assert {p.rank for p in parts if p.round == 4} == {0, 1, 2}, "the fifth round was done again"
    first = tmp_path / "first.jsonl"
    first.write_text("".join((tmp_path / "run.1.jsonl").read_text().splitlines(keepends=True)[:3]))
    with pytest.raises(ValueError, match="no round"):
        [*read_ledger(first, path)]
    with pytest.raises(ValueError, match=r"no round 0 .*run\.jsonl holds rounds 4 to 11"):
        [*read_ledger(path)]
    assert [*read_ledger(path, first=4)] == [part for part in parts if part.round >= 4], "from a checkpoint"
    for wrong in ((path, tmp_path / "run.1.jsonl"), (path, path)):
        with pytest.raises(ValueError, match="the oldest first"):
            [*read_ledger(*wrong, first=4)]


def test_random_numbers_are_those_of_the_micro_batch(tmp_path):
    """On one rank, since threads share the generator."""
    path = tmp_path / "run.jsonl"
    (parameters,) = run_on_threads(trained(path, BSP(max_micro_batch=5), dropout=0.5), 1)
    require_close(replayed(path, dropout=0.5), parameters)


def test_random_numbers_where_some_micro_batches_count_nothing(tmp_path):
    counted = (torch.arange(SAMPLES) % 3 == 0).double()

    def loss_of(model, index):
        return (counted[index] * (model(X[index]) - Y[index])[:, 0] ** 2).sum() / counted[index].sum()

    def run(rank):
        model = linear(0.5)
        balance = LoadBalance(
            BSP(max_micro_batch=2), global_batch=BATCH, telemetry=Telemetry(tmp_path / "run.jsonl", ledger=True)
        )
        loader = BalancedLoader(Indices(), balance, shuffle=True, seed=7, weight_of=lambda i: float(counted[i].sum()))
        optimizer = DistributedOptimizer(sgd(model), balance, model.named_parameters())
        for index in loader:
            optimizer.zero_grad()
            loss_of(model, index).backward()
            optimizer.step()
        balance.close()
        return flat(model)

    (parameters,) = run_on_threads(run, 1)
    model = linear(0.5)
    optimizer = sgd(model)
    for part in read_ledger(tmp_path / "run.jsonl"):
        torch.manual_seed(part.seed)
        if weight := float(counted[part.indices].sum()):
            (weight / part.total * loss_of(model, part.indices)).backward()
        if part.last:
            optimizer.step()
            optimizer.zero_grad()
    require_close(flat(model), parameters)


def test_the_command_trains_by_a_function_of_a_script(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    parameters = run_on_threads(trained(path, BSP(max_micro_batch=5), dropout=0.5), 1)[0]
    script = tmp_path / "again.py"
    script.write_text(
        "import torch\n"
        "from tests.unit.torch_hooks.test_torch_ledger import X, Y, flat, functional, linear, sgd\n"
        "def again(parts):\n"
        "    model = linear(0.5)\n"
        "    optimizer = sgd(model)\n"
        "    for part in parts:\n"
        "        (part.share * functional.mse_loss(model(X[part.indices]), Y[part.indices])).backward()\n"
        "        if part.last:\n"
        "            optimizer.step()\n"
        "            optimizer.zero_grad()\n"
        "    return flat(model).tolist()\n"
    )
    assert main(["replay", str(path), f"{script}:again"]) == 0
    told, result = capsys.readouterr().out.splitlines()
    assert told == f"8 rounds, {2 * SAMPLES} samples"
    require_close(torch.tensor(json.loads(result), dtype=torch.float64), parameters)
    assert main(["replay", str(path), f"{script}:other"]) == 2
    assert "no function 'other'" in capsys.readouterr().err
    script.write_text("def again(parts):\n    raise ValueError(f'of round {next(parts).round}')\n")
    with pytest.raises(ValueError, match="of round 0"):  # with its traceback, unlike the command's own
        main(["replay", str(path), f"{script}:again"])


def test_a_micro_batch_done_in_parts_is_one_of_the_replay_and_logged(tmp_path, caplog):
    def run(rank):
        model = linear()
        balance = LoadBalance("bsp", global_batch=BATCH, telemetry=Telemetry(tmp_path / "run.jsonl", ledger=True))
        loader = BalancedLoader(Indices(), balance, shuffle=True, seed=7)
        optimizer = DistributedOptimizer(sgd(model), balance, model.named_parameters())
        for index in loader:
            with balance.surviving_out_of_memory():
                optimizer.zero_grad()
                if len(index) > 5:
                    raise torch.OutOfMemoryError("CUDA out of memory (a test)")
                functional.mse_loss(model(X[index]), Y[index]).backward()
                optimizer.step()
        balance.close()
        return flat(model)

    (parameters,) = run_on_threads(run, 1)
    require_close(replayed(tmp_path / "run.jsonl"), parameters)
    assert sum("in parts, so a replay" in record.getMessage() for record in caplog.records) == 1


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(SAMPLES))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda t: LoadBalance("bsp", global_batch=BATCH, telemetry=t, sync="d-psgd"), "averaged"),
        (lambda t: LoadBalance(NonBlocking(2, scaling="n/N"), global_batch=BATCH, telemetry=t), "n/N"),
        (lambda t: LoadBalance("bsp", global_batch=BATCH, telemetry=t).batch(), "batch()"),
        (
            lambda t: BalancedLoader(Stream(), LoadBalance("bsp", global_batch=BATCH, telemetry=t), stream="whole"),
            "random",
        ),
    ],
)
def test_what_a_ledger_cannot_hold_is_refused(tmp_path, make, words):
    def case(rank):
        make(Telemetry(tmp_path / "run.jsonl", ledger=True))

    with pytest.raises(HeteroError, match="ledger") as failure:
        run_on_threads(case, 2)
    assert words in str(failure.value)


@pytest.mark.parametrize("options", [{"weight_of": len}, {"weight": 5}, {"normalised": True}])
def test_losses_over_something_else_than_samples_are_refused_beside_a_reducer(tmp_path, options):
    def case(rank):
        balance = LoadBalance("bsp", global_batch=BATCH, telemetry=Telemetry(tmp_path / "run.jsonl", ledger=True))
        of_loader = {name: options[name] for name in options if name == "weight_of"}
        for index in BalancedLoader(Indices(), balance, **of_loader):
            balance.scale(linear()(X[index]).mean(), **options)

    with pytest.raises(HeteroError, match="ledger"):
        run_on_threads(case, 1)


def test_a_job_whose_rounds_begin_at_0_again_is_not_taken_for_a_restore(tmp_path):
    path = tmp_path / "run.jsonl"
    run_on_threads(trained(path), 2)
    later, again = tmp_path / "later.jsonl", tmp_path / "again.jsonl"
    again.write_text(path.read_text().replace('"began":"', '"began":"9'))
    later.write_text(again.read_text().replace('"epoch":1', '"epoch":2').replace('"epoch":0', '"epoch":2'))
    with pytest.raises(ValueError, match="without the state of its LoadBalance"):
        read_ledger(path, later)
    assert [*read_ledger(path, again)] == [*read_ledger(path)], "done again from its start"

    def skips(rank):
        balance = LoadBalance("bsp", global_batch=BATCH, telemetry=Telemetry(path, ledger=True))
        BalancedLoader(Indices(), balance).skip(2)

    with pytest.raises(HeteroError, match="skip"):
        run_on_threads(skips, 1)


def test_a_run_without_a_ledger_says_so(tmp_path):
    path = tmp_path / "run.jsonl"
    run_on_threads(trained(path, ledger=False), 2)
    with pytest.raises(ValueError, match="ledger=True"):
        [*read_ledger(path)]

"""One rank of a job that gets stuck as its argument says, and is ended by the watchdog after seconds."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from ranks import hvd
from torch.nn import functional
from torch.utils.data import TensorDataset

from hvd_hetero.policies import BSP, StaticAllocation
from hvd_hetero.testing import report
from hvd_hetero.watchdog import Patience
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

SAMPLES = 10  # with a batch of 4 and two ranks: two whole rounds, and one of a single sample for each rank
PATIENCE = Patience(warn=2, deadlock=4, silent=4)
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(SAMPLES, 4, generator=GENERATOR)


def job(policy=None, **options):
    model = torch.nn.Linear(4, 1)
    balance = LoadBalance(policy or BSP(), global_batch=4, patience=PATIENCE)
    loader = BalancedLoader(TensorDataset(X, X.sum(1, keepdim=True)), balance, **options)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), balance, model.named_parameters())
    return model, balance, loader, optimizer


def train(model, optimizer, loader, each=lambda loss: None):
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        each(loss.detach())
        optimizer.step()


def a_functional_collective_in_the_body(model, balance, loader, optimizer):
    from torch.distributed import _functional_collectives as functional_collectives

    def average(loss):
        group = torch.distributed.group.WORLD
        return float(functional_collectives.all_reduce(loss, "avg", group) + 1)

    train(model, optimizer, loader, average)


def a_stop_that_one_rank_decides(model, balance, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if hvd.rank() == 1:
            break
    evaluate(model)


def evaluate(model):
    hvd.allreduce(functional.mse_loss(model(X), X.sum(1, keepdim=True)).detach(), name="evaluation")


def a_rank_that_is_stopped(model, balance, loader, optimizer):
    """It has to be known by its silence; Horovod's own limit of silence is longer here."""

    def stop(loss):
        time.sleep(0.5)
        if hvd.rank() == 1 and balance.rounds == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    train(model, optimizer, loader, stop)


def a_long_evaluation_on_one_rank(model, balance, loader, optimizer):
    """It is waited for, however long it takes."""
    train(model, optimizer, loader)
    if hvd.rank() == 1:
        evaluate_at_length()
    train(model, optimizer, loader)
    report(balance.rounds)


def evaluate_at_length():
    until = time.monotonic() + 4 * PATIENCE.deadlock
    while time.monotonic() < until:
        time.sleep(0.01)


def a_rank_that_raises(model, balance, loader, optimizer):
    """The other one's collective fails for it, and does not say why."""

    def fail(loss):
        if hvd.rank() == 1 and balance.rounds == 1:
            raise ValueError("label 7 of 5 classes")

    train(model, optimizer, loader, fail)


CASES = [
    a_functional_collective_in_the_body,
    a_stop_that_one_rank_decides,
    a_rank_that_is_stopped,
    a_long_evaluation_on_one_rank,
    a_rank_that_raises,
]


def main(name):
    hvd.init()
    policies = {"no data": StaticAllocation([1, 0])}
    case, _, policy = name.partition("/")
    torch.set_num_threads(1)
    next(each for each in CASES if each.__name__ == case)(*job(policies.get(policy)))


if __name__ == "__main__":
    main(sys.argv[1])

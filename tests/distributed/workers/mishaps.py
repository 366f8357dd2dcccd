"""One rank of the mishap test: what goes wrong in users' loops, and what looks wrong and works."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from pool import serve
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from torch_common import refusal, spread

from hvd_hetero.policies import BSP, LBBSP, Policy, StaticAllocation
from hvd_hetero.telemetry import read_run
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance
from torch_hooks.gradients import bundles

bundles._ALONE = 100  # bytes: of small models, too, some gradients are summed where they are
SAMPLES = 26  # with a batch of 12 and two ranks: two whole rounds, and one of a single sample for each rank
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(SAMPLES, 20, generator=GENERATOR)
Y = X.sum(1, keepdim=True)


def linear() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(20, 1)


class Job:
    def __init__(self, policy: str | Policy = "bsp", *, model: torch.nn.Module | None = None, **options: Any) -> None:
        self.model = model or linear()
        self.balance = LoadBalance(policy, global_batch=12)
        self.loader = BalancedLoader(options.pop("data", TensorDataset(X, Y)), self.balance, **options)
        self.optimizer = DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9), self.balance, self.model.named_parameters()
        )

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.model(x), y)

    def epochs(self, count: int, after: Callable[[], object] = lambda: None) -> None:
        for _ in range(count):
            for x, y in self.loader:
                self.optimizer.zero_grad()
                self.loss(x, y).backward()
                self.optimizer.step()
                after()


def step_hooks_run_on_ranks_without_data() -> dict:
    """Clipping and a schedule in step hooks: ranks stay together although one has nothing."""
    job = Job(StaticAllocation([1, 0]))
    schedule = torch.optim.lr_scheduler.OneCycleLR(job.optimizer, max_lr=0.1, total_steps=20)

    def clip(*_: object) -> None:
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)

    job.optimizer.register_step_pre_hook(clip)
    job.optimizer.register_step_post_hook(lambda *_: schedule.step())
    job.epochs(4)
    return {"spread": spread(job.model), "rounds": job.balance.rounds, "rate": job.optimizer.param_groups[0]["lr"]}


def a_schedule_in_the_body_is_found_out() -> dict:
    job = Job(StaticAllocation([1, 0]))
    schedule = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, gamma=0.9)
    idle = refusal(lambda: job.epochs(4, schedule.step))
    job = Job(StaticAllocation([1, 3]), stop_at=2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, gamma=0.9)
    return {"idle": idle, "micro-batches": refusal(lambda: job.epochs(2, schedule.step))}


def a_schedule_in_the_body_works_when_asked_whether_the_round_is_complete() -> dict:
    job = Job(StaticAllocation([1, 3]), drop_last=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, gamma=0.5)

    def after() -> None:
        if job.balance.round_complete:
            schedule.step()

    job.epochs(2, after)
    return {"rate": job.optimizer.param_groups[0]["lr"], "rounds": job.balance.rounds, "spread": spread(job.model)}


def clipping_in_the_body_is_found_out() -> dict:
    job = Job(StaticAllocation([1, 0]))

    def epochs() -> None:
        for _ in range(6):
            for x, y in job.loader:
                job.optimizer.zero_grad()
                job.loss(x, y).backward()
                job.optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1e-3)
                with job.optimizer.skip_synchronize():
                    job.optimizer.step()

    return {"refusal": refusal(epochs)}


def parameters_changed_on_one_rank_are_found_out() -> dict:
    """Whichever of them it is, within as many rounds as there are."""
    outcome = {}
    torch.manual_seed(0)
    names = [name for name, _ in torch.nn.Sequential(torch.nn.Linear(20, 6), torch.nn.Linear(6, 1)).named_parameters()]
    for name in names:
        torch.manual_seed(0)
        job = Job(model=torch.nn.Sequential(torch.nn.Linear(20, 6), torch.nn.Linear(6, 1)))

        def change(job: Job = job, name: str = name) -> None:
            if hvd.rank() == 1 and job.balance.rounds == 2:
                with torch.no_grad():
                    dict(job.model.named_parameters())[name].mul_(1.05)

        outcome[name] = {"refusal": refusal(lambda job=job, change=change: job.epochs(3, change))}
        outcome[name]["after"] = job.balance.rounds - 2
    return outcome


def gradients_changed_in_flight_are_found_out() -> dict:
    job = Job()
    x, y = next(iter(job.loader))
    job.optimizer.zero_grad()
    job.loss(x, y).backward()
    torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1e-3)
    return {"refusal": refusal(job.optimizer.step)}


def a_gradient_cleared_in_the_middle_is_found_out() -> dict:
    def run(clear_first: bool) -> None:
        job = Job(BSP(max_micro_batch=3))
        for x, y in job.loader:
            if clear_first:
                job.model.zero_grad()
            job.loss(x, y).backward()
            job.optimizer.step()
            if not clear_first:
                job.model.zero_grad()

    return {"before": refusal(lambda: run(True)), "after": refusal(lambda: run(False))}


def two_trainings_at_once() -> dict:
    a, b = Job(drop_last=True), Job(drop_last=True)
    for (xa, ya), (xb, yb) in zip(a.loader, b.loader, strict=True):
        for job in (a, b):
            job.optimizer.zero_grad()
        a.loss(xa, ya).backward()
        b.loss(xb, yb).backward()
        a.optimizer.step()
        b.optimizer.step()
    return {"spread": max(spread(a.model), spread(b.model)), "rounds": [a.balance.rounds, b.balance.rounds]}


def a_model_is_trained_again_by_another_optimizer() -> dict:
    first = Job()
    first.epochs(1)
    model = first.model
    first.optimizer.close()
    second = Job(model=model)
    second.epochs(1)
    return {"rounds": second.balance.rounds, "spread": spread(model)}


def channels_last() -> dict:
    torch.manual_seed(hvd.rank())
    net = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3), torch.nn.Flatten(), torch.nn.Linear(24, 1))
    net = net.to(memory_format=torch.channels_last)
    images = torch.randn(SAMPLES, 4, 4, 4, generator=torch.Generator().manual_seed(5))
    job = Job(model=net, data=TensorDataset(images, Y))
    job.epochs(2)
    return {"spread": spread(net)}


def a_break_in_the_middle_of_a_round_and_another_epoch() -> dict:
    """All ranks leave after their first micro-batch; the round is abandoned, and the next epoch is a whole one."""
    job = Job(BSP(max_micro_batch=3))
    for x, y in job.loader:
        (1e6 * job.loss(x, y)).backward()  # would be seen, if it stayed in the gradient
        job.optimizer.step()
        break
    for x, y in job.loader:  # an epoch whose body clears the gradient last, as some do
        (1e6 * job.loss(x, y)).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        break
    job.loader.set_epoch(1)
    other = Job(BSP(max_micro_batch=3))
    other.loader.set_epoch(1)
    job.epochs(1)
    other.epochs(1)
    pairs = zip(job.model.parameters(), other.model.parameters(), strict=True)
    return {"rounds": job.balance.rounds, "difference": max(float((a - b).abs().max()) for a, b in pairs)}


def parameters_that_are_concatenated() -> dict:
    """Their gradients are parts of one tensor; weighting one must not look like a change of the other."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (torch.nn.Parameter(torch.full((10, 1), 0.1)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.cat([self.a, self.b])

    job = Job(model=Net())
    job.epochs(2)
    return {"spread": spread(job.model), "rounds": job.balance.rounds}


def a_small_difference_of_small_rates() -> dict:
    model = linear()
    balance = LoadBalance("bsp", global_batch=12)
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-4), balance)
    if hvd.rank() == 1:
        optimizer.param_groups[0]["lr"] = 9.98e-5

    def run() -> None:
        for x, y in BalancedLoader(TensorDataset(X, Y), balance):
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            optimizer.step()

    return {"refusal": refusal(run)}


def ranks_that_leave_at_different_rounds_are_told() -> dict:
    job = Job(drop_last=True)

    def run() -> None:
        for epoch in range(2):
            for x, y in job.loader:
                job.optimizer.zero_grad()
                job.loss(x, y).backward()
                job.optimizer.step()
                if epoch == 0 and hvd.rank() == 1:
                    break

    return {"refusal": refusal(run)}


def different_order_of_parameters() -> dict:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("a", "b") if hvd.rank() == 0 else ("b", "a"):
                setattr(self, name, torch.nn.Linear(20, 1))

    return {"refusal": refusal(lambda: Job(model=Net()))}


def added_groups_are_synchronised() -> dict:
    job = Job()
    extra = torch.nn.Parameter(torch.full((20,), float(hvd.rank())))
    job.optimizer.add_param_group({"params": [extra], "lr": 0.01})
    start = float(extra[0])
    for x, y in job.loader:
        job.optimizer.zero_grad()
        functional.mse_loss(job.model(x + extra), y).backward()
        job.optimizer.step()
    everywhere = hvd.allgather(extra.detach()[None], name="extra")
    return {
        "start": start,
        "spread": float((everywhere - everywhere[0]).abs().max()),
        "moved": float(extra.abs().max()),
    }


class SlowToRead(Dataset):
    def __len__(self) -> int:
        return 36

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.002)
        return X[i % SAMPLES], Y[i % SAMPLES]


def where_the_time_goes() -> dict:
    """Reading takes 12 ms or more a round, the update 30, and something between the rounds 200."""
    model = linear()
    balance = LoadBalance("bsp", global_batch=12, telemetry=sys.argv[1])
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), balance)
    optimizer.register_step_pre_hook(lambda *_: time.sleep(0.03))
    for x, y in BalancedLoader(SlowToRead(), balance):
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
        time.sleep(0.2)
    balance.close()
    if hvd.rank() != 0:
        return {}
    run = read_run(sys.argv[1])
    return {"input_s": run.input_s[1:], "compute_s": run.compute_s[1:], "elapsed_s": run.elapsed_s[1:]}


def the_table_travels_with_the_last_gradients() -> dict:
    """With a gradient that travels alone, and others that travel together."""
    posted: list[str] = []
    genuine = {name: getattr(hvd, name) for name in ("allreduce_async_", "grouped_allreduce_async_")}
    layers = (torch.nn.Linear(20, 1200), torch.nn.Linear(1200, 1200), torch.nn.Linear(1200, 1))
    job = Job(model=torch.nn.Sequential(*layers), stop_at=2)

    def spy(send: Callable[..., int]) -> Callable[..., int]:
        def spied(tensors: Any, name: str, **options: Any) -> int:
            posted.append(name.split(".", 1)[1])
            return send(tensors, name=name, **options)

        return spied

    for name, send in genuine.items():
        setattr(hvd, name, spy(send))
    try:
        job.epochs(1)
    finally:
        for name, send in genuine.items():
            setattr(hvd, name, send)
    return {"posted": posted}


def waiting_does_not_spin() -> dict:
    """Rank 1 comes 2 s late; rank 0 waits without using its processor."""
    job = Job(stop_at=1)
    x, y = next(iter(job.loader))
    job.optimizer.zero_grad()
    if hvd.rank() == 1:
        time.sleep(2.0)
    job.loss(x, y).backward()
    wall, used = time.perf_counter(), time.thread_time()
    job.optimizer.step()
    return {"wall_s": time.perf_counter() - wall, "used_s": time.thread_time() - used}


def a_lead_with_micro_batches() -> dict:
    """LB-BSP, several micro-batches and worker processes at once: every sample once, ranks together."""
    seen: list[int] = []
    data = TensorDataset(X, Y, torch.arange(SAMPLES))
    job = Job(LBBSP(max_micro_batch=2), data=data, num_workers=1, shuffle=True)
    for _ in range(3):
        for x, y, index in job.loader:
            seen += index.tolist()
            job.optimizer.zero_grad()
            job.loss(x, y).backward()
            if hvd.rank() == 1:
                time.sleep(0.004 * len(x))
            job.optimizer.step()
    together = [i for part in hvd.allgather_object(seen, name="seen") for i in part]
    return {"visits": sorted(together), "spread": spread(job.model)}


def refusals() -> dict:
    model = linear()

    class SizedStream(IterableDataset):
        def __iter__(self):
            return iter(range(9))

        def __len__(self) -> int:
            return 9

    def balance() -> LoadBalance:
        return LoadBalance("bsp", global_batch=12)

    def sgd() -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    return {
        "sized stream": refusal(lambda: BalancedLoader(SizedStream(), balance())),
        "loader without balance": refusal(lambda: BalancedLoader(TensorDataset(X, Y), "lb-bsp")),
        "optimizer without balance": refusal(lambda: DistributedOptimizer(sgd(), "lb-bsp")),
        "a model": refusal(lambda: DistributedOptimizer(model, balance())),
        "wrapped by Horovod": refusal(
            lambda: DistributedOptimizer(hvd.DistributedOptimizer(sgd(), model.named_parameters()), balance())
        ),
        "lbfgs": refusal(lambda: DistributedOptimizer(torch.optim.LBFGS(model.parameters()), balance())),
        "bfloat16": refusal(lambda: Job(model=linear().bfloat16())),
        "copy": refusal(lambda: copy.deepcopy(Job().optimizer)),
        "nothing left": refusal(lambda: BalancedLoader(TensorDataset(X[:5], Y[:5]), balance(), drop_last=True)),
        "in_order": refusal(lambda: BalancedLoader(TensorDataset(X, Y), balance(), in_order=False)),
    }


def drop_last() -> dict:
    job = Job(drop_last=True)
    job.epochs(3)
    return {"rounds": job.balance.rounds, "length": len(job.loader), "whole": len(Job().loader)}


CASES = [
    step_hooks_run_on_ranks_without_data,
    a_schedule_in_the_body_is_found_out,
    a_schedule_in_the_body_works_when_asked_whether_the_round_is_complete,
    clipping_in_the_body_is_found_out,
    parameters_changed_on_one_rank_are_found_out,
    gradients_changed_in_flight_are_found_out,
    a_gradient_cleared_in_the_middle_is_found_out,
    two_trainings_at_once,
    a_model_is_trained_again_by_another_optimizer,
    channels_last,
    a_break_in_the_middle_of_a_round_and_another_epoch,
    parameters_that_are_concatenated,
    a_small_difference_of_small_rates,
    ranks_that_leave_at_different_rounds_are_told,
    different_order_of_parameters,
    added_groups_are_synchronised,
    the_table_travels_with_the_last_gradients,
    waiting_does_not_spin,
    a_lead_with_micro_batches,
    drop_last,
    refusals,
    where_the_time_goes,
]


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(hvd, {case.__name__: case for case in CASES})

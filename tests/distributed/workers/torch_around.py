"""One rank of the test of what stands around a training loop: mixed precision, compression, batch norm, evaluation."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pool import serve
from ranks import DEVICE, hvd
from torch.nn import functional
from torch.utils.data import TensorDataset
from torch_common import flat, refusal, spread

import torch_hooks
from hvd_hetero.errors import HeteroError
from hvd_hetero.policies import BSP, LBBSP, ElasticBSP, NonBlocking, Policy, SelfAdaptive, StaticAllocation
from hvd_hetero.rounds import FinishedRound, RoundPlan
from hvd_hetero.session import balancer_of
from torch_hooks import BalancedLoader, DistributedOptimizer, GradScaler, LoadBalance, SyncBatchNorm

SAMPLES = 25  # with a batch of 12 and two ranks: a round of 12, and one of 13
GENERATOR = torch.Generator(torch.get_default_device()).manual_seed(3)
X = torch.randn(SAMPLES, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.sin(X.sum(1, keepdim=True))
ROUNDS = 12


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


class Job:
    def __init__(self, policy: str | Policy, model: torch.nn.Module | None = None, **options: Any) -> None:
        self.model = model or net()
        sync = options.pop("sync", "allreduce")
        self.balance = LoadBalance(policy, global_batch=options.pop("global_batch", 12), sync=sync)
        data = TensorDataset(X.to(next(self.model.parameters()).dtype), Y.to(next(self.model.parameters()).dtype))
        stop_at = options.pop("stop_at", ROUNDS)
        self.loader = BalancedLoader(data, self.balance, shuffle=True, stop_at=stop_at)
        self.optimizer = DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9), self.balance,
            self.model.named_parameters(), **options,
        )  # fmt: skip

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.model(x), y)

    def batches(self):
        while self.balance.rounds < self.loader.stop_at:
            yield from self.loader

    def plain(self) -> Job:
        for x, y in self.batches():
            self.optimizer.zero_grad()
            self.loss(x, y).backward()
            self.optimizer.step()
        return self

    def scaled(self, spoil: int = -1, clip: str = "", **options: Any) -> tuple[Job, GradScaler]:
        scaler = GradScaler(DEVICE, optimizer=self.optimizer, **{"init_scale": 1024.0, "growth_interval": 5} | options)
        parameters = list(self.model.parameters())

        def clip_in_hook(*_: object) -> None:
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)

        if clip == "hook":
            self.optimizer.register_step_pre_hook(clip_in_hook)
        for x, y in self.batches():
            self.optimizer.zero_grad()
            loss = self.loss(x, y)
            if self.balance.rounds == spoil and hvd.rank() == 1:
                loss = loss * math.inf
            scaler.scale(loss).backward()
            if clip == "body" and scaler.unscale_(self.optimizer):
                torch.nn.utils.clip_grad_norm_(parameters, 0.1)
            scaler.step(self.optimizer)
            scaler.update()
        return self, scaler


def difference(a: torch.nn.Module, b: torch.nn.Module) -> float:
    return float((flat(a) - flat(b)).abs().max())


def a_scaler_changes_nothing_where_nothing_overflows() -> dict:
    """Micro-batches, a rank without data now and then or always, rounds that end early: as without a scaler."""
    policies: dict[str, Callable[[], Policy]] = {
        "bsp": BSP,
        "micro-batches": lambda: BSP(max_micro_batch=2),
        "static": lambda: StaticAllocation([1, 3]),
        "never data": lambda: StaticAllocation([0, 3]),
    }
    outcome = {}
    for name, policy in policies.items():
        job, scaler = Job(policy()).scaled()
        outcome[name] = {
            "difference": difference(job.model, Job(policy()).plain().model),
            "spread": spread(job.model),
            "scales": hvd.allgather_object(scaler.get_scale()),
        }
    job, scaler = Job(NonBlocking(6)).scaled()
    outcome["non-blocking"] = {
        "spread": spread(job.model), "scales": hvd.allgather_object(scaler.get_scale()),
    }  # fmt: skip
    return outcome


def an_infinity_on_one_rank_is_skipped_by_all() -> dict:
    steps = []
    job = Job(StaticAllocation([1, 3]))
    job.optimizer.register_step_post_hook(lambda *_: steps.append(job.balance.rounds))
    job, scaler = job.scaled(spoil=3, growth_interval=1000)
    return {
        "spread": spread(job.model),
        "finite": bool(flat(job.model).isfinite().all()),
        "scales": hvd.allgather_object(scaler.get_scale()),
        "missing": sorted(set(range(1, ROUNDS + 1)) - set(steps)),
    }


def clipping_of_unscaled_gradients() -> dict:
    body = Job("bsp", stop_at=2).scaled(clip="body")[0]  # two rounds in which both ranks have data
    hook = Job("bsp", stop_at=2).scaled(clip="hook")[0]
    unclipped = Job("bsp", stop_at=2).plain()
    return {"difference": difference(body.model, hook.model), "clipped": difference(body.model, unclipped.model)}


def a_scaler_that_is_disabled() -> dict:
    job, _ = Job("bsp").scaled(enabled=False)
    return {"difference": difference(job.model, Job("bsp").plain().model)}


def a_scaler_resumes() -> dict:
    _, scaler = Job("bsp").scaled()
    other = GradScaler(DEVICE, optimizer=Job("bsp").optimizer)
    other.load_state_dict(copy.deepcopy(scaler.state_dict()))
    return {"same": other.state_dict() == scaler.state_dict(), "scale": other.get_scale()}


def scaler_refusals() -> dict:
    def stock(synchronise: bool) -> float:
        job = Job("bsp", stop_at=2)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0)
        for x, y in job.batches():
            job.optimizer.zero_grad()
            scaler.scale(job.loss(x, y)).backward()
            if synchronise:
                job.optimizer.synchronize()
            with job.optimizer.skip_synchronize():
                scaler.step(job.optimizer)
            scaler.update()
        return difference(job.model, Job("bsp", stop_at=2).plain().model)

    def other_scale() -> None:
        job = Job("bsp")
        scaler = GradScaler(DEVICE, optimizer=job.optimizer)
        scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0 ** (10 + hvd.rank())})
        for x, y in job.batches():
            job.optimizer.zero_grad()
            scaler.scale(job.loss(x, y)).backward()
            scaler.step(job.optimizer)
            scaler.update()

    def another_optimizer() -> None:
        GradScaler(DEVICE, optimizer=Job("bsp").optimizer).unscale_(Job("bsp").optimizer)

    def between_micro_batches(stock_scaler: bool) -> None:
        job = Job(BSP(max_micro_batch=2))
        for x, y in job.batches():
            job.loss(x, y).backward()
            if not stock_scaler:
                torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1e-3)
            job.optimizer.step()

    local = ElasticBSP(lookahead=2, updates="local")
    return {
        "stock": refusal(lambda: stock(False)),
        "stock, synchronised": stock(True),
        "scales differ": refusal(other_scale),
        "another optimizer": refusal(another_optimizer),
        "clipped in between": refusal(lambda: between_micro_batches(False)),
        "d-psgd": refusal(lambda: Job("bsp", sync="d-psgd").scaled()),
        "local": refusal(lambda: Job(local).scaled()),
        "no optimizer": refusal(lambda: GradScaler(DEVICE, optimizer=torch.optim.SGD(net().parameters(), lr=1.0))),
    }


def bfloat16_autocast() -> dict:
    """Parameters stay float32, losses fall, and ranks hold the same bits."""
    outcome = {}
    for name, policy in (("bsp", BSP()), ("static", StaticAllocation([1, 3]))):
        job = Job(policy, net().float())
        for x, y in job.batches():
            job.optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                prediction = job.model(x)
            assert prediction.dtype == torch.bfloat16
            functional.mse_loss(prediction.float(), y).backward()
            job.optimizer.step()
        plain = Job(StaticAllocation([1, 3]), net().float()).plain().model
        losses = [functional.mse_loss(m(X.float()), Y.float()).item() for m in (net().float(), job.model, plain)]
        outcome[name] = {"losses": losses, "spread": spread(job.model), "off": difference(job.model, plain)}
    return outcome


def compression() -> dict:
    """Gradients in 16 bits are near those in 32; samples are counted exactly, though no half holds their number."""
    narrow = Job(StaticAllocation([1, 3]), net().float(), compression=hvd.Compression.fp16).plain()
    wide = Job(StaticAllocation([1, 3]), net().float(), compression=hvd.Compression.none).plain()
    model = torch.nn.Linear(1, 1)
    balance = LoadBalance("bsp", global_batch=4101)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), balance, compression=hvd.Compression.fp16
    )
    count = (2049, 2052)[hvd.rank()]
    balance.batch(count)
    functional.mse_loss(model(torch.ones(count, 1)), torch.zeros(count, 1)).backward()
    optimizer.step()
    return {
        "difference": difference(narrow.model, wide.model),
        "spread": spread(narrow.model),
        "counted": balancer_of(balance).finished.table.column("samples").tolist(),
        "refused": refusal(lambda: Job("bsp", compression="fp16")),
        "refused with d-psgd": refusal(lambda: Job("bsp", sync="d-psgd", compression=hvd.Compression.fp16)),
    }


class Viewed(torch.nn.Module):
    """A bias that is viewed before it is added: of a single sample, its gradient is that of the sum, not a copy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = torch.nn.Linear(6, 4).double()
        self.bias = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x) + self.bias.view(1, -1)).sum(1, keepdim=True)


def a_gradient_that_shares_its_memory() -> dict:
    """One sample on rank 0, eleven on rank 1."""
    balance = LoadBalance("bsp", global_batch=12)
    model, alone = Viewed(), Viewed()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balance)
    single = torch.optim.SGD(alone.parameters(), lr=0.1)
    mine = slice(0, 1) if hvd.rank() == 0 else slice(1, 12)
    for _ in range(4):
        balance.batch(mine.stop - mine.start)
        for net, step, part in ((model, optimizer, mine), (alone, single, slice(0, 12))):
            step.zero_grad()
            functional.mse_loss(net(X[part]), Y[part]).backward()
            step.step()
    return {"difference": difference(model, alone), "moved": difference(alone, Viewed())}


class Uneven(Policy):
    """One micro-batch for each, of another size in every round."""

    name = "uneven"
    round = 0

    def first(self, workers: int, global_batch: int) -> RoundPlan:
        shares = [1 + (self.round + 3 * i) % 5 for i in range(workers - 1)]
        return RoundPlan.of([*shares, global_batch - sum(shares)], None)

    def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
        self.round += 1
        return self.first(plan.workers, plan.total)


def normed() -> torch.nn.Module:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 6)), torch.nn.Conv1d(1, 3, 3), torch.nn.BatchNorm1d(3), torch.nn.Tanh(),
        torch.nn.Flatten(), torch.nn.Linear(12, 4), torch.nn.BatchNorm1d(4, momentum=None),
        torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4, affine=False), torch.nn.Linear(4, 1),
    ).double()  # fmt: skip
    with torch.no_grad():
        for layer in (model[2], model[6]):
            layer.weight.uniform_(0.5, 2.0)
            layer.bias.uniform_(-1.0, 1.0)
    return model


def batch_norm_over_all_ranks() -> dict:
    rounds = 20
    model = normed()
    balance = LoadBalance(Uneven(), global_batch=12)
    model = SyncBatchNorm.convert_sync_batchnorm(model, balance)
    data = TensorDataset(X[:24], Y[:24], torch.arange(24))
    loader = BalancedLoader(data, balance, shuffle=True, stop_at=rounds)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), balance, model.named_parameters()
    )
    seen: list[list[int]] = [[] for _ in range(rounds)]
    while balance.rounds < rounds:
        for x, y, index in loader:
            seen[balance.rounds] += index.tolist()
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
    parts = hvd.allgather_object(seen)
    alone = normed()
    single = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for r in range(rounds):
        index = [i for part in parts for i in part[r]]
        single.zero_grad()
        functional.mse_loss(alone(X[index]), Y[index]).backward()
        single.step()
    pairs = zip(model.state_dict().items(), alone.state_dict().items(), strict=True)
    differences = {name: float((a - b).abs().max()) for (name, a), (other, b) in pairs if name == other}
    model.eval()
    alone.eval()
    return {
        "differences": differences,
        "names": len(alone.state_dict()),
        "moved": difference(alone, normed()),
        "evaluated": (model(X) - alone(X)).abs().max().item(),
        "shares": [[len(part[r]) for part in parts] for r in range(rounds)],
        "spread": spread(model),
    }


def batch_norm_of_equal_ranks_whose_steps_are_all_fixed_cost() -> list:
    """The default policy, and 3 ms on either rank whatever the batch; batch norm raises for a share of one sample."""
    x = torch.randn(6400, 16)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
    )
    balance = LoadBalance(global_batch=64)
    loader = BalancedLoader(TensorDataset(x, x[:, :1]), balance, shuffle=True)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), balance)
    shares = []
    for _ in range(3):
        for a, b in loader:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(a), b)
            time.sleep(3e-3)
            loss.backward()
            optimizer.step()
            shares.append(balance.plan)
    return shares


def batch_norm_leaves_lb_bsp_its_eyes() -> dict:
    """Rank 0 is twice as fast; each norm waits for the slow rank, in the forward and in the backward pass."""
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4),
        torch.nn.Linear(4, 1),
    ).double()  # fmt: skip
    balance = LoadBalance(LBBSP(), global_batch=24)
    model = SyncBatchNorm.convert_sync_batchnorm(model, balance)
    loader = BalancedLoader(TensorDataset(X[:24], Y[:24]), balance, stop_at=24)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), balance)
    finished: list[FinishedRound] = []
    balancer_of(balance).observer = finished.append
    while balance.rounds < 24:
        for x, y in loader:
            time.sleep(len(x) * 4e-3 * (1 + hvd.rank()))  # far above what else takes time
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
    late = int(DEVICE != "cpu")  # there a round's time is told with the next
    return {
        "plans": [f.plan.samples for f in finished[: len(finished) - late]],
        "compute_s": [f.table.figures("compute_s") for f in finished[late:]],
        "wait_s": [f.table.figures("wait_s") for f in finished[1:]],
    }


X_READ, Y_READ = X.cpu(), Y.cpu()  # what a loader's workers can use


class Unreadable(torch.utils.data.Dataset):
    """Sequences of one to six numbers; every fifth cannot be read."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        return (X_READ[i, : 1 + i % 6], Y_READ[i], i) if i % 5 else None


class UnreadableShard(torch.utils.data.IterableDataset):
    """The same, a part for each rank."""

    def __iter__(self):
        return (Unreadable()[i] for i in range(hvd.rank(), 24, hvd.size()))


def padded(samples: list) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Those that can be read, filled up with zeros."""
    read = [sample for sample in samples if sample is not None]
    rows = X_READ.new_zeros(len(read), max((len(x) for x, _, _ in read), default=0))
    for row, (x, _, _) in zip(rows, read, strict=True):
        row[: len(x)] = x
    lengths = X_READ.new_tensor([len(x) for x, _, _ in read])
    targets = torch.stack([y for _, y, _ in read]) if read else Y_READ[:0]
    return rows, lengths, targets, torch.tensor([i for _, _, i in read], dtype=torch.int64, device="cpu")


def samples_left_out_by_collate_fn() -> dict:
    """Batches of one's own making, in pinned memory or not: as one process that has the samples that were read."""

    def run(policy: Policy, global_batch: int, dataset: Any = None, **options: Any) -> dict:
        rounds = 18
        torch.manual_seed(2)
        model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        start = copy.deepcopy(model)
        balance = LoadBalance(policy, global_batch=global_batch)
        loader = BalancedLoader(
            dataset or Unreadable(), balance, stop_at=rounds, collate_fn=padded,
            weight_of=lambda batch: len(batch[3]), **options,
        )  # fmt: skip
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), balance, model.named_parameters()
        )
        seen: list[list[int]] = [[] for _ in range(rounds)]
        while balance.rounds < rounds:
            for x, lengths, y, index in loader:
                seen[balance.rounds] += index.tolist()
                optimizer.zero_grad()
                features = torch.stack([x.sum(1), lengths], 1).to(DEVICE)
                functional.mse_loss(model(features), y.to(DEVICE)).backward()
                optimizer.step()
        parts = hvd.allgather_object(seen)
        alone = start
        single = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
        for r in range(rounds):
            index = [i for part in parts for i in part[r]]
            features = torch.stack([torch.stack([X[i, : 1 + i % 6].sum(), torch.tensor(1.0 + i % 6)]) for i in index])
            single.zero_grad()
            functional.mse_loss(alone(features), Y[index]).backward()
            single.step()
        return {
            "difference": difference(model, alone),
            "spread": spread(model),
            "visits": [[i for part in parts for i in part[r]] for r in range(rounds)],
            "counts": [[len(part[r]) for part in parts] for r in range(rounds)],
        }

    def policies_that_count() -> None:
        BalancedLoader(TensorDataset(X), LoadBalance(NonBlocking(2), global_batch=12), weight_of=len)

    def nobody_counts() -> None:
        balance = LoadBalance("bsp", global_batch=24)
        next(iter(BalancedLoader(Unreadable(), balance, collate_fn=padded)))

    return {
        "uneven": run(Uneven(), 12, shuffle=True),
        "several micro-batches": run(StaticAllocation([1, 2]), 12),
        "pinned, by a worker": run(BSP(), 12, shuffle=True, num_workers=1, pin_memory=True),
        "shards": run(BSP(), 12, UnreadableShard(), stream="shard", rounds_per_epoch=2),
        "nothing left on a rank": run(BSP(), 2),
        "nothing left of a micro-batch": run(BSP(max_micro_batch=1), 12),
        "refused": [refusal(policies_that_count), refusal(nobody_counts)],
    }


def batch_norm_refusals() -> dict:
    def layer(policy: str | Policy) -> SyncBatchNorm:
        return SyncBatchNorm(3, balance=LoadBalance(policy, global_batch=24), name="norm")

    class SometimesMore(Uneven):
        name = "sometimes-more"

        def next(self, plan: RoundPlan, finished: FinishedRound) -> RoundPlan:
            return RoundPlan(plan.samples, tuple(min(2, i + 1) for i in range(plan.workers)))

    def more_micro_batches(policy: Policy) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).double()
        balance = LoadBalance(policy, global_batch=12)
        model = SyncBatchNorm.convert_sync_batchnorm(model, balance)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balance)
        for x, y in BalancedLoader(TensorDataset(X[:24], Y[:24]), balance):
            functional.mse_loss(model(x), y).backward()
            optimizer.step()

    def nothing_left() -> None:
        """On all ranks here, which all say so; one alone would end the others by ending itself."""
        model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).double()
        balance = LoadBalance("bsp", global_batch=12)
        model = SyncBatchNorm.convert_sync_batchnorm(model, balance)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balance)
        for x in BalancedLoader(TensorDataset(X[:24]), balance, collate_fn=lambda samples: X[:0], weight_of=len):
            model(x).sum().backward()
            optimizer.step()

    def short_round(drop_last: bool, samples: int = SAMPLES) -> None:
        """A remainder of a single sample joins the second round, or is left out."""
        model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).double()
        balance = LoadBalance("bsp", global_batch=12)
        model = SyncBatchNorm.convert_sync_batchnorm(model, balance)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balance)
        done = 0
        for (x,) in BalancedLoader(TensorDataset(X[:samples]), balance, drop_last=drop_last):
            done += 1
            model(x).sum().backward()
            optimizer.step()
        if done == 2:
            raise HeteroError("two rounds were done")

    return {
        "short round": refusal(lambda: short_round(False)),
        "short round dropped": refusal(lambda: short_round(True)),
        "short epoch": refusal(lambda: short_round(False, 1)),
        "no balance": refusal(lambda: SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(3))),
        "non-blocking": refusal(lambda: layer(NonBlocking(2))),
        "elastic-bsp": refusal(lambda: layer(ElasticBSP())),
        "self-adaptive": refusal(lambda: layer(SelfAdaptive(total=4))),
        "static": refusal(lambda: more_micro_batches(StaticAllocation([1, 2, 1][: hvd.size()]))),
        "no data": refusal(lambda: layer(StaticAllocation([0, 1, 1][: hvd.size()]))),
        "outside": refusal(lambda: layer("bsp")(torch.randn(4, 3))),
        "one-dimensional": refusal(lambda: layer("bsp")(torch.randn(4))),
        "later": refusal(lambda: more_micro_batches(SometimesMore())),
        "nothing left": refusal(nothing_left),
        "evaluates": refusal(lambda: layer("bsp").eval()(torch.randn(4, 3))),
    }


def evaluation() -> dict:
    """Unequal parts, a rank without samples, and names that differ."""
    rank, size = hvd.rank(), hvd.size()
    part = torch.utils.data.Subset(TensorDataset(X, Y), range(rank, SAMPLES, size))
    mine = torch.stack([y for _, y in part])
    averages = torch_hooks.average_by_samples({"y": mine.mean(), "y2": float((mine**2).mean())}, np.int64(len(part)))
    nothing = torch_hooks.average_by_samples(
        torch.full((2,), math.nan) if rank == 0 else torch.tensor([3.0, 5.0]), 0 if rank == 0 else 7
    )
    return {
        "differences": [abs(float(averages["y"] - Y.mean())), abs(averages["y2"] - float((Y**2).mean()))],
        "forms": [type(v).__name__ for v in averages.values()],
        "order": list(averages),
        "nothing": nothing.tolist(),
        "names": refusal(lambda: torch_hooks.average_by_samples({f"of {rank}": 1.0}, 1)),
        "no samples": refusal(lambda: torch_hooks.average_by_samples(1.0, 0)),
        "negative": refusal(lambda: torch_hooks.average_by_samples(1.0, -1)),
    }


CASES = [
    batch_norm_over_all_ranks,
    batch_norm_refusals,
    evaluation,
    a_scaler_changes_nothing_where_nothing_overflows,
    an_infinity_on_one_rank_is_skipped_by_all,
    clipping_of_unscaled_gradients,
    a_scaler_that_is_disabled,
    a_scaler_resumes,
    scaler_refusals,
    bfloat16_autocast,
    compression,
    a_gradient_that_shares_its_memory,
    batch_norm_leaves_lb_bsp_its_eyes,
    batch_norm_of_equal_ranks_whose_steps_are_all_fixed_cost,
    samples_left_out_by_collate_fn,
]


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(hvd, {case.__name__: case for case in CASES})

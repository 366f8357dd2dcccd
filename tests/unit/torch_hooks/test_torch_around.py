"""What stands around a loop that stays as it is: scaled losses, batch norm over ranks, samples that are left out."""

from __future__ import annotations

import contextlib
import re
import statistics
import time

import pytest
from clocks import ThreadClock

torch = pytest.importorskip("torch")
from jobs_on_threads import FEATURES, Job, X, Y, flat, linear, require_same_bits, told  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import Dataset, IterableDataset, TensorDataset  # noqa: E402

from hvd_hetero.policies import BSP, LBBSP, Policy, StaticAllocation  # noqa: E402
from hvd_hetero.rounds import RoundPlan  # noqa: E402
from hvd_hetero.session import balancer_of  # noqa: E402
from hvd_hetero.testing import run_on_threads  # noqa: E402
from torch_hooks import BalancedLoader, DistributedOptimizer, GradScaler, LoadBalance, SyncBatchNorm  # noqa: E402


class Uneven(Policy):
    """One micro-batch for each, of another size in every round."""

    name = "uneven"
    round = 0

    def first(self, workers, global_batch):
        share = 1 + self.round % 5
        return RoundPlan.of([share, global_batch - share])

    def next(self, plan, finished):
        self.round += 1
        return self.first(plan.workers, plan.total)


@pytest.fixture
def clock(monkeypatch):
    clock = ThreadClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def trained_with_scaler(scaler_of, unscale):
    """Two rounds with scaled losses; ``unscale`` is done before each step."""
    job = Job(stop_at=2)
    scaler = scaler_of(job)
    for x, y in job.loader:
        job.optimizer.zero_grad()
        scaler.scale(job.loss(x, y)).backward()
        with unscale(job, scaler):
            scaler.step(job.optimizer)
        scaler.update()
    return flat(job.model)


def clip(job):
    torch.nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)


def own_scaler(job):
    return GradScaler("cpu", optimizer=job.optimizer, init_scale=1024.0)


def own_scaler_and_clipping_hook(job):
    job.optimizer.register_step_pre_hook(lambda *_: clip(job))
    return own_scaler(job)


def clip_in_the_body(job, scaler):
    assert scaler.unscale_(job.optimizer)
    clip(job)
    return contextlib.nullcontext()


def synchronise(job, scaler):
    job.optimizer.synchronize()
    return job.optimizer.skip_synchronize()


def trained(scaler_of, unscale=lambda job, scaler: contextlib.nullcontext()):
    first, second = run_on_threads(lambda rank: trained_with_scaler(scaler_of, unscale), 2)
    assert torch.equal(first, second)
    return first


def test_clipping_sees_unscaled_gradients_in_the_hook_and_after_unscale():
    in_hook, in_body = trained(own_scaler_and_clipping_hook), trained(own_scaler, clip_in_the_body)
    assert torch.equal(in_hook, in_body)
    assert not torch.allclose(in_hook, trained(own_scaler), atol=1e-3)


def test_pytorchs_own_scaler_works_after_synchronize():
    plain = run_on_threads(lambda rank: flat(Job(stop_at=2).epochs().model), 2)[0]
    scaled = trained(lambda job: torch.amp.GradScaler("cpu", init_scale=64.0), synchronise)
    torch.testing.assert_close(scaled, plain, rtol=0, atol=1e-14)


def normalising(policy="bsp", **options):
    """A job whose model has a batch norm over all ranks."""
    layers = torch.nn.Linear(FEATURES, 3), torch.nn.BatchNorm1d(3), torch.nn.Tanh(), torch.nn.Linear(3, 1)
    model = torch.nn.Sequential(*layers).double()
    for number, parameter in enumerate(model.parameters()):
        parameter.data = torch.linspace(-1.0, 1.0 + number, parameter.numel()).view_as(parameter).double()
    return Job(policy, model=model, prepare=SyncBatchNorm.convert_sync_batchnorm, **options)


def test_lb_bsp_finds_the_slow_rank_behind_a_batch_norm_that_makes_all_wait_for_it():
    """Rank 0 is twice as fast; the norm waits for the slow rank, in the forward and in the backward pass."""

    def case(rank):
        job = normalising(LBBSP(), batch=24, data=TensorDataset(X[:24], Y[:24]))
        finished = []
        balancer_of(job.balance).observer = finished.append
        while job.balance.rounds < 24:
            for x, y in job.loader:
                time.sleep(len(x) * 3e-3 * (1 + rank))  # far above what else takes time
                job.optimizer.zero_grad()
                job.loss(x, y).backward()
                job.optimizer.step()
        return finished

    finished = run_on_threads(case, 2)[0]
    fast, slow = (statistics.median(shares) for shares in zip(*(f.plan.samples for f in finished[-8:]), strict=True))
    assert 1.3 < fast / slow < 2.7
    equal = [r for r, each in enumerate(finished[:-1]) if each.plan.samples == (12, 12)]
    fast_s, slow_s = zip(*(finished[r].table.figures("compute_s") for r in equal), strict=True)
    # Of 36 and 72 ms. With its waiting the fast rank's time is never the shorter.
    assert min(slow_s) > 1.2 * min(fast_s), "what each reports is its own"
    waits = [finished[r + 1].table.figures("wait_s") for r in equal]  # told one round later
    assert max(fast_s - slow_s for fast_s, slow_s in waits) > 24e-3, "of the 36 ms between them"


def test_no_share_of_equal_ranks_becomes_too_small_for_batch_norm(clock):
    """The default policy, and 3 ms on either rank whatever the batch, give or take a tenth."""
    data = TensorDataset(X[torch.arange(6400) % len(X)], Y[torch.arange(6400) % len(X)])

    def case(rank):
        job, shares = normalising("lb-bsp", batch=64, data=data), []
        noise = torch.Generator().manual_seed(rank)
        for _ in range(3):
            for x, y in job.loader:
                job.optimizer.zero_grad()
                loss = job.loss(x, y)
                clock.pass_s(3e-3 * (1 + 0.1 * torch.randn((), generator=noise).item()))
                loss.backward()
                job.optimizer.step()
                shares.append(len(x))
        return shares

    shares = run_on_threads(case, 2)
    assert len(shares[0]) == 300
    assert min(map(min, shares)) >= 16


def adversaries():
    dice = torch.Generator().manual_seed(1)
    made = [
        torch.nn.Sequential(
            torch.nn.Linear(inputs, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.LeakyReLU(0.2),
            torch.nn.Linear(8, outputs), last,
        ).double()
        for inputs, outputs, last in ((FEATURES, 1, torch.nn.Sigmoid()), (2, FEATURES, torch.nn.Tanh()))
    ]  # fmt: skip
    for parameter in (p for model in made for p in model.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=dice, dtype=torch.float64) / 2
    return made


def adversarial_step(judge, generator, optimizers, real, noise):
    """Two backward passes of the one, and one of the other, which goes through the first, too."""
    ones, zeros = torch.ones(len(real), 1).double(), torch.zeros(len(real), 1).double()
    judge.zero_grad()
    functional.binary_cross_entropy(judge(real), ones).backward()
    fake = generator(noise)
    functional.binary_cross_entropy(judge(fake.detach()), zeros).backward()
    optimizers[0].step()
    generator.zero_grad()
    functional.binary_cross_entropy(judge(fake), ones).backward()
    optimizers[1].step()


def test_two_optimizers_that_step_in_turn_train_adversaries_as_one_process_does():
    def adam(model):
        return torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.5, 0.999))

    def case(rank):
        serves = LoadBalance("lb-bsp", global_batch=8)
        models = [SyncBatchNorm.convert_sync_batchnorm(m, serves, f"{n}") for n, m in enumerate(adversaries())]
        loader = BalancedLoader(TensorDataset(X[:25], Y[:25]), serves)
        optimizers = [
            DistributedOptimizer(adam(model), each, model.named_parameters())
            for model, each in zip(models, (serves, serves.also()), strict=True)
        ]
        for _ in range(2):
            for x, y in loader:
                adversarial_step(*models, optimizers, x, x[:, :2] + y)
        return models

    ranks, alone = run_on_threads(case, 2), adversaries()
    singles = [adam(model) for model in alone]
    for _ in range(2):
        for part in (slice(8), slice(8, 16), slice(16, 25)):  # the last sample joins the third round
            adversarial_step(*alone, singles, X[part], X[part][:, :2] + Y[part])
    for models in zip(*ranks, strict=True):
        require_same_bits(models)
    for mine, its in zip(ranks[0], alone, strict=True):
        torch.testing.assert_close(flat(mine), flat(its), rtol=0, atol=1e-9)  # Adam divides small by small


class SometimesMore(Uneven):
    name = "sometimes-more"

    def next(self, plan, finished):
        return RoundPlan(plan.samples, tuple(min(2, i + 1) for i in range(plan.workers)))


def of_one_sample(rank):
    normalising(data=TensorDataset(X[:1], Y[:1])).epochs()


class OneSample(IterableDataset):
    def __iter__(self):
        return iter([(X[0], Y[0])])


def of_a_stream_of_one_sample(rank):
    normalising(data=OneSample(), stream="whole").epochs()


def nothing_left(rank):
    """On all ranks here, which all say so; one alone would end the others by ending itself."""
    normalising(collate_fn=lambda samples: (X[:0], Y[:0]), weight_of=lambda batch: len(batch[0])).epochs()


def later_more_micro_batches(rank):
    normalising(SometimesMore()).epochs()


def nobody_counts(rank):
    next(iter(Job(data=Unreadable(), collate_fn=padded, batch=24).loader))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (later_more_micro_batches, "HeteroError: round 1 has 1, 2 micro-batches under policy 'sometimes-more'"),
        (of_one_sample, r"ValueError: epoch 0 has 1 sample\(s\) left for 2 ranks, and SyncBatchNorm needs 1 on"),
        (
            of_a_stream_of_one_sample,
            r"ValueError: epoch 0 has 1 sample\(s\) left for 2 ranks, and SyncBatchNorm needs 1 on",
        ),
        (nothing_left, "ValueError: weight_of must be positive with SyncBatchNorm.*GroupNorm"),
        (nobody_counts, "ValueError: collate_fn must use all samples that it is given"),
    ],
)
def test_what_a_norm_or_a_mean_over_all_ranks_cannot_do_is_told(case, message):
    for said in told(case):
        assert re.match(message, said)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_remainder_of_a_single_sample_joins_the_round_before_or_is_left_out(drop_last):
    data = TensorDataset(X[:25], Y[:25])
    jobs = run_on_threads(lambda rank: normalising(data=data, drop_last=drop_last).epochs(), 2)
    assert [job.balance.rounds for job in jobs] == [2, 2]


class Unreadable(Dataset):
    """Every fifth sample cannot be read."""

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return (X[i], Y[i], i) if i % 5 else None


def shard(rank):
    class Shard(IterableDataset):
        def __iter__(self):
            return (Unreadable()[i] for i in range(rank, 24, 2))

    return Shard()


def padded(samples):
    """Those that can be read."""
    read = [sample for sample in samples if sample is not None]
    index = torch.tensor([i for _, _, i in read], dtype=torch.int64)
    return X[index], Y[index], index


LEFT_OUT = {
    "uneven": (Uneven, 12, lambda rank: {"shuffle": True}),
    "several micro-batches": (lambda: StaticAllocation([1, 2]), 12, lambda rank: {}),
    "pinned, by a worker": (BSP, 12, lambda rank: {"num_workers": 1, "pin_memory": True}),
    "shards": (BSP, 12, lambda rank: {"data": shard(rank), "stream": "shard", "rounds_per_epoch": 2}),
    "nothing left on a rank": (BSP, 2, lambda rank: {}),
    "nothing left of a micro-batch": (lambda: BSP(max_micro_batch=1), 12, lambda rank: {}),
}


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
@pytest.mark.parametrize("name", LEFT_OUT)
def test_samples_that_collate_fn_leaves_out_weigh_nothing(name):
    """As one process that has the samples that were read; a rank or a micro-batch with nothing left takes part."""
    make, batch, options = LEFT_OUT[name]
    counts = {"collate_fn": padded, "weight_of": lambda batch: len(batch[2])}

    def case(rank):
        job = Job(make(), batch=batch, stop_at=12, **{"data": Unreadable()} | counts | options(rank))
        seen = [[] for _ in range(12)]
        while job.balance.rounds < 12:
            for x, y, index in job.loader:
                seen[job.balance.rounds] += index.tolist()
                job.optimizer.zero_grad()
                job.loss(x, y).backward()
                job.optimizer.step()
        return job.model, seen

    models, seen = zip(*run_on_threads(case, 2), strict=True)
    alone = linear()
    single = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    rounds = [first + second for first, second in zip(*seen, strict=True)]
    for index in rounds:
        single.zero_grad()
        functional.mse_loss(alone(X[index]), Y[index]).backward()
        single.step()
    require_same_bits(models)
    torch.testing.assert_close(flat(models[0]), flat(alone), rtol=0, atol=1e-12)
    readable, length = [i for i in range(24) if i % 5], 24 // batch
    for begin in range(0, 12, length):
        assert sorted(i for index in rounds[begin : begin + length] for i in index) == readable
    if name == "nothing left on a rank":
        assert sum(not (first and second) for first, second in zip(*seen, strict=True)) >= 4

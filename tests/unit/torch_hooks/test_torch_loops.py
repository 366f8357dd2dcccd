"""What users do around a loop works, what goes wrong in it is told on every rank, and what only looks wrong works."""

from __future__ import annotations

import re
import time

import pytest
from clocks import ThreadClock

torch = pytest.importorskip("torch")
from jobs_on_threads import DATA, FEATURES, SAMPLES, Job, X, Y, flat, linear, require_same_bits, told  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import Dataset, TensorDataset  # noqa: E402

from hvd_hetero.errors import RoundStateError  # noqa: E402
from hvd_hetero.policies import LBBSP, StaticAllocation  # noqa: E402
from hvd_hetero.session import balancer_of  # noqa: E402
from hvd_hetero.telemetry import read_run  # noqa: E402
from hvd_hetero.testing import run_on_threads  # noqa: E402


def two_layers():
    generator = torch.Generator().manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


@pytest.fixture
def clock(monkeypatch):
    clock = ThreadClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_worker_processes_change_nothing_but_the_lead():
    def case(rank, workers):
        job = Job(StaticAllocation([1, 3]), num_workers=workers, shuffle=True).epochs(2)
        return flat(job.model), balancer_of(job.balance).planner.rounds_ahead

    with_workers, without = (run_on_threads(lambda rank, n=n: case(rank, n), 2) for n in (2, 0))
    for (mine, rounds_ahead), (its, _) in zip(with_workers, without, strict=True):
        assert torch.equal(mine, its)
        assert rounds_ahead == 4


def test_lb_bsp_with_a_lead_finds_the_slow_rank_and_visits_every_sample_once(clock):
    data = TensorDataset(X[torch.arange(960) % SAMPLES], Y[torch.arange(960) % SAMPLES], torch.arange(960))

    def case(rank):
        job, seen, plans = Job(LBBSP(), data=data, batch=48, num_workers=1, shuffle=True), [], []
        for _ in range(2):
            for x, y, index in job.loader:
                plans.append(job.balance.plan)
                seen += index.tolist()
                clock.pass_s(len(x) * (2e-3 if rank == 1 else 0.5e-3))
                job.optimizer.zero_grad()
                job.loss(x, y).backward()
                job.optimizer.step()
        return seen, plans, job.model

    seen, plans, models = zip(*run_on_threads(case, 2), strict=True)
    assert sorted(seen[0] + seen[1]) == sorted([*range(960)] * 2)
    fast, slow = plans[0][-1]
    assert fast > 3 * slow
    require_same_bits(models)


def test_a_rank_that_costs_more_than_it_gives_rests_and_training_is_that_of_one_process(clock):
    def case(rank):
        job, seen = Job(LBBSP(may_rest=True), stop_at=20), [[] for _ in range(20)]
        while job.balance.rounds < 20:
            for x, y in job.loader:
                seen[job.balance.rounds] += x[:, 0].tolist()
                clock.pass_s((5e-3 + len(x) * 1e-3) * (100 if rank else 1))
                job.optimizer.zero_grad()
                job.loss(x, y).backward()
                job.optimizer.step()
        return job.model, seen

    models, seen = zip(*run_on_threads(case, 2), strict=True)
    assert [] in seen[1], "it has rested"
    alone, numbers = linear(), X[:, 0].tolist()
    plain = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for first, second in zip(*seen, strict=True):
        index = [numbers.index(number) for number in first + second]
        plain.zero_grad()
        functional.mse_loss(alone(X[index]), Y[index]).backward()
        plain.step()
    require_same_bits(models)
    torch.testing.assert_close(flat(models[0]), flat(alone), rtol=0, atol=1e-12)


def test_the_nan_of_an_empty_batch_reaches_nobody():
    def case(rank):
        model, count = linear(), 0 if rank == 0 else 8
        model.temperature = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        job = Job(model=model)
        job.balance.batch(count)
        loss = model.temperature * job.loss(X[:count], Y[:count])
        assert bool(loss.isnan()) == (count == 0)
        loss.backward()  # the gradient of the temperature is that NaN
        job.optimizer.step()
        return model

    require_same_bits(run_on_threads(case, 2))


def test_a_step_that_is_skipped_after_synchronising_leaves_the_next_round_whole():
    """As a gradient scaler skips it on overflow."""

    def case(rank):
        job = Job(data=DATA, batch=4)
        for x, y in job.loader:
            job.optimizer.zero_grad()
            job.loss(x, y).backward()
            job.optimizer.synchronize()
            if job.balance.rounds % 3:
                with job.optimizer.skip_synchronize():
                    job.optimizer.step()
        assert job.balance.rounds == 7
        return job.model

    require_same_bits(run_on_threads(case, 2))


def test_layers_frozen_and_thawed_train_as_in_one_process_and_another_optimizer_goes_on():
    names, rounds = ("0.weight", "2.bias"), 15

    def freeze(model, number):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (name in names and (3 <= number < 6 or 9 <= number < 11)))

    def case(rank):
        job = Job(model=two_layers(), batch=8)
        optimizer = job.optimizer
        for number in range(rounds):
            if number == 13:
                optimizer.close()
                with pytest.raises(RoundStateError, match="on a closed optimizer"):
                    optimizer.step()
                optimizer = type(optimizer)(job.inner, job.balance, job.model.named_parameters())
            freeze(job.model, number)
            mine = slice(number + 4 * rank, number + 4 * rank + 4)
            job.balance.batch(4)
            optimizer.zero_grad()
            job.loss(X[mine], Y[mine]).backward()
            optimizer.step()
        return job.model

    models, alone = run_on_threads(case, 2), two_layers()
    plain = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for number in range(rounds):
        freeze(alone, number)
        plain.zero_grad()
        functional.mse_loss(alone(X[number : number + 8]), Y[number : number + 8]).backward()
        plain.step()
    require_same_bits(models)
    torch.testing.assert_close(flat(models[0]), flat(alone), rtol=0, atol=1e-12)


def test_step_hooks_run_once_per_round_also_where_there_is_no_data():
    """Clipping and a schedule in step hooks: ranks stay together although one has nothing."""

    def case(rank):
        job = Job(StaticAllocation([1, 0]))
        schedule = torch.optim.lr_scheduler.OneCycleLR(job.optimizer, max_lr=0.1, total_steps=20)
        clip = torch.nn.utils.clip_grad_norm_
        job.optimizer.register_step_pre_hook(lambda *_: clip(job.model.parameters(), 0.1) and None)
        job.optimizer.register_step_post_hook(lambda *_: schedule.step())
        job.epochs(4)
        assert job.balance.rounds == schedule.last_epoch == 12
        return job.model

    require_same_bits(run_on_threads(case, 2))


def test_a_schedule_that_asks_for_the_end_of_the_round_works():
    def case(rank):
        job = Job(StaticAllocation([1, 3]), drop_last=True)
        schedule = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, gamma=0.5)
        job.epochs(2, lambda: schedule.step() if job.balance.round_complete else None)
        return job.optimizer.param_groups[0]["lr"], job.balance.rounds

    assert run_on_threads(case, 2) == [(0.05 * 0.5**4, 4)] * 2


def test_two_trainings_of_one_job_do_not_disturb_each_other():
    def case(rank):
        jobs = [Job(drop_last=True), Job(drop_last=True)]
        for parts in zip(*(job.loader for job in jobs), strict=True):
            for job, (x, y) in zip(jobs, parts, strict=True):
                job.optimizer.zero_grad()
                job.loss(x, y).backward()
            for job in jobs:
                job.optimizer.step()
        assert [job.balance.rounds for job in jobs] == [2, 2]
        return jobs[0].model, jobs[1].model

    for models in zip(*run_on_threads(case, 2), strict=True):
        require_same_bits(models)


def test_parameters_added_later_come_from_rank_0_and_are_synchronised():
    def case(rank):
        job = Job()
        extra = torch.nn.Parameter(torch.full((FEATURES,), float(rank), dtype=torch.float64))
        job.optimizer.add_param_group({"params": [extra], "lr": 0.01})
        assert not extra.any()
        for x, y in job.loader:
            job.optimizer.zero_grad()
            job.loss(x + extra, y).backward()
            job.optimizer.step()
        return extra.tolist()

    first, second = run_on_threads(case, 2)
    assert first == second
    assert all(first)


def test_reading_updating_and_what_lies_between_rounds_are_told_apart(clock, tmp_path):
    class SlowToRead(Dataset):
        def __len__(self):
            return SAMPLES

        def __getitem__(self, i):
            clock.pass_s(0.002)
            return X[i], Y[i]

    def case(rank):
        job = Job(data=SlowToRead(), balance={"telemetry": tmp_path / "run.jsonl"}, drop_last=True)
        job.optimizer.register_step_pre_hook(lambda *_: clock.pass_s(0.03))
        job.epochs(2, lambda: clock.pass_s(0.2))
        job.balance.close()

    run_on_threads(case, 2)
    run = read_run(tmp_path / "run.jsonl")
    for name, expected in (("input_s", 6 * 0.002), ("compute_s", 0.03)):
        assert getattr(run, name)[1:] == pytest.approx(expected), name
    assert run.elapsed_s[1:] == pytest.approx(0.03 + 0.012 + 0.2), "what lies between rounds is in their time alone"


def scheduled_in_the_body(policy, **options):
    def case(rank):
        job = Job(policy(), **options)
        job.epochs(4, torch.optim.lr_scheduler.ExponentialLR(job.optimizer, gamma=0.9).step)

    return case


def clips_in_the_body(rank):
    job = Job(StaticAllocation([1, 0]))
    for _ in range(6):
        for x, y in job.loader:
            job.optimizer.zero_grad()
            job.loss(x, y).backward()
            job.optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1e-3)
            with job.optimizer.skip_synchronize():
                job.optimizer.step()


def trained_on_one_rank_alone(frozen_at_first):
    def case(rank):
        job = Job(batch=4)
        job.model.bias.requires_grad_(not frozen_at_first)

        def after():
            if rank == 1 and job.balance.rounds == 3:
                job.model.bias.requires_grad_(frozen_at_first)

        job.epochs(1, after)

    return case


def a_small_difference_of_rates(rank):
    job = Job()
    job.optimizer.param_groups[0]["lr"] = 1e-4 if rank == 0 else 9.98e-5
    job.epochs()


def leaves_at_another_round(rank):
    job = Job(drop_last=True)
    for epoch in range(2):
        for x, y in job.loader:
            job.optimizer.zero_grad()
            job.loss(x, y).backward()
            job.optimizer.step()
            if epoch == 0 and rank == 1:
                break


def shuffles_otherwise(rank):
    job = Job(shuffle=True, seed=rank)
    try:
        job.epochs()
    finally:
        assert job.balance.rounds == 0


def data_cut_by_hand(rank):
    """In parts of equal length, as for a DistributedSampler."""
    job = Job(data=TensorDataset(X[rank::2], Y[rank::2]))
    try:
        job.epochs()
    finally:
        assert job.balance.rounds == 0


def parameters_in_another_order(rank):
    model = torch.nn.Module()
    for name in ("a", "b") if rank == 0 else ("b", "a"):
        setattr(model, name, torch.nn.Linear(FEATURES, 1))
    Job(model=model)


OTHER_RATES = r"PlanMismatchError: .*ranks \[1\] have other hyper-parameters"
OTHER_PLAN = r"PlanMismatchError: .*ranks \[1\] follow another plan or another order of the data"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (scheduled_in_the_body(lambda: StaticAllocation([1, 0])), f"{OTHER_RATES}.*register_step_post_hook"),
        (scheduled_in_the_body(lambda: StaticAllocation([1, 3])), f"{OTHER_RATES}.*register_step_post_hook"),
        (clips_in_the_body, r"PlanMismatchError: .*ranks \[1\] hold other parameters.*register_step_pre_hook"),
        (trained_on_one_rank_alone(False), r"PlanMismatchError: round 3: ranks \[1\] .*freeze parameters on all"),
        (trained_on_one_rank_alone(True), r"PlanMismatchError: round 3: ranks \[1\] .*freeze parameters on all"),
        (a_small_difference_of_rates, OTHER_RATES.replace(".*", "round 0: ")),
        (leaves_at_another_round, f"{OTHER_PLAN}.*stop_at"),
        (shuffles_otherwise, OTHER_PLAN),
        (data_cut_by_hand, r".*ranks \[1\] hold other samples than rank 0 at the same indices. Give every rank the w"),
        (parameters_in_another_order, "HeteroError: 1 ranks differ from rank 0 in the parameters that they train"),
    ],
)
def test_ranks_that_part_are_told_so_on_each_and_none_waits_for_the_others(case, message):
    for said in told(case):
        assert re.match(message, said)

"""Devices that saturate and run out of memory, played by threads: the split that is found, and nothing ever lost.

Every sample is its own index, so what was visited is written down from the batches themselves. The oracle is plain
PyTorch on the union of what the ranks have seen, round by round. On ranks that are processes: test_gpu_proof.py.
"""

from __future__ import annotations

import json
import re
import time
from functools import partial

import pytest
from clocks import ThreadClock

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402

from hvd_hetero.allocation import Gamma, minimax  # noqa: E402
from hvd_hetero.policies import BSP, LBBSP, ElasticBSP, NonBlocking, StaticAllocation  # noqa: E402
from hvd_hetero.session import balancer_of  # noqa: E402
from hvd_hetero.telemetry import read_run  # noqa: E402
from hvd_hetero.testing import ThreadRankError, run_on_threads  # noqa: E402
from tests.support.device_model import DeviceModel  # noqa: E402
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance, out_of_memory  # noqa: E402

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports what all threads would import at once
FEATURES, SAMPLES, ROUNDS, BATCH, RANKS = 6, 251, 9, 48, 3
OWN = torch.OutOfMemoryError
X = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
Y = torch.sin(X.sum(1, keepdim=True))


class Indexed(torch.utils.data.Dataset):
    def __init__(self, length=SAMPLES):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return i


class Net(torch.nn.Module):
    """Layers whose gradients arrive one after the other: the last layer's first."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Linear(FEATURES, n) for n in (FEATURES, FEATURES, 1))
        self.middle = None
        self.double()
        dice = torch.Generator().manual_seed(100)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=dice, dtype=torch.float64) / 2

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        if self.middle is not None and hidden.requires_grad:
            # In the backward pass: the gradients of the layers above are there, those of the first are not.
            hidden.register_hook(self.middle)
        return self.third(torch.tanh(self.second(hidden)))

    def loss(self, index):
        return functional.mse_loss(self(X[index]), Y[index])


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


class Shortage:
    """Memory runs short ``times`` times, at ``moment``, on rank 0, in micro-batches that ``when`` picks."""

    def __init__(self, rank, moment, when, times=1):
        self.rank, self.moment, self._when = rank, moment, when
        self.left = times if rank == 0 else 0
        self.breaks = False
        """whether the loop is left then"""
        self.sizes = []

    def strike_backward(self, balance, size, gradient):
        self.strike("backward", balance, size)

    def strike(self, moment, balance, size):
        if self.left and size > 1 and moment == self.moment and self._when(balance, size):
            self.left -= 1
            self.sizes.append(size)
            raise OWN(f"no memory for {size} samples")


class ShortageWhileOthersFinish(Shortage):
    """The rank is ahead of the others until its memory runs short; when it goes on they have told it to stop."""

    def strike(self, moment, balance, size):
        if moment == "forward" and self.rank != 0:
            time.sleep(0.02)
        try:
            super().strike(moment, balance, size)
        except OWN:
            time.sleep(0.15)
            raise


class ShortageThatEndsTheEpoch(Shortage):
    """On every rank, in the same micro-batch, and each then leaves the loop."""

    def __init__(self, rank, moment, when):
        super().__init__(rank, moment, when)
        self.left, self.breaks = 1, True


def train(policy, shortage):
    """Train on this rank; return its parameters, its samples and the epoch of each round, limits, and what struck."""
    net, seen, epochs, limits, complete = Net(), [[] for _ in range(ROUNDS)], [], [], set()
    balance = LoadBalance(policy, global_batch=BATCH)
    loader = BalancedLoader(Indexed(), balance, shuffle=True, seed=5, stop_at=ROUNDS)
    optimizer = DistributedOptimizer(sgd(net), balance, net.named_parameters())

    def observe(finished):
        epochs.append(finished.epoch)
        limits.append([int(v) for v in finished.table.column("limit")])

    balancer_of(balance).observer = observe
    while balance.rounds < ROUNDS:
        for index in loader:
            round = balance.rounds
            with balance.surviving_out_of_memory():
                optimizer.zero_grad()
                shortage.strike("forward", balance, len(index))
                net.middle = partial(shortage.strike_backward, balance, len(index))
                net.loss(index).backward()
                shortage.strike("after backward", balance, len(index))
                optimizer.step()
                seen[round] += index.tolist()
                continue
            complete.add(balance.round_complete)
            if shortage.breaks:
                seen[round].clear()
                break
    balance.close()
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach(), seen, epochs, limits, complete, shortage


def later(balance, size):
    """Not in the first micro-batch of a round: others have been accumulated."""
    return balance.rounds >= 3 and balancer_of(balance).accumulating and not balancer_of(balance).closing


def last_of_several(balance, size):
    return balance.rounds >= 3 and balancer_of(balance).accumulating and balancer_of(balance).closing


def at_any(balance, size):
    return balance.rounds >= 3


def in_fours():
    return BSP(max_micro_batch=4)


SHORTAGES = {
    "forward": (BSP, lambda rank: Shortage(rank, "forward", at_any)),
    "backward": (BSP, lambda rank: Shortage(rank, "backward", at_any)),
    "after backward": (BSP, lambda rank: Shortage(rank, "after backward", at_any)),
    "twice in a row": (BSP, lambda rank: Shortage(rank, "backward", at_any, times=2)),
    "three sizes": (BSP, lambda rank: Shortage(rank, "backward", lambda b, n: b.rounds >= 3 and n > 2, times=3)),
    "later micro-batch, forward": (in_fours, lambda rank: Shortage(rank, "forward", later)),
    "later micro-batch, backward": (in_fours, lambda rank: Shortage(rank, "backward", later, times=2)),
    "last micro-batch, forward": (in_fours, lambda rank: Shortage(rank, "forward", last_of_several, times=2)),
    "last micro-batch, backward": (in_fours, lambda rank: Shortage(rank, "backward", last_of_several, times=2)),
    "every micro-batch above five": (BSP, lambda rank: Shortage(rank, "backward", lambda b, n: n > 5, times=1000)),
    "left for good": (in_fours, lambda rank: ShortageThatEndsTheEpoch(rank, "forward", later)),
    "static": (lambda: StaticAllocation([3, 1, 2]), lambda rank: Shortage(rank, "backward", later, times=2)),
    "non-blocking": (lambda: NonBlocking(6), lambda rank: Shortage(rank, "backward", at_any)),
    "non-blocking, after the signal to stop": (
        lambda: NonBlocking(2, anticipates=False),
        lambda rank: ShortageWhileOthersFinish(rank, "backward", last_of_several),
    ),
    "elastic-bsp": (lambda: ElasticBSP(lookahead=4), lambda rank: Shortage(rank, "backward", at_any, times=2)),
}


@pytest.mark.parametrize("name", SHORTAGES)
def test_whenever_memory_runs_short_no_sample_is_lost_and_parameters_are_those_of_the_single_process(name, caplog):
    policy, shortage = SHORTAGES[name]
    flat, seen, epochs, limits, complete, struck = zip(
        *run_on_threads(lambda rank: train(policy(), shortage(rank)), RANKS), strict=True
    )
    rounds = [[i for of_rank in seen for i in of_rank[r]] for r in range(ROUNDS)]
    alone = Net()
    inner = sgd(alone)
    for index in rounds:
        inner.zero_grad()
        alone.loss(index).backward()
        inner.step()
    expected = torch.nn.utils.parameters_to_vector(alone.parameters()).detach()
    torch.testing.assert_close(flat[0], expected, rtol=0, atol=1e-10)
    assert all(torch.equal(flat[0], other) for other in flat)

    last = epochs[0][-1]
    assert last >= 1 or name.startswith("non-blocking"), "whose rounds are as long as the others allow"
    for epoch in range(last + 1):
        visited = sorted(i for r, of in zip(rounds, epochs[0], strict=True) if of == epoch for i in r)
        assert len(set(visited)) == len(visited)
        if epoch < last and name != "left for good":  # the last one was left in the middle
            assert visited == list(range(SAMPLES))

    sizes = struck[0].sizes
    assert sizes
    assert sum("ran out of memory with" in each for each in caplog.messages) == sum(len(each.sizes) for each in struck)
    assert complete[0] == {False}, "a round whose only micro-batch failed is not complete"
    # How many micro-batches a rank does is a matter of time under the last two.
    if name not in ("every micro-batch above five", "non-blocking", "elastic-bsp"):
        assert struck[0].left == 0
    if name == "twice in a row":
        assert sizes[1] == 2, "right afterwards a small part is tried"
    if name == "backward":  # the limit with its headroom reaches all ranks with the very round, and stays
        assert limits[1] == [[0] * 3] * 3 + [[int(0.9 * sizes[0]), 0, 0]] * (ROUNDS - 3)
    if name == "every micro-batch above five":
        assert limits[1][-1][0] == 5


def batch_of_ones_own(balance, net, optimizer):
    balance.batch(8)
    with balance.surviving_out_of_memory():
        raise OWN("no memory")


def loop(balance, net, optimizer, before=lambda index: None, stop_at=4):
    for index in BalancedLoader(Indexed(), balance, stop_at=stop_at):
        with balance.surviving_out_of_memory():
            before(index)
            net.loss(index).backward()
            optimizer.step()
            net.zero_grad()  # in the middle of the round, where a batch is done in parts
            continue


def in_the_update(balance, net, optimizer):
    def fails(*_):
        if balance.rounds == 2:
            raise OWN("no memory")

    optimizer.register_step_pre_hook(fails)
    loop(balance, net, optimizer)


def cleared(balance, net, optimizer):
    shortage = ShortageThatEndsTheEpoch(0, "backward", lambda balance, size: balance.rounds == 2)

    def before(index):
        net.middle = partial(shortage.strike_backward, balance, len(index))

    loop(balance, net, optimizer, before, stop_at=3)


def another_error(balance, net, optimizer):
    def before(index):
        raise RuntimeError("shapes cannot be multiplied")

    loop(balance, net, optimizer, before)


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (batch_of_ones_own, r"^HeteroError: round 0: rank \d ran out of memory with a batch of your own"),
        (in_the_update, r"in step\(\) or after it, which is not done again.*set max_micro_batch of the policy below 8"),
        (cleared, "zero_grad"),
        (another_error, "^RuntimeError: shapes cannot be multiplied$"),
    ],
)
def test_what_cannot_be_done_again_says_when_and_what_to_do_and_other_errors_pass(fails, said):
    """On all ranks at once, so that nobody waits."""

    def case(rank):
        net, balance = Net(), LoadBalance(BSP(), global_batch=8 * RANKS)
        optimizer = DistributedOptimizer(sgd(net), balance, net.named_parameters())
        try:
            fails(balance, net, optimizer)
        except Exception as error:  # noqa: BLE001 - its message is what is looked at
            return f"{type(error).__name__}: {error}"

    for told in run_on_threads(case, RANKS):
        assert re.search(said, told)


def test_a_loop_that_nothing_would_save_is_told_once_before_and_when_it_has_happened(caplog, monkeypatch):
    """It ends in the middle of a micro-batch, as when memory runs short there."""

    def case(rank):
        net, balance = Net(), LoadBalance(LBBSP(device="gpu"), global_batch=8 * RANKS)
        optimizer = DistributedOptimizer(sgd(net), balance, net.named_parameters())
        for index in BalancedLoader(Indexed(), balance):
            net.loss(index)
            if balance.rounds == 4:
                monkeypatch.setattr(out_of_memory, "_failures", lambda: 1)  # the device's allocator would have counted
                raise OWN("no memory")
            optimizer.zero_grad()
            net.loss(index).backward()
            optimizer.step()

    with pytest.raises(ThreadRankError, match="OutOfMemoryError"):
        run_on_threads(case, RANKS)
    said = [each for each in caplog.messages if "with balance.surviving_out_of_memory()" in each]
    for before in said[:RANKS]:
        assert before.startswith("policy 'lb-bsp' tries larger batches than you have tried")
    for each in said[RANKS:]:
        assert re.match(r"round 4: rank \d has run out of memory with .*docs/gpu\.md", each)
    assert RANKS < len(said) <= 2 * RANKS, "once before, and where it has happened"


def test_lb_bsp_finds_the_split_of_unequal_devices_within_what_fits(monkeypatch, tmp_path):
    """And the record holds curves, limit and headroom; each sample is visited once on the ladder, too."""
    clock, path, batch = ThreadClock(), tmp_path / "run.jsonl", 32 * RANKS
    monkeypatch.setattr(time, "perf_counter", clock)
    curves = [(1.2e-3, 12e-3, 6), (4.5e-3, 9e-3, 4), (2.4e-3, 18e-3, 8)]

    def case(rank):
        device = DeviceModel(*curves[rank], (40, None, None)[rank], error=OWN, clock=clock, sleep=clock.pass_s)
        net, plans, visits = Net(), [], []
        balance = LoadBalance(LBBSP(device="gpu"), global_batch=batch, telemetry=path)
        loader = BalancedLoader(Indexed(15 * batch), balance, shuffle=True, seed=5, stop_at=45)
        optimizer = DistributedOptimizer(sgd(net), balance, net.named_parameters())
        while balance.rounds < 45:
            visits.append([])
            for index in loader:
                if len(plans) == balance.rounds:
                    plans.append(balance.plan)
                with balance.surviving_out_of_memory():
                    optimizer.zero_grad()
                    with device.step(len(index)):
                        loss = net.loss(index % SAMPLES)
                    loss.backward()
                    optimizer.step()
                    visits[-1] += index.tolist()
        balance.close()
        return plans, visits, balancer_of(balance).meter.limit

    (plans, _, limit), *_ = told = run_on_threads(case, RANKS)
    assert 0.85 * 40 <= limit <= 40, "40 samples fit there"
    for epoch in zip(*(visits for _, visits, _ in told), strict=True):
        assert sorted(i for of_rank in epoch for i in of_rank) == list(range(15 * batch))
    devices = [Gamma(*curve, None) for curve in curves]

    def makespan_s(shares):
        counts = [-(-shares[0] // limit), 1, 1]
        return max(k * d.seconds(x / k) for d, x, k in zip(devices, shares, counts, strict=True))

    columns = [d.slope_s for d in devices[1:]], [d.intercept_s for d in devices[1:]]
    best = min(
        makespan_s([x, *minimax(*columns, 0.0, batch - x, 1, batch).shares.tolist()]) for x in range(1, batch - 1)
    )
    # On simulated clocks, which know no noise. Plans leave the optimum until the whole ladder has been measured.
    makespans_s = [makespan_s(shares) for shares in plans]
    assert makespans_s[0] > 1.4 * best
    assert max(makespans_s[-10:]) <= 1.05 * best
    assert max(makespans_s[30:]) <= 1.3 * best

    run = read_run(path)
    assert run.limit[-1].tolist() == [limit, 0, 0]
    assert json.loads(path.read_text().splitlines()[0])["headroom"] == pytest.approx(0.1)
    for rank, true in enumerate(devices):
        found = Gamma(run.slope_s[-1][rank], run.intercept_s[-1][rank], run.saturation[-1][rank], None)
        for size in (16, 32):
            assert found.seconds(size) == pytest.approx(true.seconds(size), rel=0.05)

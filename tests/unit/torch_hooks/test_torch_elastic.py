"""What an elastic state keeps, gives back and refuses, on one rank; ranks that come and go are in tests/distributed."""

from __future__ import annotations

import copy
import itertools
import logging

import pytest

hvd = pytest.importorskip("horovod.torch")
import torch  # noqa: E402 - imported by Horovod if it is there
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt  # noqa: E402
from torch.utils.data import IterableDataset, TensorDataset  # noqa: E402

from hvd_hetero.commits import CommitPace  # noqa: E402
from hvd_hetero.errors import RoundStateError  # noqa: E402
from hvd_hetero.testing import run_on_threads  # noqa: E402
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance  # noqa: E402
from torch_hooks.elastic import TorchState  # noqa: E402

SAMPLES, BATCH = 22, 4  # six rounds an epoch, the last one short
X = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
DATA = TensorDataset(X, X.sum(1, keepdim=True), torch.arange(SAMPLES))


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


def made(**options):
    torch.manual_seed(2)
    model = torch.nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return TorchState(model, optimizer, **options)


def begun(state, *, global_batch=BATCH, dataset=DATA, **options):
    balance = LoadBalance("bsp", global_batch=global_batch)
    loader = BalancedLoader(dataset, balance, **{"shuffle": True, "seed": 3, **options})
    optimizer = DistributedOptimizer(state.optimizer, balance, state.model.named_parameters())
    state.follow(balance, loader)
    return balance, loader, optimizer


def fit(state, loader, optimizer):
    """One epoch, or what is left of it; yields the indices of each batch, once it is done."""
    for x, y, index in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(state.model(x), y).backward()
        optimizer.step()
        yield index.tolist()


def train(state, epochs, fail_after=(), visited=None, **options):
    """As a user would, with collectives that fail after those rounds, once each."""
    failures = list(fail_after)
    visits: list[tuple[int, list[int]]] = []
    committed: list[tuple[int, list[int]]] = []
    keep = state.save

    def save():
        keep()
        committed.extend(visits)
        visits.clear()

    state.save = save

    @hvd.elastic.run
    def run(state):
        visits.clear()
        balance, loader, optimizer = begun(state, **options)
        for epoch in range(loader.epoch_at_hand, epochs):
            for index in fit(state, loader, optimizer):
                visits.append((epoch, index))
                if balance.rounds in failures:
                    failures.remove(balance.rounds)
                    raise HorovodInternalError("a rank was lost")

    run(state)
    assert not failures
    return committed + visits, torch.cat([p.detach().flatten() for p in state.model.parameters()])


@pytest.mark.parametrize(("every", "workers"), [(1, 0), (2, 0), (5, 0), (100, 0), (2, 1)])
def test_after_failures_training_is_what_it_would_have_been_without(every, workers):
    undisturbed, expected = train(made(), 3, num_workers=workers)
    visits, parameters = train(made(rounds_per_commit=every), 3, (3, 6, 7, 13, 18), num_workers=workers)
    assert visits == undisturbed
    assert torch.equal(parameters, expected)


def test_a_second_failure_finds_the_commit_as_it_was():
    state = made(rounds_per_commit=2)
    _, expected = train(made(), 2)
    _, parameters = train(state, 2, (3, 4, 5, 8, 9))
    assert torch.equal(parameters, expected)
    assert state.resets == 5


def test_parts_and_values_are_kept_together_and_nothing_changes_in_the_commit():
    state = made(seen=[1], best=0.5)
    state.commit()
    with torch.no_grad():
        state.model.weight.fill_(7)
    state.model.weight.grad = torch.ones_like(state.model.weight)
    state.seen.append(2)
    state.best = 0.25
    for _ in range(2):
        state.restore()
        assert state.seen == [1]
        assert state.best == 0.5
        assert not (state.model.weight == 7).any()
        assert state.model.weight.grad is None
        state.seen.append(3)


def test_a_schedule_is_kept_by_its_own_state():
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TorchState(model, optimizer, schedule=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    optimizer.step()
    state.schedule.step()
    state.commit()
    optimizer.step()
    state.schedule.step()
    state.restore()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert state.schedule.last_epoch == 1


@pytest.mark.parametrize(("scale", "rate"), [(True, 0.2), (False, 0.1)])
def test_rates_follow_the_global_batch_where_that_is_asked_for(scale, rate, caplog):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    model = torch.nn.Linear(3, 1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    state = TorchState(model, optimizer, scale_learning_rate=scale, schedule=schedule)
    state.follow(LoadBalance("bsp", global_batch=4))
    state.commit()
    for _ in range(2):  # a failure before the next commit does not scale them twice
        state.restore()
        state.follow(LoadBalance("bsp", global_batch=8))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        assert schedule.base_lrs == pytest.approx([rate])
    assert "the global batch was 4 and is 8 now" in caplog.text


def test_a_schedule_with_rates_of_its_own_cannot_be_scaled():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)
    with pytest.raises(ValueError, match=r"scale_learning_rate=True.*OneCycleLR.*LambdaLR"):
        TorchState(torch.nn.Linear(3, 1), optimizer, scale_learning_rate=True, schedule=schedule)
    assert TorchState(torch.nn.Linear(3, 1), optimizer, schedule=schedule).schedule is schedule


def test_step_hooks_end_with_the_membership_that_registered_them():
    state = made()
    calls = []
    for _ in range(3):
        _, loader, optimizer = begun(state)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        x, y, _ = next(iter(loader))
        torch.nn.functional.mse_loss(state.model(x), y).backward()
        calls.clear()
        optimizer.step()
        assert calls == ["before", "after"]
        state.reset()


def test_hosts_asked_for_without_a_commit_bring_the_commit_back():
    """The place in the data is that of the commit, so the model must be, too."""
    state = made()
    state.commit()
    before = state.model.weight.detach().clone()
    with torch.no_grad():
        state.model.weight.fill_(7)
    state.on_hosts_updated(5, 1)
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()
    state.reset()
    assert torch.equal(state.model.weight, before)


def test_a_sync_that_fails_half_way_leaves_the_own_commit_whole(monkeypatch):
    state = made(rounds_per_commit=1)
    train(state, 1)
    place, common = copy.deepcopy((state._membership.cursor, state._membership.common))
    theirs = ({**common, "rounds": 99}, {"epoch": 9}, False, 7, BATCH)
    monkeypatch.setattr(hvd, "broadcast_object", lambda *_, **__: theirs)

    def fails(*_):
        raise HorovodInternalError("another rank was lost")

    monkeypatch.setattr("torch_hooks.elastic.broadcast_state", fails)
    with pytest.raises(HorovodInternalError):
        state.sync()
    assert (state._membership.cursor, state._membership.common) == (place, common)


class Stream(IterableDataset):
    num_shards = 2

    def __init__(self, indices=range(SAMPLES)):
        self.indices = indices

    def shard(self, num_shards, index):
        return Stream(self.indices[index::num_shards])

    def __iter__(self):
        return iter([DATA[i] for i in self.indices])


@pytest.mark.parametrize(
    "options",
    [{}, *({"dataset": Stream(), "stream": stream, "shuffle": False} for stream in ("whole", "shard"))],
    ids=["", "stream", "shards"],
)
@pytest.mark.parametrize(("then", "epoch"), [(3 * BATCH, 0), (2, 0), (2, 1)])
def test_an_epoch_is_over_by_the_batch_that_it_was_trained_with(then, epoch, options):
    """With drop_last, what a larger round leaves over is no reason to skip the epoch's end, nor a smaller to begin."""
    state = made(rounds_per_commit=1)
    _, loader, optimizer = begun(state, drop_last=True, **options)
    rounds = SAMPLES // BATCH
    for number, _ in enumerate(fit(state, loader, optimizer), start=1):
        if epoch == 0 and number == rounds - 1:
            break
    state.save()
    state.reset()
    _, loader, _ = begun(state, global_batch=then, drop_last=True, **options)
    assert loader.epoch_at_hand == epoch


def test_a_balance_of_a_former_membership_is_not_taken_again():
    state = made()
    balance, _, _ = begun(state)
    state.reset()
    with pytest.raises(ValueError, match=r"balance.*membership.*LoadBalance"):
        state.follow(balance)


def test_ranks_that_are_threads_go_on_where_the_commit_stood():
    """Their state travels by their wire, before there is a balance and after; Horovod here has one rank."""
    plain = torch.nn.Linear(3, 1).double()

    def case(rank, stops):
        model = copy.deepcopy(plain)
        with torch.no_grad():
            model.bias.add_(rank)  # until the first sync
        state = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), rounds_per_commit=2, seen=[rank])
        visited = []
        for stop_at in stops:
            state.reset()
            state.sync()
            assert state.seen == [0]
            _, loader, optimizer = begun(state)
            loader.stop_at = stop_at
            visited.append([*fit(state, loader, optimizer)])
        return visited, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()

    undisturbed = run_on_threads(lambda rank: case(rank, [6]), 2)
    others = run_on_threads(lambda rank: case(rank, [3, 6]), 2)
    for ([whole], expected), ([before, after], parameters) in zip(undisturbed, others, strict=True):
        assert (before, after) == (whole[:3], whole[2:])  # the last commit was after two rounds
        assert parameters == expected == undisturbed[0][1]


def test_ranks_commit_before_the_same_rounds_whatever_each_of_them_measures():
    """By rank 0's clock a round takes ten times as long as a commit, by rank 1's a tenth."""

    def case(rank):
        now = itertools.count()
        state = made()
        state._pace = CommitPace(lambda: next(now))
        committed = []
        state.sync()
        balance, loader, optimizer = begun(state, global_batch=2)
        save = state.save
        state.save = lambda: (save(), committed.append(balance.rounds))
        for _ in range(4):
            for _ in fit(state, loader, optimizer):
                for _ in range(30 if rank == 0 else 0):
                    next(now)
        return committed

    first, second = run_on_threads(case, 2)
    assert first == second
    assert first == [1, 2, 4, 8, 16, 26, 36]


class AsksHorovod:
    """A value of the user's own that divides data by rank, as Horovod's ElasticSampler does."""

    ranks = 0

    def state_dict(self):
        return {"epoch": 3}

    def load_state_dict(self, state):
        self.ranks = hvd.size()


def test_a_value_that_asks_horovod_is_loaded_when_horovod_is_up_again():
    """Rank 0 too, which no broadcast reaches."""
    own = AsksHorovod()
    state = made(own=own)
    try:
        raise HorovodInternalError
    except HorovodInternalError:
        state.restore()
    assert not hvd.is_initialized()
    hvd.init()
    state.on_reset()
    assert own.ranks == 1
    state.sync()


def test_survivors_tell_how_long_a_recovery_took(caplog):
    """A failure on one rank, other hosts on the next one, and one that is new; the first membership tells nothing."""
    plain = torch.nn.Linear(3, 1).double()
    kept = []

    def case(rank):
        state = TorchState(
            (model := copy.deepcopy(plain)), torch.optim.SGD(model.parameters(), lr=0.1), rounds_per_commit=None
        )
        for membership in range(2):
            if membership and rank == 0:
                try:
                    raise HorovodInternalError
                except HorovodInternalError:
                    state._hang_up = lambda: None
                    state.restore()
                state.reset()
            elif membership and rank == 1:
                state.reset()
            elif membership:
                state = TorchState(
                    (model := copy.deepcopy(plain)), torch.optim.SGD(model.parameters(), lr=0.1), rounds_per_commit=None
                )
            state.sync()
            balance, loader, optimizer = begun(state)
            balance.on_round(kept.append)
            loader.stop_at = 2
            list(fit(state, loader, optimizer))
            balance.close()

    with caplog.at_level(logging.INFO, "hvd_hetero.elastic"):
        run_on_threads(case, 3)
    assert ["recovered_s" in record for record in kept] == [False, False, True, False]
    assert 0 < kept[2]["recovered_s"] < 60
    said = sorted(text.split(" in ")[0] for text in caplog.messages if "recovered" in text)
    assert said == ["rank 0 of 3 recovered", "rank 1 of 3 recovered"]


def test_a_change_of_hosts_is_always_followed_by_a_sync():
    state = made()
    state.on_hosts_updated(5, 1)  # some were removed, and Horovod would skip it
    assert state.hosts_have_changed
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert caught.value.skip_sync is False


def test_a_commit_in_the_body_of_the_loop_is_refused():
    state = made()
    _, loader, optimizer = begun(state)
    for _ in fit(state, loader, optimizer):
        with pytest.raises(RoundStateError, match=r"body.*rounds_per"):
            state.commit()
    state.commit()  # after the epoch


def test_without_automatic_commits_the_place_is_that_of_the_last_one():
    state = made(rounds_per_commit=None)
    balance, loader, optimizer = begun(state)
    for stop in (2, 5):
        loader.stop_at = stop
        list(fit(state, loader, optimizer))
        if stop == 2:
            state.commit()
    assert balance.rounds == 5
    state.restore()
    balance, loader, optimizer = begun(state)
    assert (balance.rounds, loader.epoch_at_hand) == (2, 0)
    assert sum(map(len, fit(state, loader, optimizer))) == SAMPLES - 2 * BATCH
    assert loader.epoch_at_hand == 1


def test_shards_are_refused_with_a_remedy():
    class Shard(IterableDataset):
        def __iter__(self):
            return iter(X)

    balance = LoadBalance("bsp", global_batch=4)
    loader = BalancedLoader(Shard(), balance, stream="shard", rounds_per_epoch=3)
    with pytest.raises(ValueError, match=r"stream='shard'.*stream='whole'"):
        made().follow(balance, loader)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rounds_per_commit": 0}, ValueError, r"rounds_per_commit.* 0\b"),
        ({"rounds_per_commit": True}, TypeError, r"rounds_per_commit.* True .*None"),
        ({"rounds_per_commit": "often"}, ValueError, r"rounds_per_commit.* 'of"),
        ({"resets": 1}, ValueError, r"named.* resets"),
        ({"commit": 1, "save": 2}, ValueError, r"named.* commit, save"),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        made(**options)


def test_what_is_no_model_no_optimizer_or_no_balance_is_named():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(TypeError, match=r"model.* str"):
        TorchState("model", optimizer)
    with pytest.raises(TypeError, match=r"optimizer.* str"):
        TorchState(torch.nn.Linear(1, 1), "sgd")
    with pytest.raises(TypeError, match=r"balance.* str"):
        made().follow("lb-bsp")

"""A training on disk: what goes on from its file ends as if never ended, and an epoch visits each sample once."""

from __future__ import annotations

import fcntl
import itertools
import math
import re
import resource
import signal
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from jobs_on_threads import told  # noqa: E402
from torch.nn import functional  # noqa: E402

from hvd_hetero.commits import CommitPace  # noqa: E402
from hvd_hetero.errors import HeteroError, RoundStateError  # noqa: E402
from hvd_hetero.policies import BSP, LBBSP, ElasticBSP, LBNonBlocking, NonBlocking, SelfAdaptive, StaticAllocation  # noqa: E402
from hvd_hetero.session import balancer_of  # noqa: E402
from hvd_hetero.testing import run_on_threads  # noqa: E402
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance, SavedTraining, session  # noqa: E402

SAMPLES, GLOBAL_BATCH = 41, 12
X = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
Y = X.sum(1, keepdim=True)


class Indexed(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> int:
        return i


class Job:
    """A training that ends after some rounds, as if its process had been killed then, or is done."""

    def __init__(self, path: Path, policy="bsp", *, every=2, **options) -> None:
        self.model = torch.nn.Linear(5, 1).double()
        torch.nn.init.constant_(self.model.weight, 0.1)
        torch.nn.init.constant_(self.model.bias, 0.1)
        self.balance = LoadBalance(policy, global_batch=GLOBAL_BATCH, **options)
        self.loader = BalancedLoader(Indexed(), self.balance, shuffle=True, seed=4)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.optimizer = DistributedOptimizer(inner, self.balance, self.model.named_parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(inner, 3, gamma=0.5)
        self.optimizer.register_step_post_hook(lambda *_: self.schedule.step())
        self.saved = SavedTraining(
            path, self.balance, self.loader, rounds_per_save=every,
            model=self.model, optimizer=self.optimizer, schedule=self.schedule,
        )  # fmt: skip
        self.began_at = self.balance.rounds
        self.seen: list[tuple[int, int]] = []
        """epoch and index of each sample, in order"""

    def run(self, epochs: int, until: int = 10**9) -> Job:
        for epoch in range(self.loader.epoch_at_hand, epochs):
            self.loader.stop_at = until
            for index in self.loader:
                self.seen += [(epoch, i) for i in index.tolist()]
                self.optimizer.zero_grad()
                functional.mse_loss(self.model(X[index]), Y[index]).backward()
                self.optimizer.step()
            if self.balance.rounds >= until:
                break
        self.balance.close()
        return self

    @property
    def flat(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


POLICIES = {
    "bsp": BSP,
    "bsp in micro-batches": lambda: BSP(max_micro_batch=2),
    "lb-bsp": lambda: "lb-bsp",
    "static": lambda: StaticAllocation([1, 3]),
    "self-adaptive": lambda: SelfAdaptive(total=6),
    "non-blocking": lambda: NonBlocking(2),
    "lb-non-blocking": LBNonBlocking,
    "elastic-bsp": lambda: ElasticBSP(lookahead=4),
}


def seen(jobs: list[Job]) -> Counter:
    return Counter(sample for job in jobs for sample in job.seen)


@pytest.fixture
def path(tmp_path):
    """The file of a training of two ranks that was killed after three rounds, and saved after two."""
    run_on_threads(lambda rank: Job(tmp_path / "run").run(1, until=3), 2)
    return tmp_path / "run"


def loaded_into(path, model):
    """Go on from the file with this model."""
    balance = LoadBalance("bsp", global_batch=GLOBAL_BATCH)
    loader = BalancedLoader(Indexed(), balance, shuffle=True, seed=4)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balance)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    SavedTraining(path, balance, loader, model=model, optimizer=optimizer, schedule=schedule)


def test_ranks_save_before_the_same_rounds_whatever_each_of_them_measures(tmp_path):
    """By rank 0's clock a round takes ten times as long as to save it, by rank 1's no longer."""

    def case(rank):
        job, now, saved_at = Job(tmp_path / "a", every="auto"), itertools.count(), []
        job.saved._pace = CommitPace(lambda: next(now))
        save = job.saved._save
        job.saved._save = lambda **given: (saved_at.append(job.balance.rounds), save(**given))
        job.optimizer.register_step_post_hook(lambda *_: [next(now) for _ in range(50 if rank == 0 else 0)])
        job.run(40, until=40)
        return saved_at

    first, second = run_on_threads(case, 2)
    assert first == second == [1, 2, 4, 8, 16, 26, 36]


@pytest.mark.parametrize(
    "policy", ["bsp in micro-batches", "lb-bsp", "self-adaptive", "lb-non-blocking", "elastic-bsp"]
)
def test_a_job_that_begins_again_ends_as_one_that_was_never_ended(tmp_path, policy):
    """Killed after three rounds, of which two were saved: what goes on visits all that the first has not saved."""
    make = POLICIES[policy]
    run_on_threads(lambda rank: Job(tmp_path / "a", make()).run(3, until=3), 2)
    jobs = run_on_threads(lambda rank: Job(tmp_path / "a", make()).run(3), 2)
    whole = run_on_threads(lambda rank: Job(tmp_path / "b", make()).run(3), 2)
    assert [job.began_at for job in jobs] == [2, 2]
    again = seen(jobs)
    assert set(again.values()) == {1}, "no sample twice in an epoch"
    for epoch in (1, 2):  # the first was begun by the other job
        assert sorted(i for e, i in again if e == epoch) == list(range(SAMPLES))
    before = SAMPLES - sum(e == 0 for e, _ in again)
    assert 0 < before < SAMPLES
    if policy in ("bsp in micro-batches", "lb-bsp"):  # the same samples in the same rounds
        for job in jobs:
            torch.testing.assert_close(job.flat, whole[0].flat, rtol=1e-12, atol=0)
    assert torch.equal(jobs[0].flat, jobs[1].flat)


def test_what_is_saved_at_the_end_needs_no_work_any_more(tmp_path):
    def finished(rank):
        job = Job(tmp_path / "run", every=None).run(2)
        job.saved.save()
        return job

    first = run_on_threads(finished, 2)
    second = run_on_threads(lambda rank: Job(tmp_path / "run").run(2), 2)
    assert [job.seen for job in second] == [[], []]
    assert torch.equal(second[1].flat, first[0].flat)
    assert second[0].schedule.last_epoch == first[0].schedule.last_epoch == first[0].balance.rounds


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_ranks_than_before_go_on_with_shares_of_their_own(tmp_path, ranks):
    run_on_threads(lambda rank: Job(tmp_path / "run", "lb-bsp").run(2, until=2), 2)
    run_on_threads(lambda rank: Job(tmp_path / "run", "lb-bsp").run(2, until=3), 2)  # saved nothing new
    jobs = run_on_threads(lambda rank: Job(tmp_path / "run", "lb-bsp", every=None).run(2), ranks)
    assert {job.began_at for job in jobs} == {2}
    again = seen(jobs)
    assert set(again.values()) == {1}
    assert sorted(i for e, i in again if e == 1) == list(range(SAMPLES))
    assert sum(e == 0 for e, _ in again) == SAMPLES - 2 * GLOBAL_BATCH
    assert all(torch.equal(job.flat, jobs[0].flat) for job in jobs)


def test_a_full_disk_warns_once_and_keeps_the_former_file_but_save_raises(path, tmp_path, caplog):
    """PyTorch may raise no OSError then. A limit on the size of files does what a full disk does."""
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def goes_on(rank):
        job = Job(path, every=1).run(2)
        with pytest.raises(HeteroError) as failure:
            job.saved.save()
        return job, str(failure.value)

    resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
    try:
        jobs, told = zip(*run_on_threads(goes_on, 2), strict=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert {job.balance.rounds for job in jobs} == {8}, "two epochs of four rounds"
    warnings = [record.message for record in caplog.records if record.name == "torch_hooks.saved"]
    assert len(warnings) == 1, warnings
    for text in (warnings[0], told[0]):
        assert text.startswith(f"{path} cannot be written (")
        assert "inline_container" not in text
    assert told[1].startswith("rank 0 has failed to read or write")
    assert [each.name for each in tmp_path.iterdir()] == ["run"], "nothing is left of what did not fit"
    assert path.read_bytes() == before
    job = run_on_threads(lambda rank: Job(path, every=1).run(2), 1)[0]
    assert seen([job])  # what was kept is whole


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    """Nothing is unpickled, so a state must be plain: numpy's numbers are not."""

    class Odd:
        value = 0.5

        def state_dict(self):
            return {"fine": 1.0, "odd": self.value}

        def load_state_dict(self, state):
            raise AssertionError("there is no file")

    def refused(rank):
        job = Job(tmp_path / "run", every=None)
        job.saved._parts["mine"] = odd = Odd()
        job.saved.save()
        before = (tmp_path / "run").read_bytes()
        odd.value = np.float64(0.5)  # later, as an optimizer has its state from its first step on
        with pytest.raises(HeteroError, match=r"mine.*tensors" if rank == 0 else "rank 0"):
            job.saved.save()
        assert (tmp_path / "run").read_bytes() == before

    run_on_threads(refused, 2)
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_tensors_that_only_devices_with_numbers_know_are_saved(tmp_path):
    class Nested:
        def state_dict(self):
            return {"rows": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}

        def load_state_dict(self, state):
            raise AssertionError("there is no file")

    job = run_on_threads(lambda rank: Job(tmp_path / "run", every=None), 1)[0]
    job.saved._parts["mine"] = Nested()
    job.saved.save()
    assert torch.load(tmp_path / "run", weights_only=True)["parts"]["mine"]["rows"].is_nested


def test_a_state_that_rank_0_cannot_load_stops_all_ranks(path):
    def other_model(rank):
        with pytest.raises((RuntimeError, HeteroError), match="size mismatch"):
            loaded_into(path, torch.nn.Linear(7, 1).double())

    run_on_threads(other_model, 2)


def test_other_options_of_a_policy_are_those_of_the_new_job(tmp_path):
    """A batch that is lowered after memory has run out is lower when the job begins again."""
    for name, before, after in (
        ("micro-batches", lambda: BSP(max_micro_batch=6), lambda: BSP(max_micro_batch=2)),
        ("weights", lambda: StaticAllocation([1, 3]), lambda: StaticAllocation([3, 1])),
        ("device", lambda: LBBSP(device="gpu"), LBBSP),
        ("policy", BSP, lambda: NonBlocking(2)),
    ):
        run_on_threads(lambda rank, make=before, name=name: Job(tmp_path / name, make()).run(1, until=3), 2)
        jobs = run_on_threads(lambda rank, make=after, name=name: Job(tmp_path / name, make(), every=None), 2)
        fresh = run_on_threads(lambda rank, make=after: LoadBalance(make(), global_batch=GLOBAL_BATCH), 2)
        assert [job.began_at for job in jobs] == [2, 2], name
        for job, other in zip(jobs, fresh, strict=True):
            plan, first = balancer_of(job.balance).plan(), balancer_of(other).plan()
            assert plan.micro_batches == first.micro_batches, name
            assert name == "device" or plan.samples == first.samples, name  # there, speeds are known already


@pytest.mark.parametrize(
    ("module", "name", "here"), [(socket, "gethostname", "elsewhere"), (session, "_device_here", ("another card", 0.0))]
)
def test_who_is_on_another_host_or_card_begins_to_measure_anew(module, name, here, tmp_path, monkeypatch):
    path = tmp_path / "run"
    run_on_threads(lambda rank: Job(path, "lb-bsp").run(1, until=3), 2)

    def known(rank):
        return math.isfinite(balancer_of(Job(path, "lb-bsp").balance).meter.learner.expected())

    assert run_on_threads(known, 2) == [True, True]
    monkeypatch.setattr(module, name, lambda: here)
    assert run_on_threads(known, 2) == [False, False]


def overwritten(path: Path, *, by: bytes, at: int = 0) -> None:
    """Put bytes in the place of some of the weights, as a bad disk does."""
    weight = torch.load(path, weights_only=True)["parts"]["model"]["weight"].numpy().tobytes()
    whole = bytearray(path.read_bytes())
    begin = whole.index(weight) + at
    whole[begin : begin + len(by)] = by
    path.write_bytes(whole)


def edited(path: Path, change) -> None:
    """Write it again with other figures, which PyTorch finds in order."""
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


DAMAGES = {
    "no training": lambda path: path.write_bytes(b"no training"),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "one bit": lambda path: overwritten(path, by=b"\x01", at=3),
    "NaN": lambda path: overwritten(path, by=np.float64(math.nan).tobytes()),
    "rounds of 1e9": lambda path: edited(path, lambda saved: saved["progress"]["common"].update(rounds=10**9)),
    "missing keys": lambda path: edited(path, lambda saved: saved["progress"]["common"].pop("plans")),
    "another process's pickle": lambda path: torch.save(
        {"version": 2, "progress": re.compile("code"), "parts": {}}, path
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_file_that_is_damaged_is_refused_on_all_ranks_before_anything_is_used(path, kind):
    DAMAGES[kind](path)

    def refused(rank):
        model, loaded = torch.nn.Linear(5, 1).double(), []
        model.load_state_dict = loaded.append
        with pytest.raises(HeteroError) as failure:
            loaded_into(path, model)
        assert not loaded
        return str(failure.value)

    for said in run_on_threads(refused, 2):
        assert f"{path} is no saved training, or is damaged" in said
        assert "Remove it to begin again" in said
        assert "weights_only" not in said


def test_two_jobs_on_one_path_never_tear_the_file(tmp_path, monkeypatch):
    """They stand at different rounds, and write at the same time."""
    path, both = tmp_path / "run", threading.Barrier(2, timeout=30)
    jobs = [run_on_threads(lambda rank: Job(path, every=None), 1)[0] for _ in range(2)]
    save, errors = torch.save, []

    def save_together(content, file):
        save(content, file)
        both.wait()  # now both are written, and neither has taken the former one's place

    def run(job):
        try:
            job.saved.save()
        except Exception as error:  # noqa: BLE001 - judged below
            errors.append(error)

    monkeypatch.setattr(torch, "save", save_together)
    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [each.name for each in tmp_path.iterdir()] == ["run"]
    assert run_on_threads(lambda rank: Job(path).began_at, 1) == [0]


def test_what_a_killed_process_left_half_written_is_removed_but_not_what_another_one_writes(tmp_path):
    killed, alive = tmp_path / "run.0badcafe.partial", tmp_path / "run.1badcafe.partial"
    killed.write_bytes(b"half")
    with alive.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        run_on_threads(lambda rank: Job(tmp_path / "run"), 1)
        assert alive.exists()
    assert not killed.exists()


def test_mistakes_are_told(tmp_path):
    def mistakes(rank):
        job = Job(tmp_path / "run", every=None)
        with pytest.raises(ValueError, match=r"loader.*already"):
            SavedTraining(tmp_path / "b", job.balance, job.loader)
        for _ in job.loader:
            with pytest.raises(RoundStateError, match=r"save\(\)"):
                job.saved.save()
            break
        other = Job(tmp_path / "other", every=None)
        for options, error, said in (
            ({"rounds_per_save": 0}, ValueError, "rounds_per_save"),
            ({"note": 3}, TypeError, r"note.*state_dict\(\)"),
        ):
            with pytest.raises(error, match=said):
                SavedTraining(tmp_path / "c", other.balance, other.loader, **options)
        with pytest.raises(TypeError, match="balance and loader"):
            SavedTraining(tmp_path / "c", other.loader, other.balance)
        with pytest.raises(ValueError, match=r"loader.*LoadBalance"):
            SavedTraining(tmp_path / "c", other.balance, job.loader)
        with pytest.raises(ValueError, match=r"also\(\)"):
            SavedTraining(tmp_path / "c", other.balance.also(), other.loader)
        late = Job(tmp_path / "late", every=None).run(1, until=1)
        with pytest.raises(RoundStateError, match="after rounds"):
            SavedTraining(tmp_path / "d", late.balance, late.loader)

    run_on_threads(mistakes, 1)
    for said in told(lambda rank: Job(tmp_path / "differ", sync="d-psgd")):
        assert "each rank" in said, "models that differ between ranks"
    run_on_threads(lambda rank: Job(tmp_path / "parts").run(1, until=3), 1)

    def other_parts(rank):
        balance = LoadBalance("bsp", global_batch=GLOBAL_BATCH)
        loader = BalancedLoader(Indexed(), balance)
        with pytest.raises(HeteroError, match=r"model, optimizer, schedule.* 2\b.* net"):
            SavedTraining(tmp_path / "parts", balance, loader, net=torch.nn.Linear(1, 1))

    run_on_threads(other_parts, 1)


class Behind:
    """A stopwatch of a device that has a round's work left, for which whoever reads its tensors waits."""

    left_s, later_s = 100.0, 0.0

    def catch_up(self) -> None:
        self.later_s, self.left_s = self.later_s + self.left_s, 0.0


def test_what_a_device_has_still_to_do_is_no_part_of_what_saving_takes(tmp_path, monkeypatch):
    """Else a training whose host runs ahead would save a hundred rounds apart, however little there is to save."""
    device, write = Behind(), SavedTraining._write
    monkeypatch.setattr(SavedTraining, "_write", lambda *given: (device.catch_up(), write(*given)))

    def save(rank):
        saved = Job(tmp_path / "run").saved
        saved._session.meter.stopwatch = device
        saved._pace = CommitPace(lambda: device.later_s)
        saved.save()
        return saved._pace._commits_s[0][0]

    assert run_on_threads(save, 1) == [0.0]
    assert device.later_s == 100.0


def test_the_time_of_saving_is_no_waiting_for_data(tmp_path, monkeypatch):
    """On rank 0 it would look slow, and lose samples for it."""
    write, clock, later_s = SavedTraining._write, time.perf_counter, [0.0]

    def slowly(self, progress):
        later_s[0] += 1000.0
        write(self, progress)

    monkeypatch.setattr(SavedTraining, "_write", slowly)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + later_s[0])

    def waited(rank):
        job, records = Job(tmp_path / "run", every=1), []
        job.balance.on_round(records.append)
        job.run(1, until=4)
        return [record["input_s"] for record in records]

    told = run_on_threads(waited, 2)[0]
    assert len(told) == 4
    assert later_s[0] >= 3000.0
    assert max(max(of_ranks) for of_ranks in told) < 1000.0, "no more than a busy machine takes"

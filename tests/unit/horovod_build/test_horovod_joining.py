"""The launcher of elastic jobs starts ranks on a new host before it tells the others of it, and keeps spares ready."""

import queue
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("horovod")

from horovod.runner.elastic import driver as module
from horovod.runner.elastic.discovery import HostDiscovery

SOON_S = 20.0


class Hosts(HostDiscovery):
    def __init__(self, *names):
        self.slots = dict.fromkeys(names, 1)

    def find_available_hosts_and_slots(self):
        return dict(self.slots)


class Job:
    """Two ranks on hosts ``a`` and ``b``, none of which is a process: what the launcher starts and tells is noted."""

    def __init__(self, monkeypatch, least=1, most=4, spares=0, idle=()):
        monkeypatch.setenv("HOROVOD_ELASTIC_SPARES", str(spares))
        monkeypatch.setattr(module, "DISCOVER_HOSTS_FREQUENCY_SECS", 0.02)
        client = SimpleNamespace(notify_hosts_updated=lambda timestamp, what: self.told.put(what))
        monkeypatch.setattr(module, "WorkerNotificationClient", lambda *of: client)
        self.started, self.told, self.ended = queue.Queue(), queue.Queue(), {}
        self.hosts = Hosts("a", "b", *idle)
        rendezvous = SimpleNamespace(init=lambda plan: None, stop=lambda: None)
        self.driver = module.ElasticDriver(rendezvous, self.hosts, least, most)
        self.driver.wait_for_available_slots(2)
        self.driver.start(2, self.rank)
        members = {slot.hostname for slots in self.driver.host_assignments.values() for slot in slots}
        assert {self.started.get(timeout=SOON_S).hostname for _ in members} == members
        for host in members:
            self.driver.register_worker_server(host, 0, {}, b"")

    def rank(self, slot, events):
        """Run until the test says how it ended, or the launcher ends it."""
        code = self.ended[slot.hostname] = queue.Queue()
        self.started.put(slot)
        while not any(event.is_set() for event in events):
            try:
                return code.get(timeout=0.02), 0.0
            except queue.Empty:
                continue
        return 1, 0.0

    def stop_training(self, *hosts):
        """These ranks come to the launcher for their new places."""
        threads = [threading.Thread(target=self.driver.record_ready, args=(host, 0), daemon=True) for host in hosts]
        for thread in threads:
            thread.start()

    def loses(self, host):
        """The rank of this host fails."""
        self.ended[host].put(1)

    def comes_to_init(self, host, patience_s=SOON_S):
        """A rank that was started ahead asks for its place; its answer is put into the queue that this returns."""
        answer = queue.Queue()
        ask = lambda: answer.put(self.driver.await_place(host, 0, patience_s))  # noqa: E731
        threading.Thread(target=ask, daemon=True).start()
        return answer

    def host_is_given_up(self, host):
        return self.driver._host_manager.is_blacklisted(host)


@pytest.fixture
def job(monkeypatch):
    job = Job(monkeypatch)
    yield job
    job.driver.stop()


def nothing_comes(from_queue):
    with pytest.raises(queue.Empty):
        from_queue.get(timeout=0.2)
    return True


def test_others_are_told_when_the_new_rank_is_there_and_it_has_its_place_when_they_have_stopped(job):
    job.hosts.slots["c"] = 1
    slot = job.started.get(timeout=SOON_S)
    assert module_env(slot)["HOROVOD_STARTED_AHEAD"] == "1"
    assert nothing_comes(job.told), "it has not come to hvd.init() yet"
    place = job.comes_to_init("c")
    assert job.told.get(timeout=SOON_S)
    assert nothing_comes(place), "the others train on until their next commit"
    job.stop_training("a", "b")
    assert (place.get(timeout=SOON_S).rank, job.driver.world_size()) == (2, 3)
    assert nothing_comes(job.started), "it is not started twice"


def test_of_several_new_ranks_the_last_one_to_come_is_waited_for(job):
    job.hosts.slots |= {"c": 1, "d": 1}
    assert {job.started.get(timeout=SOON_S).hostname for _ in range(2)} == {"c", "d"}
    first = job.comes_to_init("c")
    assert nothing_comes(job.told)
    second = job.comes_to_init("d")
    assert job.told.get(timeout=SOON_S)
    job.stop_training("a", "b")
    assert {first.get(timeout=SOON_S).rank, second.get(timeout=SOON_S).rank} == {2, 3}


def test_a_new_rank_that_ends_before_it_comes_costs_its_host_and_nobody_is_told(job):
    job.hosts.slots["c"] = 1
    job.started.get(timeout=SOON_S)
    job.ended["c"].put(1)
    assert eventually(lambda: job.host_is_given_up("c"))
    assert nothing_comes(job.told)
    job.stop_training("a", "b")
    assert eventually(lambda: job.driver.get_slot_info("a", 0).size == 2)


def test_others_that_stop_before_the_new_rank_is_there_go_on_without_it(job):
    job.hosts.slots["c"] = 1
    job.started.get(timeout=SOON_S)
    job.stop_training("a", "b")
    assert nothing_comes(job.started), "it is not started twice"
    assert job.driver.world_size() == 2
    place = job.comes_to_init("c")
    assert job.told.get(timeout=SOON_S)
    job.stop_training("a", "b")
    assert place.get(timeout=SOON_S).size == 3


def test_too_few_others_wait_for_the_new_rank_as_in_a_released_horovod(monkeypatch):
    job = Job(monkeypatch, least=2)
    job.hosts.slots["c"] = 1
    job.started.get(timeout=SOON_S)
    job.loses("b")
    job.stop_training("a")
    assert eventually(lambda: "c" in job.driver.host_assignments)
    assert job.comes_to_init("c").get(timeout=SOON_S).rank == 1
    assert nothing_comes(job.told), "there is nothing new any more"
    job.driver.stop()


def test_who_asks_again_no_longer_waits_for_a_slower_one(job):
    job.hosts.slots |= {"c": 1, "d": 1}
    assert {job.started.get(timeout=SOON_S).hostname for _ in range(2)} == {"c", "d"}
    assert job.comes_to_init("c", patience_s=0.05).get(timeout=SOON_S) is None
    assert nothing_comes(job.told)
    place = job.comes_to_init("c")
    assert job.told.get(timeout=SOON_S)
    job.stop_training("a", "b")
    assert place.get(timeout=SOON_S).size == 3, "d has not come"


def test_a_host_that_came_first_keeps_its_place_when_one_that_was_found_first_comes(job):
    job.hosts.slots["c"] = 1
    assert job.started.get(timeout=SOON_S).hostname == "c"
    job.hosts.slots["d"] = 1
    assert job.started.get(timeout=SOON_S).hostname == "d"
    assert job.comes_to_init("d", patience_s=0.05).get(timeout=SOON_S) is None
    place = job.comes_to_init("d")
    job.told.get(timeout=SOON_S)
    job.stop_training("a", "b")
    assert place.get(timeout=SOON_S).rank == 2
    place = job.comes_to_init("c")
    job.told.get(timeout=SOON_S)
    job.stop_training("a", "b", "d")
    assert (place.get(timeout=SOON_S).rank, job.driver.get_slot_info("d", 0).rank) == (3, 2)


def test_a_spare_takes_the_place_of_a_lost_rank_and_another_one_gets_ready(monkeypatch):
    job = Job(monkeypatch, most=2, spares=1, idle=["c", "d"])
    spare = job.started.get(timeout=SOON_S)
    assert module_env(spare)["HOROVOD_STARTED_AHEAD"] == "1"
    assert nothing_comes(job.started), "one spare was asked for"
    lost = next(host for host, slots in job.driver.host_assignments.items() if slots[0].rank == 1)
    stays = next(host for host, slots in job.driver.host_assignments.items() if slots[0].rank == 0)
    assert job.comes_to_init(spare.hostname, patience_s=0.05).get(timeout=SOON_S) is None, "nobody is lost"
    place = job.comes_to_init(spare.hostname)
    assert nothing_comes(place)
    job.loses(lost)
    job.stop_training(stays)
    assert (place.get(timeout=SOON_S).rank, job.driver.world_size()) == (1, 2)
    assert job.started.get(timeout=SOON_S).hostname not in {lost, stays, spare.hostname}
    assert nothing_comes(job.told)
    job.driver.stop()


def test_a_spare_that_is_not_ready_is_not_waited_for(monkeypatch):
    job = Job(monkeypatch, most=2, spares=1, idle=["c"])
    spare = job.started.get(timeout=SOON_S).hostname
    stays, lost = sorted(job.driver.host_assignments, key=lambda host: job.driver.host_assignments[host][0].rank)
    job.loses(lost)
    job.stop_training(stays)
    assert eventually(lambda: job.driver.world_size() == 1)
    place = job.comes_to_init(spare)
    assert job.told.get(timeout=SOON_S), "it is one of those who are to take part now"
    job.stop_training(stays)
    assert place.get(timeout=SOON_S).rank == 1
    job.driver.stop()


def test_a_spare_that_ends_costs_its_host_and_the_next_idle_one_has_a_spare(monkeypatch):
    job = Job(monkeypatch, most=2, spares=1, idle=["c", "d"])
    spare = job.started.get(timeout=SOON_S).hostname
    job.ended[spare].put(1)
    assert job.started.get(timeout=SOON_S).hostname != spare
    assert job.host_is_given_up(spare)
    assert nothing_comes(job.told)
    job.driver.stop()


def test_an_impossible_number_of_spares_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="HOROVOD_ELASTIC_SPARES must be 0 or more, got -1"):
        Job(monkeypatch, spares=-1)


def test_a_host_that_goes_away_again_is_neither_waited_for_nor_given_up(job):
    job.hosts.slots["c"] = 1
    assert job.started.get(timeout=SOON_S).hostname == "c"
    del job.hosts.slots["c"]
    assert eventually(lambda: "c" not in job.driver._host_manager.current_hosts.available_hosts)
    job.hosts.slots["d"] = 1
    assert job.started.get(timeout=SOON_S).hostname == "d"
    place = job.comes_to_init("d")
    assert job.told.get(timeout=SOON_S)
    job.stop_training("a", "b")
    assert place.get(timeout=SOON_S).size == 3
    job.ended["c"].put(1)
    assert nothing_comes(job.started)
    assert not job.host_is_given_up("c")
    job.hosts.slots["c"] = 1
    assert job.started.get(timeout=SOON_S).hostname == "c", "it has come back"


def test_no_rank_is_started_beyond_the_most(monkeypatch):
    job = Job(monkeypatch, most=2)
    job.hosts.slots["c"] = 1
    assert nothing_comes(job.started)
    job.driver.stop()


def test_a_job_that_ends_meanwhile_has_no_place_for_it(job):
    job.hosts.slots["c"] = 1
    job.started.get(timeout=SOON_S)
    place = job.comes_to_init("c")
    job.driver.stop()
    assert place.get(timeout=SOON_S).rank == -1


def module_env(slot):
    from horovod.runner.gloo_run import create_slot_env_vars

    return create_slot_env_vars(slot)


def eventually(holds):
    for _ in range(int(SOON_S / 0.02)):
        if holds():
            return True
        threading.Event().wait(0.02)
    return False

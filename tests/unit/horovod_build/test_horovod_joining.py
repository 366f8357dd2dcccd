"""The launcher of elastic jobs starts ranks on a new host before it tells the others of it, and keeps spares ready."""

import threading

import pytest
from horovod.runner.elastic import discovery
from horovod.runner.gloo_run import create_slot_env_vars
from launcher_of_elastic_jobs import SOON_S, Job, eventually, module, nothing_comes


@pytest.fixture
def new_job(monkeypatch):
    """Make jobs, which end with the test."""
    jobs = []

    def make(**how):
        jobs.append(Job(monkeypatch, **how))
        return jobs[-1]

    yield make
    for job in jobs:
        job.driver.stop()


@pytest.fixture
def job(new_job):
    return new_job()


def test_others_are_told_when_the_new_rank_is_there_and_it_has_its_place_when_they_have_stopped(job):
    slot = job.finds("c")
    assert create_slot_env_vars(slot)["HOROVOD_STARTED_AHEAD"] == "1"
    assert nothing_comes(job.told), "it has not come to hvd.init() yet"
    place = job.comes_to_init("c")
    assert job.tells()
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
    assert job.tells()
    job.stop_training("a", "b")
    assert {first.get(timeout=SOON_S).rank, second.get(timeout=SOON_S).rank} == {2, 3}


def test_a_new_rank_that_ends_before_it_comes_costs_its_host_and_nobody_is_told(job):
    job.finds("c")
    job.ended["c"].put(1)
    assert eventually(lambda: job.host_is_given_up("c"))
    assert nothing_comes(job.told)
    job.stop_training("a", "b")
    assert eventually(lambda: job.driver.get_slot_info("a", 0).size == 2)


def test_others_that_stop_before_the_new_rank_is_there_go_on_without_it(job):
    job.finds("c")
    job.stop_training("a", "b")
    assert nothing_comes(job.started), "it is not started twice"
    assert job.driver.world_size() == 2
    assert job.joins("c", "a", "b").size == 3


def test_too_few_others_wait_for_the_new_rank_as_in_a_released_horovod(new_job):
    job = new_job(least=2)
    job.finds("c")
    job.loses("b")
    job.stop_training("a")
    assert eventually(lambda: "c" in job.driver.host_assignments)
    assert job.comes_to_init("c").get(timeout=SOON_S).rank == 1
    assert nothing_comes(job.told), "there is nothing new any more"


def test_who_asks_again_no_longer_waits_for_a_slower_one(job):
    job.hosts.slots |= {"c": 1, "d": 1}
    assert {job.started.get(timeout=SOON_S).hostname for _ in range(2)} == {"c", "d"}
    assert job.comes_to_init("c", patience_s=0.05).get(timeout=SOON_S) is None
    assert nothing_comes(job.told)
    assert job.joins("c", "a", "b").size == 3, "d has not come"


def test_a_host_that_came_first_keeps_its_place_when_one_that_was_found_first_comes(job):
    job.finds("c")
    job.finds("d")
    assert job.comes_to_init("d", patience_s=0.05).get(timeout=SOON_S) is None
    assert job.joins("d", "a", "b").rank == 2
    place = job.comes_to_init("c")
    job.tells()
    job.stop_training("a", "b", "d")
    assert (place.get(timeout=SOON_S).rank, job.driver.get_slot_info("d", 0).rank) == (3, 2)


def test_a_spare_takes_the_place_of_a_lost_rank_and_another_one_gets_ready(new_job):
    job = new_job(most=2, spares=1, idle=["c", "d"])
    spare = job.started.get(timeout=SOON_S)
    assert create_slot_env_vars(spare)["HOROVOD_STARTED_AHEAD"] == "1"
    assert nothing_comes(job.started), "one spare was asked for"
    stays, lost = job.of_rank(0), job.of_rank(1)
    assert job.comes_to_init(spare.hostname, patience_s=0.05).get(timeout=SOON_S) is None, "nobody is lost"
    place = job.comes_to_init(spare.hostname)
    assert nothing_comes(place)
    job.loses(lost)
    job.stop_training(stays)
    assert (place.get(timeout=SOON_S).rank, job.driver.world_size()) == (1, 2)
    assert job.started.get(timeout=SOON_S).hostname not in {lost, stays, spare.hostname}
    assert nothing_comes(job.told)


def test_a_spare_that_is_not_ready_is_not_waited_for(new_job):
    job = new_job(most=2, spares=1, idle=["c"])
    spare = job.started.get(timeout=SOON_S).hostname
    stays, lost = job.of_rank(0), job.of_rank(1)
    job.loses(lost)
    job.stop_training(stays)
    assert eventually(lambda: job.driver.world_size() == 1)
    assert job.joins(spare, stays).rank == 1


def test_a_spare_that_ends_costs_its_host_and_the_next_idle_one_has_a_spare(new_job):
    job = new_job(most=2, spares=1, idle=["c", "d"])
    spare = job.started.get(timeout=SOON_S).hostname
    job.ended[spare].put(1)
    assert job.started.get(timeout=SOON_S).hostname != spare
    assert job.host_is_given_up(spare)
    assert nothing_comes(job.told)


@pytest.mark.parametrize(
    ("how", "told"), [({"spares": -1}, "-1"), ({"spares": "one"}, "one"), ({"spares": 1, "most": None}, "--max-np")]
)
def test_spares_that_cannot_be_are_refused(how, told, new_job):
    with pytest.raises(ValueError, match=f"HOROVOD_ELASTIC_SPARES.*{told}"):
        new_job(**how)


def test_a_host_that_goes_away_again_is_neither_waited_for_nor_given_up(job):
    job.finds("c")
    del job.hosts.slots["c"]
    assert eventually(lambda: "c" not in job.driver._host_manager.current_hosts.available_hosts)
    job.finds("d")
    assert job.joins("d", "a", "b").size == 3
    job.ended["c"].put(1)
    assert nothing_comes(job.started)
    assert not job.host_is_given_up("c")
    job.finds("c"), "it has come back"


def test_no_rank_is_started_beyond_the_most(new_job):
    job = new_job(most=2)
    job.hosts.slots["c"] = 1
    assert nothing_comes(job.started)


def test_a_job_that_ends_meanwhile_has_no_place_for_it(job):
    job.finds("c")
    place = job.comes_to_init("c")
    job.driver.stop()
    assert place.get(timeout=SOON_S).rank == -1


def test_a_new_slot_that_fails_on_a_host_with_a_rank_leaves_that_rank_alone(job):
    job.hosts.slots["a"] = 2
    slot = job.started.get(timeout=SOON_S)
    assert (slot.hostname, slot.local_rank) == ("a", 1)
    job.ended["a"].put(1)
    assert nothing_comes(job.started), "it is not tried again"
    assert not job.host_is_given_up("a"), "its other rank would be killed, and nobody would learn of it"
    job.stop_training("a", "b")
    assert eventually(lambda: job.driver._worker_registry.last_rendezvous() == 2)
    assert job.driver.world_size() == 2


def test_two_notices_within_a_second_have_different_times(job, monkeypatch):
    times = []
    for client in job.driver._worker_clients.values():
        client.notify_hosts_updated = lambda timestamp, what: (times.append(timestamp), job.told.put(what))
    monkeypatch.setattr(module, "_epoch_time_s", lambda: 1000)
    for host, others in (("c", "ab"), ("d", "abc")):
        job.hosts.slots[host] = 1
        job.started.get(timeout=SOON_S)
        place = job.comes_to_init(host)
        job.tells()
        job.stop_training(*others)
        place.get(timeout=SOON_S)
    assert times == [1000, 1001], "ranks ignore what is not later than what they have heard"


def test_the_end_of_a_slots_former_process_says_nothing_of_the_one_that_is_starting(job):
    job.finds("c")
    former = job.ended["c"]
    job.joins("c", "a", "b")
    del job.hosts.slots["c"]
    job.tells()
    job.stop_training("a", "b", "c")
    assert eventually(lambda: job.driver.world_size() == 2)
    job.finds("c")
    former.put(1)
    assert nothing_comes(job.started)
    assert not job.host_is_given_up("c")


def test_a_rank_that_waits_on_a_host_that_is_gone_is_let_go(job):
    job.finds("c")
    assert job.comes_to_init("c", patience_s=0.05).get(timeout=SOON_S) is None
    del job.hosts.slots["c"]
    assert eventually(lambda: "c" not in job.driver._host_manager.current_hosts.available_hosts)
    assert job.comes_to_init("c").get(timeout=SOON_S).rank == -1
    job.ended["c"].put(0)
    job.finds("c"), "another one is started there"


def test_others_hear_that_a_spare_comes_where_a_host_was_taken_away(new_job):
    job = new_job(most=2, spares=1, idle=["c"])
    spare = job.started.get(timeout=SOON_S).hostname
    assert job.comes_to_init(spare, patience_s=0.05).get(timeout=SOON_S) is None
    del job.hosts.slots[job.of_rank(1)]
    assert job.tells() & module.HostUpdateResult.added, "or they would not broadcast what it needs"


def test_a_spare_that_has_gone_silent_has_no_place(new_job, monkeypatch):
    monkeypatch.setattr(module, "SILENT_SECS", 0.2)
    job = new_job(most=2, spares=1, idle=["c"])
    spare = job.started.get(timeout=SOON_S).hostname
    assert job.comes_to_init(spare, patience_s=0.05).get(timeout=SOON_S) is None
    threading.Event().wait(0.4)  # its machine is gone, which ssh notices after minutes
    stays, lost = job.of_rank(0), job.of_rank(1)
    job.loses(lost)
    job.stop_training(stays)
    assert eventually(lambda: job.driver.world_size() == 1)


def test_a_rank_is_started_again_on_a_host_that_is_forgiven_while_too_few_wait(new_job):
    job = new_job(least=2)
    job.loses("b")
    job.stop_training("a")
    assert eventually(lambda: job.host_is_given_up("b"))
    job.driver._host_manager._hosts_state["b"]._cooldown_period_end_ts = 1.0  # long ago
    assert job.started.get(timeout=SOON_S).hostname == "b"
    assert eventually(lambda: job.driver._worker_registry.last_rendezvous() == 2)
    assert job.driver.get_slot_info("b", 0).rank == 1
    assert nothing_comes(job.started), "it is not started twice"


def test_ranks_that_meet_wait_neither_for_the_discovery_of_hosts_nor_for_one_that_is_told_of_them(job, monkeypatch):
    asked, answers = threading.Event(), threading.Event()
    find = job.hosts.find_available_hosts_and_slots

    def slowly():
        asked.set()
        answers.wait(SOON_S)
        return find()

    monkeypatch.setattr(job.hosts, "find_available_hosts_and_slots", slowly)
    assert asked.wait(SOON_S)
    job.loses("b")
    job.stop_training("a")
    assert eventually(lambda: job.driver.world_size() == 1, within_s=5.0)
    answers.set()


def test_ranks_that_meet_do_not_wait_for_a_frozen_one_that_is_told_of_hosts(job):
    told, answers = threading.Event(), threading.Event()
    for client in job.driver._worker_clients.values():
        client.notify_hosts_updated = lambda *what: (told.set(), answers.wait(SOON_S))
    del job.hosts.slots["b"]
    assert told.wait(SOON_S)
    job.stop_training("a", "b")
    assert eventually(lambda: job.driver.world_size() == 1, within_s=5.0)
    answers.set()


def test_the_end_of_a_slots_former_process_says_nothing_of_the_one_that_has_its_place_now(job):
    former = job.ended["b"]
    del job.hosts.slots["b"]
    job.tells()
    job.stop_training("a", "b")
    assert eventually(lambda: job.driver.world_size() == 1)
    job.finds("b")
    assert job.joins("b", "a").rank == 1
    former.put(0)
    registry = job.driver._worker_registry
    assert not eventually(registry.get_recorded_slots, within_s=0.3)


def test_a_slot_that_is_not_tried_again_leaves_its_rank_to_another_host(new_job):
    job = new_job(most=3)
    job.hosts.slots["a"] = 2
    job.started.get(timeout=SOON_S)
    job.ended["a"].put(1)
    job.finds("c")
    assert job.joins("c", "a", "b").size == 3


def test_others_hear_that_some_may_come_whenever_a_host_was_taken_away(job):
    """One that comes between this and their meeting needs what they have, and is not told of to them."""
    del job.hosts.slots["b"]
    assert job.tells() == module.HostUpdateResult.mixed


def test_a_spare_that_ends_when_it_would_be_taken_stops_nobody(new_job):
    job = new_job(least=2, most=2, spares=1, idle=["c"])
    spare = job.started.get(timeout=SOON_S).hostname
    stays, lost = job.of_rank(0), job.of_rank(1)
    registry = job.driver._worker_registry
    job.loses(lost)
    assert eventually(registry.get_recorded_slots)
    with job.driver._ahead_changed:
        job.stop_training(stays)
        assert eventually(lambda: job.host_is_given_up(lost))
        threading.Event().wait(0.1)
        job.driver._host_manager.blacklist(spare)
    assert nothing_comes(job.told)
    assert not job.driver.finished()
    job.hosts.slots["d"] = 1
    assert eventually(lambda: job.driver.world_size() == 2 and "d" in job.driver.host_assignments)


def test_a_rank_that_waits_asks_often_and_the_others_are_told_once(job, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_SECS", 0.02)
    tells, has_come = [], job.driver._tell_who_have_come
    monkeypatch.setattr(job.driver, "_tell_who_have_come", lambda how: (tells.append(how), has_come(how)))
    first = job.finds("c")
    place = job.comes_to_init("c")
    assert job.tells()
    came_at = first.asked_at
    assert eventually(lambda: first.asked_at > came_at + 0.1), "it is known to be alive"
    assert tells == [True]
    job.stop_training("a", "b")
    assert place.get(timeout=SOON_S).rank == 2


def test_a_rank_that_waits_is_known_to_be_alive_while_a_frozen_one_is_told_of_it(job, monkeypatch):
    told, answers = threading.Event(), threading.Event()
    for client in job.driver._worker_clients.values():
        client.notify_hosts_updated = lambda *what: (told.set(), answers.wait(SOON_S))
    job.finds("c")
    assert job.comes_to_init("c", patience_s=0.05).get(timeout=SOON_S / 2) is None, "it hears that it must wait on"
    assert told.wait(SOON_S)
    answers.set()


def test_a_host_whose_cooldown_ends_while_hosts_are_counted_is_forgiven_the_next_time(monkeypatch):
    manager = discovery.HostManager(discovery.FixedHosts({"a": 1, "b": 1}), cooldown_range=(1, 1))
    manager.update_available_hosts()
    for host in ("a", "b"):
        manager.blacklist(host)
    first, second = (manager._hosts_state[host] for host in ("a", "b"))
    first._cooldown_period_end_ts = second._cooldown_period_end_ts = 1.0  # long ago
    answers = [False, False]  # when it is asked whether one has ended, and whether this one has; after that, it has
    monkeypatch.setattr(second, "is_resurrected", lambda: answers.pop() if answers else True)
    manager.update_available_hosts()
    assert manager.current_hosts.available_hosts == {"a"}
    assert manager.is_blacklisted("b"), "else its end is never noticed"
    assert manager.update_available_hosts() == module.HostUpdateResult.added
    assert manager.current_hosts.available_hosts == {"a", "b"}


def test_a_forgiven_host_is_not_dropped_by_a_thread_that_asks_for_the_hosts_meanwhile(monkeypatch):
    manager = discovery.HostManager(discovery.FixedHosts({"a": 1}), cooldown_range=(1, 1))
    manager.update_available_hosts()
    manager.blacklist("a")
    state = manager._hosts_state["a"]
    state._cooldown_period_end_ts = 1.0  # long ago
    whitelist = state.whitelist
    monkeypatch.setattr(state, "whitelist", lambda: (manager.current_hosts, whitelist()))
    assert manager.update_available_hosts() == module.HostUpdateResult.added
    assert manager.current_hosts.available_hosts == {"a"}

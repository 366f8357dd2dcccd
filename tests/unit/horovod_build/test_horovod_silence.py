"""The launcher of elastic jobs gives up a rank that does not answer while others wait for it."""

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from horovod.runner.elastic import registration, worker
from launcher_of_elastic_jobs import Job, eventually

SILENCE_S, QUESTION_S = 0.3, 0.02


class Asked:
    """A rank's thread that answers, or does not: ``silent`` says how often it will not from now on.

    The launcher's clock moves when it asks, so that a busy machine makes no silence longer.
    """

    now_s = 0.0

    def __init__(self, silent=0):
        self.silent, self.questions = silent, threading.Semaphore(0)

    def answers(self):
        Asked.now_s += QUESTION_S
        self.questions.release()
        self.silent -= 1
        return self.silent < 0

    def was_asked(self, times):
        return all(self.questions.acquire(timeout=20.0) for _ in range(times))


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setattr(registration, "SILENCE_SECONDS", SILENCE_S)
    monkeypatch.setattr(registration, "QUESTION_SECONDS", QUESTION_S)
    clock = SimpleNamespace(monotonic=lambda: Asked.now_s, sleep=time.sleep, time=time.time)
    monkeypatch.setattr(registration, "time", clock)
    job = Job(monkeypatch)
    yield job
    job.driver.stop()


def with_the_other(job, rank):
    """``a`` has stopped, and ``b`` has not."""
    job.driver._worker_clients["b", 0] = rank
    job.stop_training("a")
    return rank


def test_a_rank_that_is_frozen_is_given_up_and_the_others_go_on(job, caplog):
    with_the_other(job, Asked(silent=10**9))
    assert eventually(lambda: job.driver.world_size() == 1)
    assert job.host_is_given_up("b")
    assert "b[0] has not answered for 0.3 s, while others wait for it; it is given up." in caplog.text
    assert job.driver.get_slot_info("b", 0).rank == -1, "what it hears if it wakes up and asks for its place"


def test_a_busy_rank_is_waited_for_as_long_as_it_takes(job):
    rank = with_the_other(job, Asked())
    assert rank.was_asked(int(3 * SILENCE_S / QUESTION_S))
    assert job.driver.world_size() == 2
    assert not job.host_is_given_up("b")
    job.stop_training("b")
    assert eventually(lambda: job.driver._worker_registry.last_rendezvous() == 2)
    assert job.driver.world_size() == 2


def test_a_rank_that_answers_again_in_time_is_not_given_up(job):
    rank = with_the_other(job, Asked(silent=4))
    assert rank.was_asked(int(3 * SILENCE_S / QUESTION_S))
    assert not job.host_is_given_up("b")


def test_a_rank_that_has_not_told_its_address_yet_is_waited_for(job):
    del job.driver._worker_clients["b", 0]
    job.stop_training("a")
    assert not eventually(lambda: job.host_is_given_up("b"), within_s=3 * SILENCE_S)


def test_nobody_is_asked_once_all_have_stopped(job):
    rank = with_the_other(job, Asked(silent=10**9))
    assert rank.was_asked(1)
    job.stop_training("b")
    assert eventually(lambda: job.driver._worker_registry.last_rendezvous() == 2)
    assert not eventually(lambda: job.host_is_given_up("b"), within_s=2 * SILENCE_S)


def test_a_new_process_is_not_asked_at_the_address_of_a_former_one(job):
    job.driver._worker_clients["c", 0] = SimpleNamespace(answers=lambda: False)
    job.hosts.slots["c"] = 1
    assert job.started.get(timeout=20.0).hostname == "c"
    assert job.driver.those_without_an_answer([("c", 0)]) == []


def test_a_rank_that_was_given_up_and_wakes_up_while_another_is_busy_waits_to_hear_that_it_has_no_place(job):
    """Its place of before is taken by nobody yet, and it must not go on with that."""
    job.hosts.slots["c"] = 1
    joined = job.comes_to_init(job.started.get(timeout=20.0).hostname)
    job.stop_training("a", "b")
    assert joined.get(timeout=20.0).rank == 2
    job.driver._worker_clients |= {("b", 0): Asked(silent=10**9), ("c", 0): Asked()}
    job.stop_training("a")
    registry = job.driver._worker_registry
    assert eventually(lambda: registry.count(registration.FAILURE) == 1)
    heard = threading.Thread(target=registry.record_ready, args=("b", 0), daemon=True)
    heard.start()
    job.loses("b")
    heard.join(0.3)
    assert heard.is_alive()
    assert job.driver.world_size() == 3, "c is busy, and b counts once, however often it is told to have failed"
    job.stop_training("c")
    heard.join(20.0)
    assert not heard.is_alive()
    assert job.driver.get_slot_info("b", 0).rank == -1
    assert job.driver.world_size() == 2


@pytest.mark.parametrize("seconds", ["abc", "0", "nan"])
def test_a_silence_that_is_no_time_is_refused_by_its_name(seconds):
    done = subprocess.run(
        [sys.executable, "-c", "from horovod.runner.elastic import registration"], capture_output=True, text=True,
        env={**os.environ, "HOROVOD_ELASTIC_SILENCE_SECONDS": seconds}, check=False,
    )  # fmt: skip
    message = f"HOROVOD_ELASTIC_SILENCE_SECONDS must be a number of seconds above 0, got {seconds}; leave it out for 20"
    assert message in done.stderr


def test_a_rank_that_comes_while_it_is_asked_is_not_given_up(job):
    """The last question ran into its time limit, but then it was back, and all went on."""
    asked = []

    def answers():
        asked.append(True)
        if len(asked) == 2:
            Asked.now_s += SILENCE_S
            job.stop_training("b")
            assert eventually(lambda: registry.last_rendezvous() == 2)
        return False

    registry = job.driver._worker_registry
    with_the_other(job, SimpleNamespace(answers=answers))
    assert eventually(lambda: registry.last_rendezvous() == 2)
    assert not eventually(lambda: registry.count(registration.FAILURE), within_s=0.3)


def test_a_rank_is_silent_from_the_question_on_that_it_did_not_answer(job):
    asked = []

    def answers():
        asked.append(True)
        Asked.now_s += 1.1 * SILENCE_S
        return False

    with_the_other(job, SimpleNamespace(answers=answers))
    assert eventually(lambda: job.host_is_given_up("b"))
    assert len(asked) == 1, "its time limit counts"


def test_the_frozen_one_is_given_up_also_where_all_others_have_ended(job):
    job.driver._worker_clients["b", 0] = Asked(silent=10**9)
    job.loses("a")
    assert eventually(job.driver.finished), "there is nobody left to go on"


def test_a_rank_that_asks_twice_counts_once(job):
    job.stop_training("a")
    job.stop_training("a")
    registry = job.driver._worker_registry
    assert not eventually(lambda: registry.last_rendezvous() == 2, within_s=0.3)
    job.stop_training("b")
    assert eventually(lambda: registry.last_rendezvous() == 2)


def test_a_rank_without_a_place_is_told_so_at_once_and_counts_for_nobody(job):
    """It was given up, and wakes up when its host is used again."""
    heard = threading.Thread(target=job.driver.record_ready, args=("c", 0), daemon=True)
    heard.start()
    heard.join(5.0)
    assert not heard.is_alive()
    assert job.driver.get_slot_info("c", 0).rank == -1
    job.stop_training("a")
    registry = job.driver._worker_registry
    assert not eventually(lambda: registry.last_rendezvous() == 2, within_s=0.3)


def test_a_rank_that_ends_at_the_moment_when_the_last_one_comes_stops_nobody(job, monkeypatch):
    """The thread that tells so has looked whether they meet right before they did."""
    registry, resume = job.driver._worker_registry, job.driver.resume

    def at_that_moment():
        monkeypatch.setattr(registry, "_action_event", SimpleNamespace(wait=lambda: None, set=lambda: None))
        threading.Thread(target=registry.record_failure, args=("a", 0), daemon=True).start()
        threading.Event().wait(0.2)
        resume()

    monkeypatch.setattr(job.driver, "resume", at_that_moment)
    job.stop_training("a", "b")
    assert eventually(lambda: registry.last_rendezvous() == 2)


def test_a_frozen_rank_holds_up_nobody_who_tells_it_of_new_hosts(monkeypatch):
    frozen = threading.Event()
    manager = SimpleNamespace(handle_hosts_updated=lambda *what: frozen.wait(20.0))
    service = worker.WorkerNotificationService(b"key", None, manager)
    client = worker.WorkerNotificationClient(service.addresses(), b"key", 0)
    monkeypatch.setattr(client, "_answer_timeout", 0.1)
    with pytest.raises(TimeoutError):
        client.notify_hosts_updated(1, worker.HostUpdateResult.added)
    frozen.set()
    service.shutdown()

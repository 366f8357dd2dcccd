"""The launcher of an elastic job, without the processes: what it starts, and whom it tells, is noted."""

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
        tell = lambda timestamp, what: self.told.put(what)  # noqa: E731
        client = SimpleNamespace(notify_hosts_updated=tell, answers=lambda: True)
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

    def finds(self, host):
        """A host is there, and a rank is started on it ahead of time; return its slot."""
        self.hosts.slots[host] = 1
        return self.next_started(host)

    def next_started(self, host=""):
        """Return the slot of the next rank that is started, which is on this host."""
        slot = self.started.get(timeout=SOON_S)
        assert slot.hostname == host or not host
        return slot

    def tells(self):
        """Return what others are told of hosts next."""
        return self.told.get(timeout=SOON_S)

    def of_rank(self, rank):
        """Return the host of a rank."""
        return next(host for host, slots in self.driver.host_assignments.items() if slots[0].rank == rank)

    def loses(self, host):
        """The rank of this host fails."""
        self.ended[host].put(1)

    def comes_to_init(self, host, patience_s=SOON_S):
        """A rank that was started ahead asks for its place; its answer is put into the queue that this returns."""
        answer = queue.Queue()

        def ask():
            place = self.driver.await_place(host, 0, patience_s)
            while place is None and patience_s == SOON_S:
                place = self.driver.await_place(host, 0, patience_s)
            answer.put(place)

        threading.Thread(target=ask, daemon=True).start()
        return answer

    def joins(self, host, *others):
        """A rank that was started ahead comes, others are told and stop; return its place."""
        place = self.comes_to_init(host)
        assert self.tells()
        self.stop_training(*others)
        return place.get(timeout=SOON_S)

    def host_is_given_up(self, host):
        return self.driver._host_manager.is_blacklisted(host)


def nothing_comes(from_queue):
    with pytest.raises(queue.Empty):
        from_queue.get(timeout=0.2)
    return True


def eventually(holds, within_s=SOON_S):
    for _ in range(int(within_s / 0.02)):
        if holds():
            return True
        threading.Event().wait(0.02)
    return False

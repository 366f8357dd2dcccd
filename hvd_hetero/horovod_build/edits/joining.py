"""Edits by which ranks train on while another one starts, and a spare takes the place of a lost one (elastic jobs).

A released Horovod tells the ranks of a new host at once. They stop at their next commit, and then the launcher starts
ranks there, whose imports all others wait for: several seconds. Here the launcher starts them first. A rank that was
started ahead asks the launcher for its place when it comes to ``hvd.init()``. Once all of them have, the others are
told; when those have stopped, each is given its place, and goes on.

    a released Horovod:  told ─▶ stopped ─▶ new ranks start, import ─▶ all meet
    here:                new ranks start, import ─▶ told ─▶ stopped ─▶ all meet

Ranks that stop for another reason meanwhile go on without those who have not come yet, if that leaves ``--min-np`` of
them. Who has come does not wait for a slower one for more than ``patience_s``. A rank that ends before it has a place
costs its host, as it does later on.

**Spares.** Slots beyond ``--max-np`` are idle. With ``HOROVOD_ELASTIC_SPARES=n`` in the launcher's environment, ranks
are started on n of them, and wait in ``hvd.init()`` until others are lost: then they have a place in the same
rendezvous in which the survivors meet.

    without:  killed ─▶ survivors meet ─▶ … fewer train while another one starts … ─▶ told ─▶ stopped ─▶ all meet
    with:     killed ─▶ survivors and a spare meet
"""

from hvd_hetero.horovod_build.edits.edit import Edit

__all__ = ["JOINING_EDITS"]

_DRIVER = "horovod/runner/elastic/driver.py"
_REASON = "all ranks wait for the start of a new one, imports included"
_UNLOCKED = "ranks that meet wait for the discovery script to end, and for the answer of a rank that may be frozen"

JOINING_EDITS = (
    Edit(
        _DRIVER,
        "        self._worker_clients = {}\n",
        """        self._worker_clients = {}

        # Ranks that were started before the others were told: their slots, with when each last asked for its place
        self._ahead = {}
        self._newest = {}  # of each slot, as what its newest process was started
        self._not_again = set()  # slots whose rank ended before it had a place, on hosts that have other ranks
        self._told_at = 0
        self._ahead_changed = threading.Condition()
        spares = os.getenv('HOROVOD_ELASTIC_SPARES') or '0'  # ranks that may wait until others are lost
        if not spares.isdecimal():
            raise ValueError(f'HOROVOD_ELASTIC_SPARES must be an integer from 0 on, got {spares}')
        self._spares = int(spares)
        if self._spares and max_num_proc is None:
            raise ValueError('HOROVOD_ELASTIC_SPARES needs --max-np: spares are on slots beyond that')
""",
        _REASON,
    ),
    Edit(
        _DRIVER,
        """        current_hosts = self.wait_for_available_slots(min_num_proc)
        pending_slots = self._update_host_assignments(current_hosts)
        self._worker_registry.reset(self.world_size())
        self._start_worker_processes(pending_slots)

""",
        """        # A host that is given up has no ranks any more: if it comes back meanwhile, it needs new ones
        self._host_assignments = {host: slots for host, slots in self._host_assignments.items()
                                  if not self._host_manager.is_blacklisted(host)}
        while not self._give_places(min_num_proc):
            self.wait_for_available_slots(min_num_proc)

    def _give_places(self, min_num_proc):
        \"\"\"Give those who are there their places, and start the others, if there are enough slots now.\"\"\"
        with self._ahead_changed:
            current_hosts = self._host_manager.current_hosts
            if current_hosts.count_available_slots() < min_num_proc:
                return False
            pending_slots = self._update_host_assignments(self._those_who_are_there(current_hosts))
            self._worker_registry.reset(self.world_size())
            not_started = [slot_info for slot_info in pending_slots
                           if self._ahead.pop((slot_info.hostname, slot_info.local_rank), None) is None]
            self._start_worker_processes(not_started)
            self._start_ahead(current_hosts)
            self._ahead_changed.notify_all()
            return True

    def await_place(self, host, local_rank, patience_s=20.0):
        \"\"\"Return the slot of a rank that has come to hvd.init(), once the others have stopped (None: not yet).\"\"\"
        key = (host, local_rank)
        with self._ahead_changed:
            started_as = self._ahead.get(key)
            asks_again = started_as is not None and started_as.asked_at is not None
            if asks_again and host not in self._host_manager.current_hosts.available_hosts:
                del self._ahead[key]  # its host is gone; if it comes back, another one is started
                return hosts.INVALID_SLOT_INFO
            if started_as is not None:
                started_as.asked_at = time.monotonic()
                tells = started_as.asked_at >= started_as.tells_at
                if tells:
                    started_as.tells_at = started_as.asked_at + patience_s
        if started_as is not None and tells:  # in a thread, for the one that is told may be frozen
            threading.Thread(target=self._tell_who_have_come, args=(not asks_again,), daemon=True).start()
        with self._ahead_changed:
            within_s = min(patience_s, ANSWER_SECS)  # so that one whose machine is gone is seldom given a place
            self._ahead_changed.wait_for(lambda: key not in self._ahead or self.finished(), within_s)
            if key in self._ahead and not self.finished():
                return None
            return self.get_slot_info(host, local_rank)

    def _has_come(self, key):
        \"\"\"Return whether a rank waits for its place, and has asked for it lately: its machine may be gone.\"\"\"
        started_as = self._ahead.get(key)
        return bool(started_as and started_as.asked_at) and time.monotonic() - started_as.asked_at < SILENT_SECS

    def _those_who_are_there(self, current_hosts):
        \"\"\"Return these hosts with the slots whose ranks need not start any more, if that leaves enough.\"\"\"
        def are_there(host):
            slots = current_hosts.get_slots(host)
            return next((slot for slot in range(slots) if not self.has_rank_assignment(host, slot)
                         and not self._has_come((host, slot))), slots)

        slots = {host: are_there(host) for host in current_hosts.host_assignment_order}
        there = DiscoveredHosts(slots, [host for host in slots if slots[host]])
        return there if there.count_available_slots() >= self._min_num_proc else current_hosts

    def _start_ahead(self, current_hosts):
        \"\"\"Start ranks on slots that have none, and spares.\"\"\"
        if not self._host_assignments or current_hosts.count_available_slots() < self._min_num_proc:
            return
        with self._ahead_changed:
            usable = {host: min([slot for at, slot in self._not_again if at == host] + [current_hosts.get_slots(host)])
                      for host in current_hosts.host_assignment_order}
            usable_hosts = DiscoveredHosts(usable, list(usable))
            if usable_hosts.count_available_slots() < self._min_num_proc:
                return
            _, slots = self._get_host_assignments(usable_hosts, self._spares)
            for slot_info in slots:
                key = (slot_info.hostname, slot_info.local_rank)
                if not self.has_rank_assignment(*key) and key not in self._ahead:
                    self._ahead[key] = slot_info
                    slot_info.starts_ahead, slot_info.asked_at, slot_info.tells_at = True, None, 0.0
                    self._start_worker_process(slot_info)

    def _tell_who_have_come(self, patiently):
        \"\"\"Tell the others that ranks have come; patiently, once all have come who are to take part.\"\"\"
        current_hosts = self._host_manager.current_hosts
        if current_hosts.count_available_slots() < self._min_num_proc:
            return
        with self._ahead_changed:
            _, slots = self._get_host_assignments(current_hosts)
            started = [self._ahead.get((slot_info.hostname, slot_info.local_rank)) for slot_info in slots]
            missing = [started_as for started_as in started if started_as and started_as.asked_at is None]
        if not (patiently and missing):
            self._notify_workers_host_changes(current_hosts, HostUpdateResult.added)

    def _has_ended_ahead(self, slot_info):
        \"\"\"Return whether a rank that has ended had no place: never, or another process has its slot now.\"\"\"
        key = (slot_info.hostname, slot_info.local_rank)
        with self._ahead_changed:
            if self._newest[key] is not slot_info:
                return True
            if key not in self._ahead:
                return False
            del self._ahead[key]
            self._ahead_changed.notify_all()
            if self.finished() or slot_info.hostname not in self._host_manager.current_hosts.available_hosts:
                return True
            if slot_info.hostname in self._host_assignments:
                self._not_again.add(key)  # to give up the host would kill its ranks, which train
            else:
                self._host_manager.blacklist(slot_info.hostname)
            self._start_ahead(self._host_manager.current_hosts)
        self._tell_who_have_come(patiently=True)
        return True

""",
        _REASON,
    ),
    Edit(
        _DRIVER,
        """            next_host_assignments, _ = self._get_host_assignments(current_hosts)
""",
        """            with self._ahead_changed:
                next_host_assignments, _ = self._get_host_assignments(self._those_who_are_there(current_hosts))
                update_res |= HostUpdateResult.added  # else states do not broadcast to those who come until they meet
""",
        _REASON,
    ),
    Edit(
        _DRIVER,
        """        timestamp = _epoch_time_s()
""",
        """        with self._ahead_changed:
            timestamp = self._told_at = max(_epoch_time_s(), self._told_at + 1)
""",
        "ranks ignore what is not later, in whole seconds, than what they have heard before",
    ),
    Edit(
        _DRIVER,
        """ELASTIC_TIMEOUT_SECS = 600
""",
        """ELASTIC_TIMEOUT_SECS = 600
ANSWER_SECS = 3.0  # after which a rank that waits for its place hears that it must wait on, and asks again
SILENT_SECS = 10.0  # after which one that has not asked again is taken for dead
""",
        _REASON,
    ),
    Edit(
        _DRIVER,
        """        self._shutdown.set()
        self._rendezvous.stop()
""",
        """        self._shutdown.set()
        with self._ahead_changed:
            self._ahead_changed.notify_all()
        self._rendezvous.stop()
""",
        _REASON,
    ),
    Edit(
        _DRIVER,
        """    def _get_host_assignments(self, current_hosts):
""",
        """    def _get_host_assignments(self, current_hosts, spares=0):
""",
        _REASON,
    ),
    Edit(
        _DRIVER,
        """                     for host in current_hosts.host_assignment_order]
        host_assignments_list = hosts.get_host_assignments(host_list, self._min_num_proc, self._max_num_proc)
""",
        """                     for host in sorted(current_hosts.host_assignment_order,
                                        key=lambda host: host not in self._host_assignments)]
        most = self._max_num_proc and self._max_num_proc + spares
        host_assignments_list = hosts.get_host_assignments(host_list, self._min_num_proc, most)
""",
        "a host that has come sooner than one that was found sooner must not lose its place to it",
    ),
    Edit(
        _DRIVER,
        """            self._wait_hosts_cond.acquire()
            try:
                update_res = self._host_manager.update_available_hosts()
                if update_res != HostUpdateResult.no_update:
                    self._notify_workers_host_changes(self._host_manager.current_hosts, update_res)
                    self._wait_hosts_cond.notify_all()
""",
        """            try:
                update_res = self._host_manager.update_available_hosts()
                if update_res != HostUpdateResult.no_update:
                    current_hosts = self._host_manager.current_hosts
                    with self._ahead_changed:
                        self._not_again = {key for key in self._not_again if key[0] in current_hosts.available_hosts}
                    if update_res & HostUpdateResult.added:
                        self._start_ahead(current_hosts)
                    with self._wait_hosts_cond:
                        self._wait_hosts_cond.notify_all()
                    if update_res & HostUpdateResult.removed:
                        self._notify_workers_host_changes(current_hosts, update_res)
""",
        _UNLOCKED,
    ),
    Edit(
        _DRIVER,
        """                    self._wait_hosts_cond.notify_all()
                    raise
                # Transient error, retry until timeout
                logging.warning(str(e))
            finally:
                self._wait_hosts_cond.release()
""",
        """                    with self._wait_hosts_cond:
                        self._wait_hosts_cond.notify_all()
                    raise
                # Transient error, retry until timeout
                logging.warning(str(e))
""",
        _UNLOCKED,
    ),
    Edit(
        _DRIVER,
        """from horovod.runner.elastic.discovery import HostManager
""",
        """from horovod.runner.elastic.discovery import DiscoveredHosts, HostManager
""",
        _REASON,
    ),
    Edit(
        _DRIVER,
        """            exit_code, timestamp = res
            self._handle_worker_exit(slot_info, exit_code, timestamp)
""",
        """            exit_code, timestamp = res
            if not self._has_ended_ahead(slot_info):
                self._handle_worker_exit(slot_info, exit_code, timestamp)
""",
        _REASON,
    ),
)

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
_RENDEZVOUS = "horovod/runner/elastic/rendezvous.py"
_REASON = "all ranks wait for the start of a new one, imports included"

JOINING_EDITS = (
    Edit(
        _DRIVER,
        "        self._worker_clients = {}\n",
        """        self._worker_clients = {}

        # Ranks that were started before the others were told of their host, and whether each has come to hvd.init()
        self._ahead = {}
        self._ahead_changed = threading.Condition()
        self._spares = int(os.getenv('HOROVOD_ELASTIC_SPARES') or 0)  # ranks that may wait until others are lost
        if self._spares < 0:
            raise ValueError(f'HOROVOD_ELASTIC_SPARES must be 0 or more, got {self._spares}')
""",
        _REASON,
    ),
    Edit(
        _DRIVER,
        """        pending_slots = self._update_host_assignments(current_hosts)
        self._worker_registry.reset(self.world_size())
        self._start_worker_processes(pending_slots)

""",
        """        with self._ahead_changed:
            pending_slots = self._update_host_assignments(self._those_who_are_there(current_hosts))
            self._worker_registry.reset(self.world_size())
            not_started = [slot_info for slot_info in pending_slots
                           if self._ahead.pop((slot_info.hostname, slot_info.local_rank), None) is None]
            self._start_worker_processes(not_started)
            self._start_ahead(current_hosts)
            self._ahead_changed.notify_all()

    def await_place(self, host, local_rank, patience_s=20.0):
        \"\"\"Return the slot of a rank that has come to hvd.init(), once the others have stopped (None: not yet).\"\"\"
        key = (host, local_rank)
        with self._ahead_changed:
            asks_again = self._ahead.get(key)
            if key in self._ahead:
                self._ahead[key] = True
        self._tell_who_have_come(patiently=not asks_again)
        with self._ahead_changed:
            self._ahead_changed.wait_for(lambda: key not in self._ahead or self.finished(), patience_s)
            if key in self._ahead and not self.finished():
                return None
            return self.get_slot_info(host, local_rank)

    def _those_who_are_there(self, current_hosts):
        \"\"\"Return these hosts with the slots whose ranks need not start any more, if that leaves enough.\"\"\"
        def are_there(host):
            slots = current_hosts.get_slots(host)
            return next((slot for slot in range(slots) if not self.has_rank_assignment(host, slot)
                         and not self._ahead.get((host, slot))), slots)

        slots = {host: are_there(host) for host in current_hosts.host_assignment_order}
        there = DiscoveredHosts(slots, [host for host in slots if slots[host]])
        return there if there.count_available_slots() >= self._min_num_proc else current_hosts

    def _start_ahead(self, current_hosts):
        \"\"\"Start ranks on slots that have none, and spares.\"\"\"
        if not self._host_assignments or current_hosts.count_available_slots() < self._min_num_proc:
            return
        with self._ahead_changed:
            _, slots = self._get_host_assignments(current_hosts, self._spares)
            for slot_info in slots:
                key = (slot_info.hostname, slot_info.local_rank)
                if not self.has_rank_assignment(*key) and key not in self._ahead:
                    self._ahead[key] = False
                    slot_info.starts_ahead = True
                    self._start_worker_process(slot_info)

    def _tell_who_have_come(self, patiently):
        \"\"\"Tell the others that ranks have come; patiently, once all have come who are to take part.\"\"\"
        current_hosts = self._host_manager.current_hosts
        if current_hosts.count_available_slots() < self._min_num_proc:
            return
        with self._ahead_changed:
            _, slots = self._get_host_assignments(current_hosts)
            missing = [slot_info for slot_info in slots
                       if self._ahead.get((slot_info.hostname, slot_info.local_rank)) is False]
        if not (patiently and missing):
            self._notify_workers_host_changes(current_hosts, HostUpdateResult.added)

    def _has_ended_ahead(self, slot_info):
        \"\"\"Return whether a rank that has ended never had a place.\"\"\"
        with self._ahead_changed:
            if self._ahead.pop((slot_info.hostname, slot_info.local_rank), None) is None:
                return False
        if not self.finished() and slot_info.hostname in self._host_manager.current_hosts.available_hosts:
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
        """            next_host_assignments, _ = self._get_host_assignments(self._those_who_are_there(current_hosts))
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
        """                    self._notify_workers_host_changes(self._host_manager.current_hosts, update_res)
                    self._wait_hosts_cond.notify_all()
""",
        """                    current_hosts = self._host_manager.current_hosts
                    if update_res & HostUpdateResult.added:
                        self._start_ahead(current_hosts)
                    if update_res & HostUpdateResult.removed:
                        self._notify_workers_host_changes(current_hosts, update_res)
                    self._wait_hosts_cond.notify_all()
""",
        _REASON,
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
    Edit(
        _RENDEZVOUS,
        """# PUT methods
""",
        """GET_PLACE = 'place_of_a_rank_started_ahead'

# PUT methods
""",
        _REASON,
    ),
    Edit(
        _RENDEZVOUS,
        """                return self._get_rank_and_size(host, int(local_rank))

""",
        """                return self._get_rank_and_size(host, int(local_rank))
            if scope == GET_PLACE:
                host, local_rank = key.split(':')
                slot_info = driver.await_place(host, int(local_rank))
                place = slot_info and slot_info.to_response_string()
                return secret.sign(scope, key, codec.dumps_base64(place, to_ascii=False))

""",
        _REASON,
    ),
    Edit(
        "horovod/runner/gloo_run.py",
        """    return horovod_rendez_env


def _slot_info_to_command_fn""",
        """    if getattr(slot_info, 'starts_ahead', False):
        horovod_rendez_env["HOROVOD_STARTED_AHEAD"] = "1"
    return horovod_rendez_env


def _slot_info_to_command_fn""",
        _REASON,
    ),
    Edit(
        "horovod/common/basics.py",
        """        initialization_ok = True
""",
        """        if os.environ.pop('HOROVOD_STARTED_AHEAD', None):
            # The others are told now that this rank is ready; when they have stopped, it has a place
            from time import monotonic
            from horovod.runner.http.http_client import read_data_from_kvstore
            asks_s, place = monotonic(), None
            while place is None:
                place = read_data_from_kvstore(
                    os.environ['HOROVOD_GLOO_RENDEZVOUS_ADDR'], os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT'],
                    'place_of_a_rank_started_ahead',
                    '{}:{}'.format(os.environ['HOROVOD_HOSTNAME'], os.environ['HOROVOD_LOCAL_RANK']))
            if place.startswith('-1'):
                raise SystemExit(0)  # the job is over, or has given up this host
            os.environ['HOROVOD_WAITED_FOR_PLACE_S'] = str(monotonic() - asks_s)
            names = ('RANK', 'SIZE', 'LOCAL_RANK', 'LOCAL_SIZE', 'CROSS_RANK', 'CROSS_SIZE')
            os.environ.update(('HOROVOD_' + name, number) for name, number in zip(names, place.split(',')))

        initialization_ok = True
""",
        _REASON,
    ),
)

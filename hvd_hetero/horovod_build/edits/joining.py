"""Edits by which ranks train on while another one starts, in elastic jobs.

A released Horovod tells the ranks of a new host at once. They stop at their next commit, and then the launcher starts
ranks there, whose imports all others wait for: several seconds. Here the launcher starts them first. A rank that was
started ahead asks the launcher for its place when it comes to ``hvd.init()``. Once all of them have, the others are
told; when those have stopped, each is given its place, and goes on.

    a released Horovod:  told ─▶ stopped ─▶ new ranks start, import ─▶ all meet
    here:                new ranks start, import ─▶ told ─▶ stopped ─▶ all meet

A rank that ends before it has a place costs its host, as it does later on. Where hosts go away, too, or ranks stop for
another reason before a new one is there, they wait for it, as before.
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
            pending_slots = self._update_host_assignments(current_hosts)
            self._worker_registry.reset(self.world_size())
            not_started = [slot_info for slot_info in pending_slots
                           if self._ahead.pop((slot_info.hostname, slot_info.local_rank), None) is None]
            self._start_worker_processes(not_started)
            self._ahead_changed.notify_all()

    def await_place(self, host, local_rank):
        \"\"\"Return the slot of a rank that has come to hvd.init(), once the others have stopped.\"\"\"
        key = (host, local_rank)
        with self._ahead_changed:
            if key in self._ahead:
                self._ahead[key] = True
        self._tell_if_all_have_come()
        with self._ahead_changed:
            while key in self._ahead and not self.finished():
                self._ahead_changed.wait(1.0)
            return self.get_slot_info(host, local_rank)

    def _start_ahead(self, current_hosts):
        \"\"\"Start the ranks of new hosts. Return whether there are any: the others are told later.\"\"\"
        coordinator = self.get_coordinator_info()
        if not coordinator or not self.get_worker_client(coordinator):
            return False  # the job has hardly begun
        if current_hosts.count_available_slots() < self._min_num_proc:
            return False
        with self._ahead_changed:
            assignments, _ = self._get_host_assignments(current_hosts)
            new = [slot_info for host, slots in assignments.items() for slot_info in slots
                   if not self.has_rank_assignment(host, slot_info.local_rank)]
            for slot_info in new:
                key = (slot_info.hostname, slot_info.local_rank)
                if key not in self._ahead:
                    self._ahead[key] = False
                    slot_info.starts_ahead = True
                    self._start_worker_process(slot_info)
        return bool(new)

    def _tell_if_all_have_come(self):
        current_hosts = self._host_manager.current_hosts
        with self._ahead_changed:  # on a host that is gone again nobody is waited for
            missing = [key for key, has_come in self._ahead.items()
                       if not has_come and key[0] in current_hosts.available_hosts]
        if not missing:
            self._notify_workers_host_changes(current_hosts, HostUpdateResult.added)

    def _has_ended_ahead(self, slot_info):
        \"\"\"Return whether a rank that has ended never had a place.\"\"\"
        with self._ahead_changed:
            if self._ahead.pop((slot_info.hostname, slot_info.local_rank), None) is None:
                return False
        if not self.finished() and slot_info.hostname in self._host_manager.current_hosts.available_hosts:
            self._host_manager.blacklist(slot_info.hostname)
            self._tell_if_all_have_come()
        return True

""",
        _REASON,
    ),
    Edit(
        _DRIVER,
        """                    self._notify_workers_host_changes(self._host_manager.current_hosts, update_res)
                    self._wait_hosts_cond.notify_all()
""",
        """                    current_hosts = self._host_manager.current_hosts
                    if update_res != HostUpdateResult.added or not self._start_ahead(current_hosts):
                        self._notify_workers_host_changes(current_hosts, update_res)
                    self._wait_hosts_cond.notify_all()
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
                place = driver.await_place(host, int(local_rank)).to_response_string()
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
            from horovod.runner.http.http_client import read_data_from_kvstore
            place = read_data_from_kvstore(
                os.environ['HOROVOD_GLOO_RENDEZVOUS_ADDR'], os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT'],
                'place_of_a_rank_started_ahead',
                '{}:{}'.format(os.environ['HOROVOD_HOSTNAME'], os.environ['HOROVOD_LOCAL_RANK']))
            if place.startswith('-1'):
                raise RuntimeError('The job was over, or had given up this host, before this rank was ready.')
            names = ('RANK', 'SIZE', 'LOCAL_RANK', 'LOCAL_SIZE', 'CROSS_RANK', 'CROSS_SIZE')
            os.environ.update(('HOROVOD_' + name, number) for name, number in zip(names, place.split(',')))

        initialization_ok = True
""",
        _REASON,
    ),
)

"""Edits by which the ranks of an elastic job go on without one that is frozen or cut off.

When ranks have lost one, the launcher waits until each of the others has come back to it or has ended. A process that
is stopped, or whose host is cut off, does neither: a released Horovod waits for it as long as it takes, and all ranks
with it. A busy process does neither as well, until its next collective, and must not be given up.

A thread of each rank answers questions, whatever the rank is busy with. So the launcher asks those that are missing
while others wait. One that has not answered for ``HOROVOD_ELASTIC_SILENCE_SECONDS`` (20 unless set) is given up with
its host, as if it had ended. If it wakes up later, it finds its connections closed, asks the launcher for its place,
hears that it has none, and ends with that message. If the launcher still waits for a busy rank then, so does this one.
"""

from hvd_hetero.horovod_build.edits.edit import Edit

__all__ = ["SILENCE_EDITS"]

_DRIVER = "horovod/runner/elastic/driver.py"
_REGISTRATION = "horovod/runner/elastic/registration.py"
_WORKER = "horovod/runner/elastic/worker.py"
_REASON = "all ranks wait for one that is frozen or cut off, for as long as that lasts"

SILENCE_EDITS = (
    Edit(
        _WORKER,
        """    def notify_hosts_updated(self, timestamp, update_res):
        self._send(""",
        """    def answers(self, within_s=5.0):
        \"\"\"Return whether the rank's process answers a question in time.\"\"\"
        once = copy.copy(self)
        once._probe_timeout, once._attempts = within_s, 1
        return bool(once._probe(self._addresses))

    def notify_hosts_updated(self, timestamp, update_res):
        self._send(""",
        _REASON,
    ),
    Edit(_WORKER, "import os\nimport threading\n", "import copy\nimport os\nimport threading\n", _REASON),
    Edit(
        _DRIVER,
        """        create_worker_fn = self._create_worker_fn
        shutdown_event""",
        """        # What was asked under this name was another process
        self._worker_clients.pop((slot_info.hostname, slot_info.local_rank), None)
        create_worker_fn = self._create_worker_fn
        shutdown_event""",
        _REASON,
    ),
    Edit(
        _REGISTRATION,
        "import logging\nimport threading\n",
        "import logging\nimport os\nimport threading\nimport time\n",
        _REASON,
    ),
    Edit(
        _REGISTRATION,
        """FAILURE = 'FAILURE'
""",
        """FAILURE = 'FAILURE'

# Seconds for which a rank may be silent while others wait for it, and between two questions
_silence = os.environ.get('HOROVOD_ELASTIC_SILENCE_SECONDS') or '20'
try:
    SILENCE_SECONDS = float(_silence)
except ValueError:
    SILENCE_SECONDS = 0.0
if not SILENCE_SECONDS > 0:
    raise ValueError('HOROVOD_ELASTIC_SILENCE_SECONDS must be a number of seconds above 0, got {}; leave it out for 20'
                     .format(_silence))
QUESTION_SECONDS = 2.0
""",
        _REASON,
    ),
    Edit(
        _REGISTRATION,
        """        self._action_event = threading.Event()
""",
        """        self._watched_id = None
        self._action_event = threading.Event()
""",
        _REASON,
    ),
    Edit(
        _REGISTRATION,
        """            rendezvous_id = self._rendezvous_id

        rendezvous_id = self._wait(""",
        """            rendezvous_id = self._rendezvous_id
            if state == READY and self._watched_id != rendezvous_id:
                self._watched_id = rendezvous_id
                threading.Thread(target=self._watch_the_missing, args=(rendezvous_id,), daemon=True).start()

        while given_up:  # it counts once; when all others have come, it hears that it has no place, and not before
            if self._rendezvous_id != rendezvous_id or self._driver.finished():
                return rendezvous_id
            time.sleep(0.1)

        rendezvous_id = self._wait(""",
        _REASON,
    ),
    Edit(
        _REGISTRATION,
        """                                  'ignoring (current state is %s)', state, self._states[key])
""",
        """                                  'ignoring (current state is %s)', state, self._states[key])
                    given_up = state == READY and self._states[key] == FAILURE
""",
        _REASON,
    ),
    Edit(
        _REGISTRATION,
        """        with self._lock:
            if key in self._states:
                if state == FAILURE:
""",
        """        given_up = False
        with self._lock:
            if key in self._states:
                if state == FAILURE and self._states[key] == FAILURE:
                    given_up = True
                elif state == FAILURE:
""",
        _REASON,
    ),
    Edit(
        _REGISTRATION,
        """    def _wait(self, key, state, rendezvous_id):
""",
        """    def _watch_the_missing(self, rendezvous_id):
        \"\"\"Give up ranks that do not answer, while others wait for them to come back or to end.\"\"\"
        silent_since = {}
        while True:
            time.sleep(QUESTION_SECONDS)
            with self._lock:
                if self._rendezvous_id != rendezvous_id or self._driver.finished():
                    return
                missing = [(slot_info.hostname, slot_info.local_rank)
                           for slots in self._driver.host_assignments.values() for slot_info in slots
                           if (slot_info.hostname, slot_info.local_rank) not in self._states]
            silent = self._driver.those_without_an_answer(missing)
            silent_since = {key: silent_since.get(key, time.monotonic()) for key in silent}
            for host, slot in [key for key, since in silent_since.items()
                               if time.monotonic() - since >= SILENCE_SECONDS]:
                logging.error('{}[{}] has not answered for {:g} s, while others wait for it; it is given up. A longer '
                              'HOROVOD_ELASTIC_SILENCE_SECONDS gives it more time.'.format(host, slot, SILENCE_SECONDS))
                del silent_since[(host, slot)]
                threading.Thread(target=self.record_failure, args=(host, slot), daemon=True).start()

    def _wait(self, key, state, rendezvous_id):
""",
        _REASON,
    ),
    Edit(
        _DRIVER,
        """    def record_ready(self, host, slot):
""",
        """    def those_without_an_answer(self, keys):
        \"\"\"Return those of these ranks that do not answer; not those that have not told their address yet.\"\"\"
        clients = {key: self._worker_clients[key] for key in keys if key in self._worker_clients}
        silent = []
        threads = [threading.Thread(target=lambda key=key, client=client: client.answers() or silent.append(key))
                   for key, client in clients.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return silent

    def record_ready(self, host, slot):
""",
        _REASON,
    ),
)

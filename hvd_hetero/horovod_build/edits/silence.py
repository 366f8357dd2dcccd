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
_NETWORK = "horovod/runner/common/util/network.py"
_REASON = "all ranks wait for one that is frozen or cut off, for as long as that lasts"
_TOLD = "a thread of the launcher that tells a frozen rank of new hosts waits for its answer for ever"
_ONCE = "a rank that counts twice lets the others go on too soon; a barrier that is reset may wait for its own lock"

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
    Edit(
        _WORKER,
        """class WorkerNotificationClient(network.BasicClient):
""",
        """class WorkerNotificationClient(network.BasicClient):
    _answer_timeout = 5.0  # a rank may be frozen; what it was told lies ready for when it wakes up

""",
        _TOLD,
    ),
    Edit(
        _NETWORK,
        """class BasicClient(object):
""",
        """class BasicClient(object):
    _answer_timeout = None  # seconds for which an answer is waited for; None: as long as it takes

""",
        _TOLD,
    ),
    Edit(
        _NETWORK,
        """            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
""",
        """            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sock.settimeout(self._answer_timeout)
            try:
""",
        _TOLD,
    ),
    Edit(_WORKER, "import os\nimport threading\n", "import copy\nimport os\nimport threading\n", _REASON),
    Edit(
        _DRIVER,
        """        create_worker_fn = self._create_worker_fn
        shutdown_event""",
        """        # What was asked under this name was another process
        self._worker_clients.pop((slot_info.hostname, slot_info.local_rank), None)
        self._newest[(slot_info.hostname, slot_info.local_rank)] = slot_info
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
        """        with self._lock:
            if key in self._states:
                if state == FAILURE:
""",
        """        with self._lock:
            if not self._driver.has_rank_assignment(host, slot):
                return self._rendezvous_id  # nobody waits for it, and it must not count as one that is waited for
            counts_already = key in self._states
            if counts_already:
                if state == FAILURE:
""",
        _ONCE,
    ),
    Edit(
        _REGISTRATION,
        "on the barrier. This requires us to reset the barrier,\n",
        "until it is over. It waits outside the barrier,\n",
        _ONCE,
    ),
    Edit(
        _REGISTRATION,
        """'key exists, reset barrier: {}[{}] = {} -> {}'
                                 .format(host, slot, self._states[key], state))
                    self._barrier.reset()
""",
        """'key exists: {}[{}] = {} -> {}'
                                 .format(host, slot, self._states[key], state))
""",
        _ONCE,
    ),
    Edit(
        _REGISTRATION,
        """            rendezvous_id = self._rendezvous_id

        rendezvous_id = self._wait(""",
        """            rendezvous_id = self._rendezvous_id
            if state != SUCCESS and self._watched_id != rendezvous_id:
                self._watched_id = rendezvous_id
                threading.Thread(target=self._watch_the_missing, args=(rendezvous_id,), daemon=True).start()

        while counts_already:  # what it hears next is of the next rendezvous: that it has no place, as a rule
            if self._rendezvous_id != rendezvous_id or self._driver.finished() or self._barrier.broken:
                return rendezvous_id
            time.sleep(0.1)

        rendezvous_id = self._wait(""",
        _REASON,
    ),
    Edit(
        _REGISTRATION,
        "        failures = self.get(FAILURE)\n",
        "        failures = list(self.get(FAILURE))  # one more may be told meanwhile\n",
        _ONCE,
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
            asked_at = time.monotonic()
            silent = self._driver.those_without_an_answer(missing)
            silent_since = {key: silent_since.get(key, asked_at) for key in silent}
            with self._lock:  # some may have come while they were asked, and the others have gone on
                if self._rendezvous_id != rendezvous_id:
                    return
                given_up = [key for key, since in silent_since.items()
                            if key not in self._states and time.monotonic() - since >= SILENCE_SECONDS]
                for key in given_up:
                    self._states[key] = FAILURE
                    self._workers[FAILURE].add(key)
            for host, slot in given_up:
                logging.error('{}[{}] has not answered for {:g} s, while others wait for it; it is given up. A longer '
                              'HOROVOD_ELASTIC_SILENCE_SECONDS gives it more time.'.format(host, slot, SILENCE_SECONDS))
                threading.Thread(target=self._wait, args=((host, slot), FAILURE, rendezvous_id), daemon=True).start()

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
        clients = [(key, self._worker_clients.get(key)) for key in keys]
        silent = []
        threads = [threading.Thread(target=lambda key=key, client=client: client.answers() or silent.append(key))
                   for key, client in clients if client]
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

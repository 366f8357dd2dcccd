"""Edits by which ranks meet again where another one is lost while they meet.

From the moment at which ranks have their places until all their connections are up, a rank that is lost makes
``hvd.init()`` fail on the others. Horovod's thread lets the exception go, which ends their processes, and the job with
them. It closes this rank's connections now, so that all others notice, and says that it has failed. In an elastic job
``hvd.init()`` then asks the launcher for a place once more, as after any loss, and there is one for those who are left.

A rank that is lost before it has come has no connections. The launcher sees it end, and refuses what the others ask for
(status 410), so that they fail within two seconds; else they wait for it for ``HOROVOD_GLOO_TIMEOUT_SECONDS``.

If too few are left, the launcher waits for hosts. It says how many slots are missing, and what ends the job.
"""

from hvd_hetero.horovod_build.edits.edit import Edit

__all__ = ["FAILED_START_EDITS", "MEETING_EDITS"]

_OPERATIONS = "horovod/common/operations.cc"
_DRIVER = "horovod/runner/elastic/driver.py"
_REASON = "a rank that is lost while the others meet ends their processes"
_LOST = "ranks wait for one that has ended before it came, until their time is over"
_SILENT = "the launcher waits for hosts without a word"
_BLAMED = "a job that has waited for hosts in vain blames the rank that was lost, and says nothing of hosts"

FAILED_START_EDITS = (
    Edit(
        _OPERATIONS,
        """  {
    global_gloo_context.Initialize(ParseGlooIface());
  }
  if (state.control_operation == LibType::GLOO) {
    // Initializes global controller
    state.process_set_table.Initialize(global_gloo_context);
  }
""",
        """  try {
    global_gloo_context.Initialize(ParseGlooIface());
    if (state.control_operation == LibType::GLOO) {
      // Initializes global controller
      state.process_set_table.Initialize(global_gloo_context);
    }
  } catch (const std::exception& ex) {
    // As a rule another rank was lost meanwhile. Without connections to this one, all others notice
    LOG(ERROR) << "Horovod could not be initialized: " << ex.what();
    if (state.control_operation == LibType::GLOO) {
      state.process_set_table.Get(0).Finalize(SHUT_DOWN_ERROR);
    }
    global_gloo_context.Finalize();
    LetGoOfTensors();
    state.initialization_failed = true;
    return;
  }
""",
        _REASON,
    ),
    Edit(
        _OPERATIONS,
        """    // Reset initialization flag
    horovod_global.initialization_done = false;
""",
        """    // Reset initialization flags
    horovod_global.initialization_done = false;
    horovod_global.initialization_failed = false;
""",
        _REASON,
    ),
)

MEETING_EDITS = (
    Edit(
        "horovod/common/basics.py",
        """            initialization_ok = self.MPI_LIB_CTYPES.horovod_init(
                (ctypes.c_int * comm_size)(*comm), ctypes.c_int(comm_size),
                *process_set_args_via_ranks)
""",
        """            for tries_left in range(2 if os.environ.get('HOROVOD_ELASTIC') == '1' else 0, -1, -1):
                initialization_ok = self.MPI_LIB_CTYPES.horovod_init(
                    (ctypes.c_int * comm_size)(*comm), ctypes.c_int(comm_size),
                    *process_set_args_via_ranks)
                if initialization_ok or not tries_left:
                    break
                self.shutdown()  # and then meet again, without the rank that was lost
""",
        _REASON,
    ),
    Edit(
        "horovod/runner/elastic/rendezvous.py",
        """    class ElasticRendezvousHandler(RendezvousHandler):
""",
        """    class ElasticRendezvousHandler(RendezvousHandler):
        def do_GET(self):
            # A rank has ended or come back since places were given. Neither 200 nor 404: who asks fails and comes back
            if '/all_of_' in self.path and driver._worker_registry.get_recorded_slots():
                self.send_status_code(410)
            else:
                super().do_GET()

""",
        _LOST,
    ),
    Edit(
        _DRIVER,
        """        try:
            while True:
                current_hosts = self._host_manager.current_hosts
""",
        """        tell_at = time.monotonic() + 3.0  # a discovery script may take some time
        try:
            while True:
                current_hosts = self._host_manager.current_hosts
""",
        _SILENT,
    ),
    Edit(
        _DRIVER,
        """                self._wait_hosts_cond.wait(tmout.remaining())
""",
        """                if time.monotonic() >= tell_at:
                    tell_at = float('inf')
                    logging.warning(
                        'This job needs {} slots on {} host(s) or more and has {} on {}. It goes on when the discovery '
                        'script names more, where a host whose rank was lost does not count. It ends after {} s '
                        '(--elastic-timeout).'.format(min_num_proc, min_hosts, avail_slots, avail_hosts, self._timeout))
                self._wait_hosts_cond.wait(max(0.0, min(tmout.remaining(), tell_at - time.monotonic())))
""",
        _SILENT,
    ),
    Edit(_DRIVER, "waiting for {{activity}}.", "waiting for {activity}.", "the message says {activity}"),
    Edit(
        "horovod/runner/elastic/registration.py",
        """        except Exception:
            logging.exception('failed to activate new hosts -> stop running')
            self._driver.stop()
""",
        """        except Exception as error:
            logging.exception('failed to activate new hosts -> stop running')
            self._driver.stop(error_message='The job has lost ranks and could not go on. {}'.format(error))
""",
        _BLAMED,
    ),
)

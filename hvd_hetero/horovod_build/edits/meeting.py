"""Edits by which ranks meet again where another one is lost while they meet.

From the moment at which ranks have their places until all their connections are up, a rank that is lost makes
``hvd.init()`` fail on the others. Horovod's thread lets the exception go, which ends their processes, and the job with
them. It closes this rank's connections now, so that all others notice, and says that it has failed. In an elastic job
``hvd.init()`` then asks the launcher for a place once more, as after any loss, and there is one for those who are left.
"""

from hvd_hetero.horovod_build.edits.edit import Edit

__all__ = ["FAILED_START_EDITS", "MEETING_EDITS"]

_OPERATIONS = "horovod/common/operations.cc"
_REASON = "a rank that is lost while the others meet ends their processes"

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
)

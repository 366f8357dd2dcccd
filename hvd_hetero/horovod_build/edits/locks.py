"""Edits by which a rank that gives up does not stop for ever.

When a collective fails, Horovod's thread lets go of all tensors that still wait to be sent, and holds the locks of
their queue and of its process sets meanwhile. To let go of a tensor that Python knows, PyTorch (2.13 at least) takes
Python's lock. A thread that sends the next bucket of gradients holds that one, and waits for Horovod's: both wait for
ever, and with them every rank. So the tensors are put aside, and the same thread lets go of them before it ends, when
it holds no lock of Horovod's, and its connections are closed: other ranks do not wait for Python here.

And a thread that was about to send, and comes to the queue once that is done, is told so. A released Horovod takes its
tensor: it is never sent, its sender waits for ever, and after ``hvd.init()`` it is offered to the ranks of then.
"""

from hvd_hetero.horovod_build.edits.edit import Edit

__all__ = ["LOCK_EDITS"]

_QUEUE, _HEADER = "horovod/common/tensor_queue.cc", "horovod/common/tensor_queue.h"
_SETS = "horovod/common/process_set.cc"
_REASON = "a thread that holds Python's lock may wait for one that is held here, which waits for Python's"
_NOBODY = "nobody sends what comes to a queue after its end, and its sender waits for ever"

LOCK_EDITS = (
    Edit(
        _QUEUE,
        """    e.second.FinishWithCallback(status);
  }
  tensor_table_.clear();
""",
        """    e.second.FinishWithCallback(status);
  }
  ended_ = true;
  if (!tensor_table_.empty()) {
    std::lock_guard<std::mutex> guard_put_aside(put_aside_mutex);
    put_aside.emplace_back(std::move(tensor_table_));
  }
  tensor_table_.clear();
""",
        _REASON,
    ),
    Edit(
        _QUEUE,
        """// Execute callback for each tensor and clear tensor queue
""",
        """namespace {
std::mutex put_aside_mutex;
// Never destroyed: when a process exits, Python's lock is gone before
auto& put_aside = *new std::vector<std::unordered_map<std::string, TensorTableEntry>>;
} // namespace

void TensorQueue::Begin() {
  std::lock_guard<std::mutex> guard(mutex_);
  ended_ = false;
}

void LetGoOfTensors() {
  std::vector<std::unordered_map<std::string, TensorTableEntry>> tables;
  {
    std::lock_guard<std::mutex> guard(put_aside_mutex);
    tables.swap(put_aside);
  }
}

// Execute callback for each tensor, put them aside, and clear tensor queue
""",
        _REASON,
    ),
    Edit(_QUEUE, "#include <assert.h>\n", "#include <assert.h>\n#include <utility>\n#include <vector>\n", _REASON),
    Edit(
        _HEADER,
        """} // namespace common
} // namespace horovod
""",
        """// Lets go of the tensors that finalized queues have put aside. Do not hold a lock meanwhile.
void LetGoOfTensors();

} // namespace common
} // namespace horovod
""",
        _REASON,
    ),
    *(
        Edit(
            _QUEUE,
            f"""{argument}) {{
  std::lock_guard<std::mutex> guard(mutex_);
""",
            f"""{argument}) {{
  std::lock_guard<std::mutex> guard(mutex_);
  if (ended_) {{
    return SHUT_DOWN_ERROR;
  }}
""",
            _NOBODY,
        )
        for argument in ("TensorTableEntry& e, Request& message", "std::vector<Request>& messages")
    ),
    Edit(
        _HEADER,
        """  void FinalizeTensorQueue(const Status& status);
""",
        """  // Takes tensors, from now on until it is finalized.
  void Begin();

  void FinalizeTensorQueue(const Status& status);
""",
        _NOBODY,
    ),
    Edit(
        _HEADER,
        """  mutable std::mutex mutex_;
""",
        """  mutable std::mutex mutex_;

  bool ended_ = false;
""",
        _NOBODY,
    ),
    *(
        Edit(
            _SETS,
            f"""  initialization_done = true;
  return true;
}}
#endif // HAVE_{library}
""",
            f"""  tensor_queue.Begin();
  initialization_done = true;
  return true;
}}
#endif // HAVE_{library}
""",
            _NOBODY,
        )
        for library in ("MPI", "GLOO")
    ),
    Edit(
        "horovod/common/operations.cc",
        """#endif // HAVE_GLOO
  }

  bool should_shutdown = false;
""",
        """#endif // HAVE_GLOO
    LetGoOfTensors(); // of sets that were removed
  }

  bool should_shutdown = false;
""",
        _REASON,
    ),
    Edit(
        "horovod/common/operations.cc",
        """                                              SHUT_DOWN_ERROR);
  }
#endif // HAVE_GLOO

#if HAVE_GPU
  gpu_context.Finalize();
""",
        """                                              SHUT_DOWN_ERROR);
    // The set of all ranks has these connections, too. Others wait until they are closed, so nothing waits before
    global_gloo_context.Finalize();
  }
#endif // HAVE_GLOO
  LetGoOfTensors();

#if HAVE_GPU
  gpu_context.Finalize();
""",
        _REASON,
    ),
)

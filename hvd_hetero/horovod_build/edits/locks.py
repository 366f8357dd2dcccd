"""Edits by which a rank that gives up does not stop for ever.

When a collective fails, Horovod's thread lets go of all tensors that still wait to be sent, and holds the lock of its
process sets meanwhile. To let go of a tensor that Python knows, PyTorch (2.13 at least) takes Python's lock. A thread
that sends the next bucket of gradients holds that one, and waits for the lock of the process sets: both wait for ever,
and with them every rank. So another thread lets go of the tensors, which holds no lock of Horovod's.
"""

from hvd_hetero.horovod_build.edits.edit import Edit

__all__ = ["LOCK_EDITS"]

LOCK_EDITS = (
    Edit(
        "horovod/common/tensor_queue.cc",
        """    e.second.FinishWithCallback(status);
  }
  tensor_table_.clear();
""",
        """    e.second.FinishWithCallback(status);
  }
  std::thread([entries = std::move(tensor_table_)]() mutable { entries.clear(); }).detach();
  tensor_table_.clear();
""",
        "a thread that holds Python's lock may wait for one that is held here, which waits for Python's",
    ),
    Edit(
        "horovod/common/tensor_queue.cc",
        "#include <assert.h>\n",
        "#include <assert.h>\n#include <thread>\n#include <utility>\n",
        "for the thread",
    ),
)

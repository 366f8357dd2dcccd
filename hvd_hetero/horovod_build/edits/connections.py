"""Edits of what ranks' connections do: one that waits keeps no processor busy, and one that is given up is closed.

A thread of Gloo waits for messages with epoll, and skips those of a connection that another thread is writing to. Epoll
then reports them again at once. While the writer waits for a processor, as it does where ranks share cores, this thread
asks 115,000 times a second, and takes from the writer the processor that it waits for.

Small sums back to back, before and after, in the middle of three runs of one day (2 cores, Horovod's default cycle): on
2 ranks the median stays and the mean is half of before, on 4 ranks the median is 0.34.

Where a rank dies, those that exchange messages with it see their connections break, and give up. The others wait for
those, whose connections stay open: Horovod closes the ones of the job as a whole, and forgets those of process sets,
over which all collectives go. So they wait for ``HOROVOD_GLOO_TIMEOUT_SECONDS`` (30) in vain. And a process that was
forked from a rank, as a loader's worker is, holds its connections too, so that closing them tells nobody.
"""

from hvd_hetero.horovod_build.edits.edit import Edit

__all__ = ["CONNECTION_EDITS"]

CONNECTION_EDITS = (
    Edit(
        "third_party/gloo/gloo/transport/tcp/pair.cc",
        """  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);
  if (!lock) {
    return;
  }
""",
        # A writer that has a processor is done within some microseconds, sooner than a pause is over.
        """  static thread_local int refusals = 0;
  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);
  if (!lock) {
    if (++refusals > 64) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return;
  }
  refusals = 0;
""",
        "the thread that waits for messages spins while another one writes",
    ),
    Edit(
        "third_party/gloo/gloo/transport/tcp/pair.cc",
        "#include <sstream>\n",
        "#include <chrono>\n#include <sstream>\n#include <thread>\n",
        "for the pause",
    ),
    Edit(
        "horovod/common/gloo/gloo_context.cc",
        """void GlooContext::Finalize() {
  if (!enabled_) {
    return;
  }
""",
        "void GlooContext::Finalize() {\n",  # enabled is the job's as a whole alone
        "connections of process sets are never closed, and the other ranks wait for what will not come",
    ),
    Edit(
        "third_party/gloo/gloo/transport/tcp/pair.cc",
        """          device_->unregisterDescriptor(fd_, this);
        }
        ::close(fd_);
""",
        """          device_->unregisterDescriptor(fd_, this);
        }
        ::shutdown(fd_, SHUT_RDWR);
        ::close(fd_);
""",
        "a child of the process holds the connection open",
    ),
)

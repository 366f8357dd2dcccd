"""Edits by which a rank that waits need not keep a processor busy.

A thread of Gloo waits for messages with epoll, and skips those of a connection that another thread is writing to. Epoll
then reports them again at once. While the writer waits for a processor, as it does where ranks share cores, this thread
asks 115,000 times a second, and takes from the writer the processor that it waits for.

Small sums back to back, before and after, in the middle of three runs of one day (2 cores, Horovod's default cycle): on
2 ranks the median stays and the mean is half of before, on 4 ranks the median is 0.34.

And a thread of PyTorch that waits for a collective yields the processor until it is done. Where ranks share cores it
gets its part of them all the same, which those it waits for would need. With ``HOROVOD_WAIT_SLEEP_US`` it sleeps so
many microseconds at a time. Without it waits are those of a released Horovod, which benchmarks compare with.
"""

from hvd_hetero.horovod_build.edits.edit import Edit

__all__ = ["WAITING_EDITS"]

WAITING_EDITS = (
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
        "horovod/torch/mpi_ops_v2.cc",
        """void WaitAndClear(int handle) {
  while (true) {
    if (handle_manager.PollHandle(handle)) break;
    {
      py::gil_scoped_release release_python_gil;
      std::this_thread::yield();
    }
  }
""",
        """void WaitAndClear(int handle) {
  static const char* told = std::getenv("HOROVOD_WAIT_SLEEP_US");
  static const int sleep_us = told == nullptr ? 0 : std::atoi(told);
  while (true) {
    if (handle_manager.PollHandle(handle)) break;
    {
      py::gil_scoped_release release_python_gil;
      if (sleep_us > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(sleep_us));
      } else {
        std::this_thread::yield();
      }
    }
  }
""",
        "a thread that waits takes processor time from the ranks that it waits for",
    ),
    Edit(
        "horovod/torch/mpi_ops_v2.cc",
        "#include <chrono>\n",
        "#include <chrono>\n#include <cstdlib>\n",
        "for the variable",
    ),
)

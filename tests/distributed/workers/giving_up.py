"""Rank 0 waits for the other one, and then gives up, while a tensor waits to be sent and the next one is about to be.

It sends the next one just as Horovod's thread lets go of that one. A kill meets this moment by chance. Here the
tensor's end brings it about: what Python calls then, in Horovod's thread, waits until the main thread has sent the next
tensor. If Horovod's thread holds a lock that sending needs, both wait.
"""

from __future__ import annotations

import threading
import time

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from hvd_hetero.testing import report

LATE_S = 1.0  # of rank 1
PATIENCE_S = 60.0  # of each thread with the other: only a failure takes so long


class AtItsEnd:
    """Calls a function when nothing refers to it any more."""

    def __init__(self, call):
        self.call = call

    def __del__(self):
        self.call()


def send(name, tensor):
    return mpi_ops.allreduce_async_(tensor, op=hvd.Sum, name=name)


def main():
    hvd.init()
    lets_go, has_sent = threading.Event(), threading.Event()
    found = {"ended by": None, "waited for the sender": None, "sending": None}
    if hvd.rank() == 1:
        time.sleep(LATE_S)
    awake_s = time.thread_time()
    hvd.allreduce(torch.ones(1), name="one comes late")
    awake_s = time.thread_time() - awake_s

    def ends():
        found["ended by"] = "the main thread" if threading.current_thread() is threading.main_thread() else "another"
        lets_go.set()
        found["waited for the sender"] = has_sent.wait(PATIENCE_S)  # without Python's lock, and then takes it again

    if hvd.rank() == 0:
        tensor = torch.ones(1)
        tensor.end = AtItsEnd(ends)
        mpi_ops._handle_map.pop(send("sent by this rank only", tensor))
        del tensor  # from here on only Horovod's queue holds it
    hvd.allreduce(torch.ones(1), name="sent by both, and later")
    if hvd.rank() == 0:
        lets_go.wait(PATIENCE_S)
        try:
            send("the next one", torch.ones(1))
        except HorovodInternalError:
            found["sending"] = "is told that Horovod has given up"
        has_sent.set()
    hvd.shutdown()  # returns when Horovod's thread has ended
    report({"awake_s": awake_s, "giving up": found})


if __name__ == "__main__":
    main()

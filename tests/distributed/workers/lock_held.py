"""A rank's connections break while two others hold Python's lock and have tensors to send; the fourth waits."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import horovod.torch as hvd
import torch

from hvd_hetero.testing import report

LIMIT_S = 20


class Poll(ctypes.Structure):
    """The kernel's struct pollfd."""

    _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]


def cut_all_connections() -> None:
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # no socket, or not connected
            connection = socket.socket(fileno=os.dup(int(number)))
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)


def main(folder: Path) -> None:
    hvd.init()
    rank = hvd.rank()
    told = os.open(folder / str(rank), os.O_RDWR)  # a FIFO, by which rank 1 says that it need not wait
    hvd.allreduce(torch.ones(1), name="first")
    if rank == 3:
        time.sleep(1.0)  # the others have tensors that wait then
        cut_all_connections()
        report(None)
        select.select([told], [], [], LIMIT_S)
        os._exit(0)
    handle = hvd.allreduce_async(torch.ones(1), name="of all")
    found = None
    if rank == 1:
        try:
            hvd.synchronize(handle)
        except hvd.HorovodInternalError as error:
            found = type(error).__name__
        for other in (0, 2, 3):
            os.write(os.open(folder / str(other), os.O_RDWR), b"x")
    else:
        found = ctypes.PyDLL(None).poll(ctypes.byref(Poll(told, select.POLLIN, 0)), 1, LIMIT_S * 1000)
    report(found)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Stands in, towards horovodrun, for a rank that is forked from a process with its imports done (`support.preload`).

`hvd_hetero.testing.rank` runs this file in each rank's first process, so it needs nothing but the standard library.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import sys


def foreign_namespaces(server: socket.socket) -> dict[str, str]:
    """Return the namespaces, by kind, of this process that the process at the other end does not share."""
    pid = struct.unpack("3i", server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    found = {}
    for kind in ("net", "uts", "mnt"):
        mine = f"/proc/{os.getpid()}/ns/{kind}"
        with contextlib.suppress(OSError):  # not allowed to look: then no one has moved us either
            if os.readlink(mine) != os.readlink(f"/proc/{pid}/ns/{kind}"):
                found[kind] = mine
    return found


def stand_in(address: str, arguments: list[str]) -> None:
    """Have the rank forked from the process that listens there, pass signals on to it, and end as it ends."""
    request = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as server:

        def pass_on(number: int, _: object) -> None:
            with contextlib.suppress(OSError):  # the rank has just ended
                server.sendall(bytes([number]))

        server.connect(address)
        request["namespaces"] = foreign_namespaces(server)
        server.sendall(json.dumps(request).encode() + b"\n")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pass_on)
        answer = server.recv(4, socket.MSG_WAITALL)
    if len(answer) < 4:
        sys.exit("the process that has preloaded this rank's modules is gone")
    code = int.from_bytes(answer, "big", signed=True)
    if code < 0:  # a signal's
        with contextlib.suppress(OSError):  # SIGKILL's action cannot be set, nor need it be
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)

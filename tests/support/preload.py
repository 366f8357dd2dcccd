"""Ranks that begin with their imports done: forked from one process that has imported what they need.

A rank imports PyTorch in two seconds and TensorFlow in five, of a processor that all ranks of a test share. Here one
process imports, runs nothing, and waits. What horovodrun starts as a rank (`hvd_hetero.testing.rank`) asks it for a
fork, and stands in for that fork towards horovodrun (`support.stand_in`). Neither framework has threads before its
first operation, so a fork is as good as a process of its own.

The request is one line of JSON: arguments, environment, working directory, namespaces (a rank on one of several
hosts of `support.namespaces` is forked here, and moves there). From then on a byte to this process is the
number of a signal for the rank, four bytes from it are the rank's exit code, and a closed connection ends the rank.

A rank ends after its threads and exit handlers, as a process of `multiprocessing` does. An interpreter that ends in
order takes its modules down one by one: with PyTorch a third of a second of a processor, with TensorFlow twice that.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from hvd_hetero.testing import rank
from support import stand_in
from support.switch import KINDS

_BEGIN = f"import sys; sys.path[0] = {str(Path(__file__).parent.parent)!r}; from {__name__} import main; main()"
_REQUEST_S = 5.0  # arbitrary: a request is ready before its rank connects


class Preloaded:
    """Modules, imported once for all ranks that are launched with ``env`` of `variables`; close it at the end.

    ``env`` has the variables that are read while modules are imported, such as ``OMP_NUM_THREADS`` (1 unless given
    here) and ``TF_USE_LEGACY_KERAS``: a rank is given the environment of its own launch afterwards, too late for them.
    NumPy's global generator is seeded again in each rank. The modules must not start threads when they are imported.
    """

    def __init__(self, *modules: str, env: Mapping[str, str] | None = None, python: str = sys.executable) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hvd-hetero-preload-")
        self.address = os.path.join(self._directory.name, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(64)  # ranks may ask at once, and wait until the imports are done
            self._process = subprocess.Popen(
                [python, "-c", _BEGIN, str(listener.fileno()), *modules],
                stdin=subprocess.PIPE,  # its end is how the process knows of ours
                env=rank.environment(env), pass_fds=[listener.fileno()], start_new_session=True,
            )  # fmt: skip

    @property
    def variables(self) -> dict[str, str]:
        """The variables by which a launch finds it."""
        return {rank.PRELOADED: os.pathsep.join([stand_in.__file__, self.address])}

    def close(self) -> None:
        """End the process, and with it every rank that was forked from it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        with suppress(ProcessLookupError):  # workers of a loader may outlive a rank that was killed, and wait for good
            os.killpg(self._process.pid, signal.SIGKILL)
        self._directory.cleanup()

    def __enter__(self) -> Preloaded:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def serve(listener: socket.socket) -> list[str]:
    """Fork a rank for everybody who asks. Returns in each fork, with the rank's arguments, and else never."""
    ranks: dict[int, socket.socket] = {}
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([sys.stdin, ended, listener, *ranks.values()], [], [])
        if sys.stdin in ready:
            sys.exit()
        if ended in ready:
            os.read(ended, 512)
            _tell_of_ended(ranks)
        for pid, client in ranks.items():
            if client in ready:
                with suppress(ConnectionError):
                    os.kill(pid, (client.recv(1) or bytes([signal.SIGKILL]))[0])
        if listener in ready:
            client, _ = listener.accept()
            client.settimeout(_REQUEST_S)
            try:
                with client.makefile() as file:
                    request = json.loads(file.readline())
                pid = os.fork()
            except (OSError, ValueError):  # whoever asked is told by the end of its connection, and the others live on
                client.close()
                continue
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (listener, client, *ranks.values()):
                    other.close()
                os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
                _enter(request["namespaces"])
                os.chdir(request["directory"])
                os.environ.clear()
                os.environ.update(request["environment"])
                if "numpy.random" in sys.modules:  # or all ranks would draw alike
                    sys.modules["numpy.random"].seed()
                sys.path[1:1] = [entry for entry in os.environ["PYTHONPATH"].split(os.pathsep) if entry not in sys.path]
                return list(request["arguments"])
            ranks[pid] = client


def _enter(namespaces: Mapping[str, str]) -> None:
    """Move this process, which must have one thread, to the namespaces at these paths."""
    for kind, path in namespaces.items():
        descriptor = os.open(path, os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, KINDS[kind]) != 0:
            raise OSError(ctypes.get_errno(), f"{path} cannot be entered: {os.strerror(ctypes.get_errno())}")
        os.close(descriptor)


def _tell_of_ended(ranks: dict[int, socket.socket]) -> None:
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with ranks.pop(pid) as client, suppress(OSError):
            client.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))


def main() -> None:
    """Import what the arguments name after the listener's descriptor; then serve, and be the rank in each fork."""
    codes = [1]
    atexit.register(_leave, codes)  # registered first, it is called last
    gc.disable()  # nothing dies while modules are imported, and looking for it takes a tenth of the time
    for module in sys.argv[2:]:
        importlib.import_module(module)
    # Collections in a rank leave out what was imported: they would free none of it, and copy the pages it lies in.
    gc.enable()
    gc.collect()
    gc.freeze()
    try:
        rank.run(serve(socket.socket(fileno=int(sys.argv[1]))))
        codes.append(0)
    except SystemExit as end:
        codes.append(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    except KeyboardInterrupt:
        codes.append(128 + signal.SIGINT)
        raise


def _leave(codes: list[int]) -> None:
    """End this process with the last of the codes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(codes[-1] & 0xFF)

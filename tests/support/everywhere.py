"""Run one command on several hosts, as a cluster's manager does: on each of them, with its number in a variable.

Run as ``python everywhere.py PREFIXES VARIABLE command...``, by its path and with the standard library only. PREFIXES
is a JSON list with, for each host, the command that runs the rest there. All are waited for, so that each host can say
what became of it; the exit code is the first one that is not 0.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

_POLL_S = 0.05
ENDS = (signal.SIGTERM, signal.SIGINT)


def main(prefixes: list[list[str]], variable: str, command: list[str]) -> int:
    """Return the exit code of the first host that failed, or 0."""
    running: list[subprocess.Popen[bytes]] = []
    come: list[int] = []

    def pass_on(number: int, _: object) -> None:
        come.append(number)
        for process in running:
            process.send_signal(number)

    for number in ENDS:
        signal.signal(number, pass_on)
    for host, prefix in enumerate(prefixes):
        if come:
            break
        process = subprocess.Popen([*prefix, *command], env={**os.environ, variable: str(host)})
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)  # each signal reaches it once, from here or from pass_on
        earlier = list(come)
        running.append(process)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
        for missed in earlier:
            process.send_signal(missed)
    code = 0 if len(running) == len(prefixes) else 128 + come[0]
    while running:
        for process in list(running):
            if (ended := process.poll()) is not None:
                running.remove(process)
                code = code or ended
        time.sleep(_POLL_S)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:]))

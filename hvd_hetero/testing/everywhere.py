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


def main(prefixes: list[list[str]], variable: str, command: list[str]) -> int:
    """Return the exit code of the first host that failed, or 0."""
    running: list[subprocess.Popen[bytes]] = []
    come: list[int] = []

    def pass_on(number: int, _: object) -> None:
        come.append(number)
        for process in running:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    for host, prefix in enumerate(prefixes):
        process = subprocess.Popen([*prefix, *command], env={**os.environ, variable: str(host)})
        running.append(process)
        for earlier in come:  # before this one was among them
            process.send_signal(earlier)
    code = 0
    while running:
        for process in list(running):
            if (ended := process.poll()) is not None:
                running.remove(process)
                code = code or ended
        time.sleep(_POLL_S)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:]))

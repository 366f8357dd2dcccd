"""Whether processes have ended, whose children they may be."""

import time

import psutil

_PATIENT_S = 10.0


def ended(*pids):
    """Whether all end within some seconds: a process that was killed runs on for a moment."""
    until_s = time.monotonic() + _PATIENT_S
    while any(map(_runs, pids)):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # to reap it is its parent's business, or init's
    except psutil.NoSuchProcess:
        return False

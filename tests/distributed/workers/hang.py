"""A job of two ranks that ends as its first argument says: well, hang, raise or kill."""

import os
import signal
import subprocess
import sys
import time

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_hetero.testing import CpuQuota, quota_available, report


def wait_inside_horovod():
    try:
        hvd.allreduce(torch.ones(1), name="posted by rank 0 only")
    except HorovodInternalError:
        time.sleep(30)  # the other rank is to be the first that ends; horovodrun then ends this one
        raise


def never_post():
    print("hanging", flush=True)
    while True:
        time.sleep(1)


def hard_to_end():
    """Neither politeness nor the tree of children finds all of this rank."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)


def fail_here():
    raise KeyError("the cause of it all")


def main(how):
    hvd.init()
    total = hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), op=hvd.Sum, name="posted by both")
    report({"rank": hvd.rank(), "total": total})
    if how == "well":
        print(f"rank {hvd.rank()} is done")
        print(f"rank {hvd.rank()} warns", file=sys.stderr)
        hvd.shutdown()
    elif hvd.rank() == 0:
        wait_inside_horovod()
    elif how == "hang":
        hard_to_end()
        never_post()
    elif how == "raise":
        fail_here()
    elif how == "kill":
        if quota_available():
            print(CpuQuota(0.5).start().group, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])

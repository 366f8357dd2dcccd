"""Worker processes of a loader: what they inherit is gone when their rank is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

pytest.importorskip("torch")

RANK = """
import os, socket, sys, time
import torch
import torch.utils.data._utils.worker as pytorchs
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from hvd_hetero.testing import run_on_threads
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance

pytorchs.MP_STATUS_CHECK_INTERVAL = 1000.0  # the workers do not look by themselves

class Numbers(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return index

class Stream(IterableDataset):
    def __iter__(self): return iter(range(8))

def begun(worker): print("worker", worker, os.getpid(), flush=True)

def begin(data, **options):
    balance = LoadBalance("bsp", global_batch=4)
    loader = BalancedLoader(data, balance, num_workers=1, worker_init_fn=begun, check_data=False, **options)
    model = torch.nn.Linear(1, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balance, model.named_parameters())
    batches = iter(loader)
    return next(batches), batches, optimizer

def run(rank):
    begun = begin(Numbers()), begin(Stream(), stream="whole")
    print("trains", flush=True)
    time.sleep(100)

peer = socket.socket(fileno=int(sys.argv[1]))  # as Gloo's to another rank
run_on_threads(run, 1, timeout_s=60)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system tells nobody of a process's end but its parent")
def test_other_ranks_learn_at_once_of_the_end_of_one_that_has_workers():
    """By itself a worker looks for its parent every five seconds, and keeps the rank's connections open until then."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = [sys.executable, "-c", RANK, str(theirs.fileno())]
            rank = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True)
        with rank:
            assert rank.stdout is not None
            told = [rank.stdout.readline() for _ in range(3)]
            rank.kill()
            ours.settimeout(30)
            assert ours.recv(1) == b""
        assert sorted(line.split()[0] for line in told) == ["trains", "worker", "worker"], (
            "the user's worker_init_fn is called"
        )

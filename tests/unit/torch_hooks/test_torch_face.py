"""What a user holds has what users call: all else is the session's."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hvd_hetero.testing import run_on_threads  # noqa: E402
from torch_hooks import DistributedOptimizer, LoadBalance  # noqa: E402


def public(names):
    return {name for name in names if not name.startswith("_")}


def test_load_balance_and_optimizer_have_what_users_call():
    def made(_):
        balance, inner = LoadBalance("bsp", global_batch=4), torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
        return balance, inner, DistributedOptimizer(inner, balance)

    ((balance, inner, optimizer),) = run_on_threads(made, ranks=1)
    assert public(dir(balance)) == {
        "policy", "rounds", "plan", "batch_size", "round_complete", "also", "batch", "surviving_out_of_memory",
        "state_dict", "load_state_dict", "on_round", "close", "scale", "accumulate", "progress", "evaluate",
    }  # fmt: skip
    assert public(dir(optimizer)) - public(dir(inner)) == {
        "synchronize", "skip_synchronize", "average_parameters", "close",
    }  # fmt: skip

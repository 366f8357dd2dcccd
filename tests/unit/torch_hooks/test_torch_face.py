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
        balance, model = LoadBalance("bsp", global_batch=4), torch.nn.Linear(2, 1)
        return balance, DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), balance)

    ((balance, optimizer),) = run_on_threads(made, ranks=1)
    assert public(vars(balance) | vars(LoadBalance)) == {
        "policy", "rounds", "plan", "batch_size", "round_complete", "also", "batch", "surviving_out_of_memory",
        "state_dict", "load_state_dict", "close",
    }  # fmt: skip
    assert public(vars(optimizer) | vars(DistributedOptimizer)) - public(dir(torch.optim.Optimizer)) == {
        "synchronize", "skip_synchronize", "average_parameters", "close",
    }  # fmt: skip

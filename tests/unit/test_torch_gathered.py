"""What a round of several micro-batches gathers is the loop's to add to, and nothing else."""

from __future__ import annotations

import pytest

hvd = pytest.importorskip("horovod.torch")
import torch  # noqa: E402 - imported by Horovod if it is there
from torch.nn import functional  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from hvd_hetero.errors import RoundStateError  # noqa: E402
from hvd_hetero.policies import BSP  # noqa: E402
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance  # noqa: E402

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.sin(X.sum(1, keepdim=True))


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


class Net(torch.nn.Module):
    """A branch that only some micro-batches take, and rows of an embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.trunk = torch.nn.Linear(3, 4).double()
        self.branch = torch.nn.Linear(4, 4).double()
        self.rows = torch.nn.Embedding(5, 4, sparse=True).double()
        self.head = torch.nn.Linear(4, 1).double()

    def forward(self, x):
        hidden = self.trunk(x) + self.rows((x[:, 0] > 0).long())
        if bool(x[0, 0] > 0):
            hidden = hidden + torch.tanh(self.branch(hidden))
        return self.head(hidden)


def trained(before=None, between=None, after=None, micro_batch=3):
    """Rounds of 8, 8 and 4 samples, and something done in the body of each micro-batch."""
    net = Net()
    balance = LoadBalance(BSP(max_micro_batch=micro_batch), global_batch=8)
    loader = BalancedLoader(TensorDataset(X, Y), balance)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), balance, net.named_parameters())
    for x, y in loader:
        for act in (before, lambda _: functional.mse_loss(net(x), y).backward(), between):  # noqa: B023 - done at once
            if act is not None:
                act(net)
        optimizer.step()
        if after is not None:
            after(net)
    return net


def test_branches_rows_and_unequal_micro_batches_are_gathered():
    net = trained()
    alone = Net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for rows in (range(8), range(8, 16), range(16, 20)):
        size = [2, 3, 3] if len(rows) == 8 else [2, 2]
        optimizer.zero_grad()
        for part in torch.tensor(list(rows)).split(size):
            (functional.mse_loss(alone(X[part]), Y[part]) * len(part) / len(rows)).backward()
        optimizer.step()
    for mine, its in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-15)


def in_place(net):
    net.zero_grad(set_to_none=False)


def to_none(net):
    net.zero_grad()


def the_branch_in_place(net):
    net.branch.zero_grad(set_to_none=False)


def the_head_in_place(net):
    net.head.zero_grad(set_to_none=False)


def clip(net):
    torch.nn.utils.clip_grad_norm_(net.head.parameters(), 1e-3)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("act", [in_place, to_none, the_branch_in_place, the_head_in_place])
def test_zeroing_in_the_middle_of_a_round_is_found_out(act, where):
    with pytest.raises(RoundStateError, match=r"call optimizer\.zero_grad\(\)"):
        trained(**{where: act})


def test_clipping_between_two_micro_batches_is_found_out():
    with pytest.raises(RoundStateError, match=r"changed between two micro-batches.*register_step_pre_hook"):
        trained(between=clip)


def test_zeroing_where_each_round_is_one_micro_batch_is_as_usual():
    usual = trained(micro_batch=None)
    for where in ("before", "after"):
        for act in (in_place, to_none):
            other = trained(**{where: act}, micro_batch=None)
            for mine, its in zip(other.parameters(), usual.parameters(), strict=True):
                torch.testing.assert_close(mine, its, rtol=0, atol=1e-15)


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_closure_is_called_once_for_each_micro_batch(micro_batch):
    usual = trained(micro_batch=micro_batch)
    net = Net()
    balance = LoadBalance(BSP(max_micro_batch=micro_batch), global_batch=8)
    loader = BalancedLoader(TensorDataset(X, Y), balance)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), balance, net.named_parameters())
    losses = []
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = functional.mse_loss(net(x), y)
            loss.backward()
            losses.append(loss)
            return loss

        with torch.no_grad():
            assert optimizer.step(closure) is losses[-1]
    assert len(losses) == (3 if micro_batch is None else 8)
    for mine, its in zip(net.parameters(), usual.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_an_optimizer_that_evaluates_often_is_refused():
    net = Net()
    with pytest.raises(ValueError, match=r"LBFGS evaluates a closure as often as it likes.*such as SGD or Adam"):
        DistributedOptimizer(torch.optim.LBFGS(net.parameters()), LoadBalance("bsp", global_batch=8))

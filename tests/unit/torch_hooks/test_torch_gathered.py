"""What a round of several micro-batches gathers is the loop's to add to, and nothing else."""

from __future__ import annotations

import pytest

hvd = pytest.importorskip("horovod.torch")
import torch  # noqa: E402 - imported by Horovod if it is there
from torch.nn import functional  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from hvd_hetero.errors import RoundStateError  # noqa: E402
from hvd_hetero.policies import BSP, NonBlocking, SelfAdaptive, StaticAllocation  # noqa: E402
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


def trained(before=None, forward=None, between=None, after=None, micro_batch=3, policy=None):
    """Rounds of 8, 8 and 4 samples, and something done in the body of each micro-batch."""
    net = Net()
    balance = LoadBalance(policy or BSP(max_micro_batch=micro_batch), global_batch=8)
    loader = BalancedLoader(TensorDataset(X, Y), balance)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), balance, net.named_parameters())
    for x, y in loader:
        if before is not None:
            before(net)
        loss = functional.mse_loss(net(x), y)
        if forward is not None:
            forward(net)
        loss.backward()
        if between is not None:
            between(net)
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


def the_head_in_place(net):
    net.head.zero_grad(set_to_none=False)


def gradients(net):
    return [p.grad for p in net.parameters() if p.grad is not None and p.grad.layout is torch.strided]


def all_at_once(net):
    if many := gradients(net):
        torch._foreach_zero_(many)


def clip(net):
    torch.nn.utils.clip_grad_norm_(net.head.parameters(), 1e-3)


ZEROING = [in_place, to_none, the_head_in_place, all_at_once]
GATHER = [
    lambda: BSP(max_micro_batch=3), lambda: StaticAllocation([3]), lambda: SelfAdaptive(total=3), lambda: NonBlocking(3)
]  # fmt: skip


@pytest.mark.parametrize("policy", GATHER)
@pytest.mark.parametrize("where", ["before", "forward", "between", "after"])
def test_zeroing_in_the_middle_of_a_round_is_found_out_under_every_policy_that_gathers(policy, where):
    trained(policy=policy())
    for act in ZEROING:
        with pytest.raises(RoundStateError, match="gradient"):
            trained(**{where: act}, policy=policy())


def test_a_gradient_changed_before_step_is_found_out_in_rounds_of_one_micro_batch():
    with pytest.raises(RoundStateError, match=r"backward\(\).*step\(\).*register_step_pre_hook"):
        trained(between=clip, micro_batch=None)


def test_what_would_be_summed_over_no_ranks_is_found_out():
    def freeze(net):
        net.head.requires_grad_(False)

    with pytest.raises(RoundStateError, match=r"'head.weight' was frozen"):
        trained(between=freeze, micro_batch=None)

    net, balance = Net(), LoadBalance("bsp", global_batch=8)
    loader = BalancedLoader(TensorDataset(X, Y), balance)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), balance, net.named_parameters())
    for x, y in loader:
        functional.mse_loss(net(x), y).backward()
        optimizer.synchronize()
        with pytest.raises(RoundStateError, match=r"added to between synchronize\(\) and step\(\)"):
            functional.mse_loss(net(x), y).backward()
        break
    optimizer.close()


def test_clipping_between_two_micro_batches_is_found_out():
    with pytest.raises(RoundStateError, match=r"gathered.*register_step_pre_hook"):
        trained(between=clip)


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


def test_a_step_without_a_batch_leaves_state_that_there_is():
    """Horovod makes state where there is none; a last step too many is no such call."""
    net = Net()
    balance = LoadBalance("bsp", global_batch=10)
    inner = torch.optim.Adam([p for n, p in net.named_parameters() if "rows" not in n], lr=0.1)
    optimizer = DistributedOptimizer(inner, balance, [(n, p) for n, p in net.named_parameters() if "rows" not in n])
    for x, y in BalancedLoader(TensorDataset(X, Y), balance):
        functional.mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    before = [{k: v.clone() for k, v in state.items()} for state in inner.state.values()]
    with pytest.raises(RoundStateError, match=r"step\(\).*batch"):
        optimizer.step()
    after = list(inner.state.values())
    assert before
    assert all(torch.equal(a[k], b[k]) for a, b in zip(before, after, strict=True) for k in a)


@pytest.mark.parametrize("micro_batch", [3, 8])
def test_a_pass_that_is_thrown_away_does_not_stay_in_what_is_gathered(micro_batch):
    net = Net()
    balance = LoadBalance(BSP(max_micro_batch=micro_batch), global_batch=8)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), balance)

    def twice():
        for x, y in BalancedLoader(TensorDataset(X, Y), balance):
            functional.mse_loss(net(x), y).backward()
            optimizer.zero_grad()
            functional.mse_loss(net(x), y).backward()
            optimizer.step()

    if micro_batch == 8:
        twice()
        for mine, its in zip(net.parameters(), trained(micro_batch=8).parameters(), strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-15)
    else:
        with pytest.raises(RoundStateError, match=r"zero_grad\(\).*backward\(\)"):
            twice()


def test_a_model_that_is_converted_between_rounds_is_refused():
    net = torch.nn.Linear(3, 1)
    balance = LoadBalance("bsp", global_batch=8)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), balance, net.named_parameters())
    for dtype in (torch.float32, torch.float64):
        net.to(dtype)
        balance.batch(8)
        optimizer.zero_grad()
        net(X[:8].to(dtype)).sum().backward()
        if dtype is torch.float64:
            with pytest.raises(RoundStateError, match="Convert the model before the first round"):
                optimizer.step()
        else:
            optimizer.step()

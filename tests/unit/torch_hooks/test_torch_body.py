"""What the loop's body does beside its batch is seen in the first two rounds, and nothing else is taken for it."""

from __future__ import annotations

import pytest

hvd = pytest.importorskip("horovod.torch")
import torch  # noqa: E402 - imported by Horovod if it is there
from torch.utils.data import TensorDataset  # noqa: E402

from hvd_hetero.policies import BSP, ElasticBSP, NonBlocking, SelfAdaptive  # noqa: E402
from torch_hooks import BalancedLoader, DistributedOptimizer, GradScaler, LoadBalance, body  # noqa: E402
from torch_hooks.wires.horovod import HorovodWire  # noqa: E402

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture(autouse=True)
def none_is_left_open():
    yield
    assert body._open == []


class Job:
    """Rounds of 8 samples in micro-batches of 4 at the most; looked at as if there were more ranks than one."""

    def __init__(self, policy=None, model=None, wire=None, **options):
        self.model = model or torch.nn.Linear(3, 1)
        self.balance = LoadBalance(policy or BSP(max_micro_batch=4), global_batch=8, wire=wire)
        self.balance._session.body._wanted = True
        self.loader = BalancedLoader(TensorDataset(X), self.balance, **options)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = DistributedOptimizer(inner, self.balance)

    def step(self, x):
        self.model(x).square().mean().backward()
        self.optimizer.step()

    def run(self, after=lambda: None):
        for (x,) in self.loader:
            self.step(x)
            after()
        return self


def allreduce():
    hvd.allreduce(torch.zeros(1), name="metric")


def test_each_mistake_is_said_once_with_its_line(caplog):
    Job().run(allreduce)
    (record,) = caplog.records
    assert "round 0: hvd.allreduce() at test_torch_body.py:" in record.message
    assert "allreduce(): a collective is called in the loop's body, which does not run alike" in record.message
    assert "policy 'bsp' may give ranks unequal numbers of micro-batches" in record.message


@pytest.mark.parametrize(
    ("change", "what", "way_out"),
    [
        (
            lambda job: job.optimizer.param_groups[0].update(lr=0.9 * job.optimizer.param_groups[0]["lr"]),
            "learning rates or other hyper-parameters are changed", "register_step_post_hook",
        ),
        (lambda job: job.model.weight.data.clamp_(-0.05, 0.05), "parameters are changed", "register_step_post_hook"),
    ],
)  # fmt: skip
def test_a_change_that_a_rank_may_not_make_is_said_once(caplog, change, what, way_out):
    job = Job()
    job.run(lambda: change(job))
    (record,) = caplog.records
    assert f"{what} in the loop's body" in record.message
    assert way_out in record.message


@pytest.mark.parametrize("policy", [SelfAdaptive(total=2), NonBlocking(2), ElasticBSP(), ElasticBSP(updates="local")])
def test_a_plain_loop_is_not_blamed(caplog, policy):
    Job(policy).run()
    assert not [record for record in caplog.records if record.name == "torch_hooks.body"]  # speeds may be doubted


class OnesOwn(HorovodWire):
    """Such as somebody else may write, in a module of theirs."""

    def start_sum(self, tensor, name):
        return super().start_sum(tensor, name)

    def start_sums(self, tensors, name):
        return super().start_sums(tensors, name)


class OfOthers(OnesOwn):
    """A wire whose calls come from a class in another module than its own."""

    __module__ = "somewhere_else"


@pytest.mark.parametrize("wire", [OnesOwn, OfOthers])
def test_what_a_wire_of_ones_own_sends_for_a_round_is_not_the_bodys(caplog, wire):
    Job(NonBlocking(2), wire=wire()).run()
    assert not [record for record in caplog.records if record.name == "torch_hooks.body"]


def test_what_hooks_do_is_not_the_bodys(caplog):
    job = Job()

    def halve(*_):
        job.model.weight.grad.mul_(0.5)

    def decay(*_):
        allreduce()
        job.optimizer.param_groups[0]["lr"] *= 0.9
        with torch.no_grad():
            job.model.weight.mul_(0.9)

    job.optimizer.register_step_pre_hook(halve)
    job.optimizer.register_step_post_hook(decay)
    job.run()
    assert not caplog.records


def test_what_a_gradient_scaler_does_is_not_the_bodys(caplog):
    job = Job()
    scaler = GradScaler("cpu", optimizer=job.optimizer, init_scale=8.0)
    for (x,) in job.loader:
        scaler.scale(job.model(x).square().mean()).backward()
        scaler.unscale_(job.optimizer)
        scaler.step(job.optimizer)
        scaler.update()
    assert not caplog.records


def test_a_metric_of_the_rounds_end_and_other_loops_are_not_looked_at_after_two_rounds(caplog):
    job = Job()
    job.run(lambda: allreduce() if job.balance.rounds == 3 else None)
    assert not caplog.records


def test_what_goes_wrong_in_the_body_and_what_follows_is_not_the_bodys(caplog):
    job = Job()

    def fail():
        raise KeyError("in the body")

    try:
        job.run(fail)
    except KeyError:
        allreduce()
    allreduce()
    for _ in job.loader:
        break
    allreduce()
    next(iter(job.loader))
    allreduce()
    assert not caplog.records

"""The recipes of docs/porting.md do what the page says."""

from __future__ import annotations

import doc_blocks
import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from hvd_hetero.policies import SelfAdaptive, StaticAllocation  # noqa: E402
from hvd_hetero.testing import run_on_threads  # noqa: E402
from torch_hooks import BalancedLoader, DistributedOptimizer, LoadBalance  # noqa: E402

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports what all threads would import at once


PAGE = doc_blocks.ROOT / "docs" / "porting.md"


def block(start):
    """The code of the page that begins so."""
    (found,) = [each.text for each in doc_blocks.blocks(PAGE) if each.text.startswith(start)]
    return found


class Job:
    def __init__(self, policy, samples=21):
        self.model = torch.nn.Linear(3, 1)
        self.balance = LoadBalance(policy, global_batch=8)
        self.loader = BalancedLoader(TensorDataset(torch.zeros(samples, 3)), self.balance)
        self.optimizer = DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.1), self.balance)

    def step(self, x):
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()


def test_a_warm_up_begins_at_its_beginning():
    def case(rank):
        job, places = Job("lb-bsp"), []
        exec(block("def warm_up"), {**vars(job), "rate_at": lambda place: places.append(place) or 0.1})
        for (x,) in job.loader:
            job.step(x)
        return places

    assert run_on_threads(case, 2) == [[0.0, pytest.approx(1 / 3), pytest.approx(2 / 3)]] * 2


@pytest.mark.parametrize("policy", [lambda: StaticAllocation([1, 0]), lambda: SelfAdaptive(total=4), lambda: "lb-bsp"])
def test_a_loop_that_the_loader_stops_does_as_many_steps_on_each_rank(policy):
    recipe = block("loader.stop_at = n").replace("…", "step(x)").replace("for x, y", "for x,")

    def case(rank):
        job = Job(policy())
        exec(recipe, {**vars(job), "n": 5, "step": job.step})
        return job.balance.rounds

    assert run_on_threads(case, 2) == [5, 5]


X = torch.rand(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("cuts", [[8], [3, 5], [1, 4, 3]])
def test_losses_that_are_sums_do_not_depend_on_the_split(cuts):
    page = {"functional": functional, "torch": torch}
    exec(block("def loss_of_vae"), page)
    weight = torch.randn(6, 30, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)

    def loss(x):
        out = x @ weight
        return page["loss_of_vae"](out[:, :6].sigmoid(), x, out[:, 6:12], out[:, 12:18])

    (whole,) = torch.autograd.grad(loss(X), weight)
    of_ranks = [len(x) / len(X) * torch.autograd.grad(loss(x), weight)[0] for x in X.split(cuts)]
    torch.testing.assert_close(sum(of_ranks), whole, rtol=0, atol=1e-12)

"""Ranks agree where gradients lie, so that all let the same ones carry the table."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hvd_hetero.testing import run_on_threads  # noqa: E402
from torch_hooks.gradients.sparse import Layouts  # noqa: E402
from torch_hooks.wires.choice import wire_here  # noqa: E402


@pytest.mark.parametrize("as_dense", [False, True])
def test_a_rank_with_an_accelerator_is_known_to_all(as_dense):
    def of_rank(rank):
        parameter = torch.nn.Parameter(torch.zeros(3, device="meta" if rank else "cpu"))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        layouts = Layouts({parameter: "weight"}, "test", optimizer, wire_here(), as_dense=as_dense)
        layouts.agree()
        return layouts.elsewhere(parameter)

    assert run_on_threads(of_rank, 2) == [True, True]

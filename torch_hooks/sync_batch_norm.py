r"""Batch normalisation over the samples of all ranks, each weighing the same whatever rank holds it.

Per channel, let rank i hold n_i numbers x with mean m_i and sum of squared deviations q_i. Over all ``N = sum n_i``,

    m = sum_i (n_i / N) m_i        q = sum_i (q_i + n_i (m_i - m)^2)        variance q / N

(Chan, Golub and LeVeque's pairwise rule, in one go), which does not cancel as a difference of sums of squares would.

**The gradient.** A rank's loss L_i counts S_i of the round's S (samples, or what ``weight_of`` says), so that of the
round is ``L = sum_i (S_i / S) L_i``, and everything that a rank's backward pass returns is multiplied by S_i afterwards
(``hvd_hetero.balancer``). With y = (x - m) / s, ``s^2 = variance + eps``, and g = dL_i/dy of this layer's own rank,

    dL/dx = (1 / s) (S_i g - (1 / N) sum_j S_j sum g - (y / N) sum_j S_j sum (g y))      (times 1 / S)

where the inner sums go over rank j's numbers. So two sums per channel travel, multiplied by S_j, and what a rank
returns is this divided by its own S_i. The layers of PyTorch and of Horovod take all S_i as equal.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvd_hetero.errors import HeteroError, RoundStateError
from torch_hooks.load_balance import LoadBalance
from torch_hooks.session import TorchSession

_REMEDY = (
    "every rank must do the same number of micro-batches, at least one. Use a BalancedLoader with policy='bsp', or "
    "'lb-bsp' without may_rest; or a normalisation that needs no other rank, such as GroupNorm"
)


class SyncBatchNorm(_BatchNorm):
    """Batch norm with the statistics of the micro-batches of all ranks together, by actual counts.

    With one micro-batch per rank that is the whole round, so training equals one process with the global batch.
    With k of them, the j-th of every rank are normalised together.

    Every rank must run each of these layers equally often in each round; policies that do not see to it are refused,
    and so is a micro-batch in which ``collate_fn`` has left nothing. One done again for want of memory
    (``surviving_out_of_memory``) does not.

    Parameters
    ----------
    num_features, eps, momentum, affine, track_running_stats
        As in ``torch.nn.BatchNorm2d``.
    balance
        The ``LoadBalance`` of this training.
    name
        The same on every rank, and different for every layer.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        balance: LoadBalance,
        name: str,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        session = balance._session
        session.require_first("SyncBatchNorm")
        if session.mixing is not None:
            raise ValueError(
                f"SyncBatchNorm joins the samples of all ranks in one model, and with {session.averaging} ranks hold "
                "different ones; use sync='allreduce', or a normalisation that needs no other rank, such as GroupNorm"
            )
        policy, micro_batches = session.policy, session.balancer.plan().micro_batches
        one_each = policy.keeps_total and set(micro_batches) == {1}  # looked at again in each round
        if policy.may_rest or not (policy.shares_alone or one_each) or not all(micro_batches):
            raise ValueError(f"policy {policy.name!r} does not go with SyncBatchNorm: {_REMEDY}")
        session.waits_in_layers = session.normalises_together = session.wire.size > 1
        self._session = session
        self._name = f"{session.prefix}.{name}"

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, balance: LoadBalance | None = None, name: str = "norm"
    ) -> Any:
        """Return the module with every batch norm in it replaced, parameters and statistics kept.

        Call it before the optimizer is made.
        """
        if not isinstance(balance, LoadBalance):
            raise TypeError(
                f"balance must be the LoadBalance of this training, got {balance!r}; write "
                "SyncBatchNorm.convert_sync_batchnorm(model, balance)"
            )
        if isinstance(module, _BatchNorm):
            new = cls(
                module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats,
                balance=balance, name=name,
            )  # fmt: skip
            new.weight, new.bias = module.weight, module.bias
            new.running_mean, new.running_var = module.running_mean, module.running_var
            new.num_batches_tracked = module.num_batches_tracked
            new.train(module.training)
            return new
        for child_name, child in module.named_children():
            setattr(module, child_name, cls.convert_sync_batchnorm(child, balance, f"{name}.{child_name}"))
        return module

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"input must have at least 2 dimensions, samples and channels; got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise the input."""
        batch_statistics = self.training or not self.track_running_stats
        if not batch_statistics or self._session.wire.size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        self._require_alike()
        rows = input if input.dtype == torch.float64 else input.float()
        out, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            rows, self.eps, self._name, self._session
        )
        if self.training and self.track_running_stats:
            self._track(mean, variance, float(count))
        shape = (1, -1, *(1,) * (input.dim() - 2))
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return cast(torch.Tensor, out.to(input.dtype))

    def _require_alike(self) -> None:
        """Raise unless all ranks do a micro-batch at the same time, so that none waits forever."""
        balancer = self._session.balancer
        if not self._session.at_work:
            raise RoundStateError(
                "SyncBatchNorm ran in training mode outside of a batch, where other ranks may not follow; call "
                "model.eval() to evaluate, and iterate over a BalancedLoader to train"
            )
        plan = balancer.work.plan
        if plan.ends == "first" or plan.local or len(set(plan.micro_batches)) > 1:
            raise HeteroError(
                f"round {balancer.rounds} has {', '.join(map(str, plan.micro_batches))} micro-batches under policy "
                f"{self._session.policy.name!r}, and SyncBatchNorm would wait for ever: {_REMEDY}"
            )

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_((variance * (count / max(count - 1.0, 1.0))).to(self.running_var.dtype), factor)


class _Normalise(torch.autograd.Function):
    """``(x - m) / s``, with m and s of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, eps: float, name: str, session: TorchSession
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        dims = [d for d in range(x.dim()) if d != 1]
        here = x.numel() // x.size(1)
        wire = session.wire
        table = x.new_zeros(wire.size, 2 * x.size(1) + 1)  # a row for each rank, of which this one fills its own
        if here:
            variance, mean = torch.var_mean(x, dims, correction=0)
            table[wire.rank] = torch.cat([mean, variance * here, table.new_tensor([here])])
        # Waiting for the slowest rank is no work of this one: if it counted, all ranks would seem equally fast.
        with session.meter.waiting_for_others():
            table = wire.wait(wire.start_sum(table, f"{name}.statistics"))
        means, squares = table[:, :-1].chunk(2, dim=1)
        counts = table[:, -1:]
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        variance = (squares + counts * (means - mean) ** 2).sum(0) / count
        scale = torch.rsqrt(variance + eps)
        y = (x - _along(mean, x)) * _along(scale, x)
        ctx.save_for_backward(y, scale, count)
        ctx.dims, ctx.name, ctx.session = dims, name, session
        ctx.mark_non_differentiable(mean, variance, count)
        return y, mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor, None, None, None]:
        y, scale, count = ctx.saved_tensors
        g = gradients[0]
        assert g is not None
        session = ctx.session
        # Beside a reducer of the user's, the loss is scaled already, and so are the gradients that come here. Else its
        # weight is known by now, if scale() has given it.
        weight = session.balancer.work.gradient_weight if session.beside is None else 1.0
        sums = torch.cat([g.sum(ctx.dims), (g * y).sum(ctx.dims)])
        # A mean over no samples is NaN; it must not reach the others.
        sums = sums * weight if weight else torch.zeros_like(sums)
        with session.meter.waiting_for_others():
            sums = session.wire.wait(session.wire.start_sum(sums, f"{ctx.name}.gradient"))
        mean, mean_y = (sums / (count * (weight or 1.0))).chunk(2)
        return (g - _along(mean, y) - y * _along(mean_y, y)) * _along(scale, y), None, None, None


def _along(per_channel: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return per_channel.view(1, -1, *(1,) * (x.dim() - 2))

"""What the loader and the optimizer of one training share: the policy and the state of the rounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from hvd_hetero.checks import integer
from hvd_hetero.errors import RoundStateError
from hvd_hetero.measurement.memory import USABLE_SHARE, CudaGauge
from hvd_hetero.policies.bsp import BSP
from hvd_hetero.policies.policy import Policy
from hvd_hetero.rounds import MicroBatch
from hvd_hetero.session import LoadBalanceBase
from hvd_hetero.watchdog import Patience
from torch_hooks.beside.stepping_optimizers import Reducer
from torch_hooks.evaluation import EvaluationLoader, Figures, evaluated
from torch_hooks.session import TorchSession, do_nothing
from torch_hooks.wires.choice import TorchWire, wire_here

if TYPE_CHECKING:
    from hvd_hetero.policies.goodput import Goodput
    from hvd_hetero.telemetry.writer import Telemetry
    from hvd_hetero.topology.mixing import Mixing


class LoadBalance(LoadBalanceBase):
    """How the global batch is divided among the ranks. Make one per training, the same on all ranks.

    Make it after ``hvd.init()``, or after ``torch.distributed.init_process_group()``.

    Parameters
    ----------
    policy
        A name (``"bsp"``, ``"lb-bsp"``, ``"self-adaptive"``, ``"non-blocking"``, ``"lb-non-blocking"``,
        ``"elastic-bsp"``) or a policy object (``StaticAllocation([3, 7])``).
    global_batch
        Samples per round over all ranks together: what one process would call its batch size. (Under ElasticBSP, of one
        iteration of every rank.) Or a ``hvd_hetero.policies.Goodput``: then it adapts.
    sync
        ``"allreduce"``, ``"d-psgd"`` or ``"matcha"``, or one of the last two with a graph of your own
        (``hvd_hetero.topology.mixing``).
    reducer
        What a reducer of your own makes of the gradients of all ranks, beside which ``scale`` is used: "mean"
        (``DistributedDataParallel``, ``fully_shard``, ``hvd.DistributedOptimizer``), or "sum".
    allow_nan
        If False, NaN or an infinity in some rank's gradient (on a CPU) stops all ranks before the update, with an error
        that names the rank. Updates that a gradient scaler skips are no error. Beside a reducer of your own it is the
        loss that is looked at, and the ranks stop some rounds later.
    memory
        The share of a CUDA device's free memory that the plugin's larger batches may fill. What a batch takes is
        measured, and batches stay within the bound that follows (docs/memory.md). 0: nothing is measured.
    telemetry
        Where rank 0 writes one JSON line per round (``docs/telemetry.md``): a path, or
        ``hvd_hetero.telemetry.Telemetry(path, every=…)`` to write every k-th round.
        None: nowhere.
    progress
        If True, rank 0 writes rounds, samples per second, waiting and batches to standard error, every ten seconds.
    patience
        How long a rank waits for others before it says for which one, and before it ends the job if that cannot go on
        (``hvd_hetero.watchdog.Patience``, ``docs/waiting.md``). None: as ``HVD_HETERO_PATIENCE`` says, or the defaults.
    wire
        What carries gradients and all else between ranks (``hvd_hetero.communication.wire.TensorWire``). None: Horovod,
        if it is initialised, else the process group of torch.distributed; in a rank that is a thread
        (``hvd_hetero.testing.run_on_threads``), that thread's.
    """

    _session: TorchSession

    def __init__(
        self,
        policy: str | Policy = "lb-bsp",
        *,
        global_batch: int | Goodput | None = None,
        sync: str | Mixing = "allreduce",
        reducer: Reducer = "mean",
        allow_nan: bool = False,
        memory: float = USABLE_SHARE,
        telemetry: str | os.PathLike[str] | Telemetry | None = None,
        progress: bool = False,
        patience: Patience | None = None,
        wire: TorchWire | None = None,
    ) -> None:
        if global_batch is None:
            raise TypeError(
                "global_batch is missing: the samples of a round over all ranks together; with batch_size on each "
                "rank so far, write global_batch=batch_size * hvd.size()"
            )
        if reducer not in ("mean", "sum"):
            raise ValueError(
                f"reducer must be 'mean' or 'sum', got {reducer!r}; DistributedDataParallel, fully_shard and "
                "hvd.DistributedOptimizer take the mean by default"
            )
        if not 0.0 <= memory <= 1.0:
            raise ValueError(
                f"memory must be a fraction from 0 to 1, got {memory!r}; {USABLE_SHARE} leaves a tenth free"
            )
        wire = wire_here() if wire is None else wire
        self._session = TorchSession(
            policy, wire, global_batch, telemetry, reducer=reducer, progress=progress, sync=sync, allow_nan=allow_nan,
            patience=patience,
        )  # fmt: skip
        self._patience = patience
        if memory and torch.cuda.is_available():
            self._session.meter.memory.gauge, self._session.meter.memory.share = CudaGauge(torch.cuda), memory

    @property
    def round_complete(self) -> bool:
        """Whether ``step()`` really steps now, or has just done so; False while micro-batches are still gathered.

        Beside a reducer of your own: whether this is the last micro-batch of the round, after which to step.
        """
        return not self._session.balancer.between_updates

    def scale(self, loss: torch.Tensor, *, weight: Any = None, normalised: bool = False) -> torch.Tensor:
        """Return the loss of this batch, weighted so that the reducer makes the exact gradient of the round.

            model = DistributedDataParallel(model)           # or fully_shard(model), or hvd.DistributedOptimizer
            balance = LoadBalance(global_batch=512)
            for x, y in BalancedLoader(dataset, balance, shuffle=True):
                optimizer.zero_grad()
                balance.scale(loss_fn(model(x), y)).backward()
                optimizer.step()

        ``loss`` is the mean over the samples of the batch. Call it once for each batch, last of all that makes the
        loss, but before a gradient scaler's ``scale``. Beside a reducer of your own it is for policies whose ranks do
        equally many micro-batches: "bsp", "lb-bsp" and ``StaticAllocation``. There it also notes when this rank has
        done its work, so call ``backward()`` of what it returns. Wrap the model before the loop.

        A ``DistributedOptimizer`` of this package weighs what each batch has brought, under every policy. So the same
        loop serves it, and this returns the loss as it is; leaving it out is the same.

        ``weight``: what the loss is a mean of, if not of samples, such as the number of tokens, on each rank; not with
        ``surviving_out_of_memory``. Beside a reducer their sum is then waited for; with ``weight_of`` of the loader it
        travels behind the forward pass.
        ``normalised``: the loss is weighted already, such as the sum over this batch divided by the mean number of
        tokens per rank. It is then only timed.
        """
        session = self._session
        if session.beside is None and (session.optimizer is None or not session.at_work):
            raise RoundStateError("scale() was called without a batch; call it in the loop over the BalancedLoader")
        if session.beside is None and normalised:
            raise ValueError(
                "scale(normalised=True) is for reducers other than DistributedOptimizer, which would weight such "
                "a loss twice; scale the mean loss of this rank's batch, with weight=… or weight_of"
            )
        if normalised:
            session.require_no_ledger()
        if weight is not None:
            session.weigh(loss, weight)
        return loss if session.beside is None else session.beside.scale(loss, normalised=normalised)

    def accumulate(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Around forward and backward: reduce gradients in the last micro-batch of a round alone.

            for x, y in BalancedLoader(dataset, balance, micro_batches=4):
                with balance.accumulate(model):
                    balance.scale(loss_fn(model(x), y)).backward()
                if balance.round_complete:
                    optimizer.step()
                    optimizer.zero_grad()

        ``model`` is a ``DistributedDataParallel``, or sharded by ``fully_shard``.
        """
        return _reduced_later(model, now=self.round_complete)

    def also(self) -> LoadBalance:
        """Return the ``LoadBalance`` of one more optimizer in the same loop. It takes part in each round of this one.

            balance = LoadBalance(global_batch=128)                                  # for the loader, too
            optimizer_d = DistributedOptimizer(optimizer_d, balance, d.named_parameters())
            optimizer_g = DistributedOptimizer(optimizer_g, balance.also(), g.named_parameters())

        The samples, and so the weights, are those of this one's plan. A rank without data takes part in the order in
        which these objects were made, which must be that of the steps. Every optimizer steps once for every batch. A
        loss may reach the parameters of an optimizer that has stepped already; what it brings is cleared with the next
        round. Optimizers that step in turn, each seeing what the former has updated, need rounds of one micro-batch.
        """
        self._session.require_leadable()
        if self._session.balancer.planner.goodput is not None:
            raise ValueError(
                "global_batch=Goodput(…) measures the gradients of one optimizer, so it does not go with also(); "
                "give a constant global_batch"
            )
        batch, wire = self._session.balancer.planner.global_batch, self._session.wire
        allow_nan = self._session.balancer.agreement.allow_nan
        options: dict[str, Any] = {"allow_nan": allow_nan, "memory": 0.0, "patience": self._patience, "wire": wire}
        other = LoadBalance(BSP(), global_batch=batch, **options)
        self._session.follow_with(other._session)
        return other

    def batch(self, samples: int | None = None) -> int:
        """Announce a batch of the user's own making, before its forward pass, and return its samples.

        For data that does not come from a ``BalancedLoader``: one micro-batch, one round. None: as many samples as
        planned, which beside a reducer of your own it must be. Otherwise the gradient is weighted by the samples given
        here; 0 is allowed, and then a loss of zero must still be propagated, so that this rank takes part in the
        synchronisation.

            x = draw(balance.batch())
        """
        self._session.require_first("balance.batch()")
        self._session.trains_here()
        self._session.require_reducer()
        if self._session.beside is not None:
            self._session.balancer.planner.require_equal_counts(1)
        self._session.end_batch()
        self._session.closed = do_nothing
        samples = self.batch_size if samples is None else samples
        samples = integer("samples", samples, 0, remedy="give the number of samples in this rank's batch, 0 for none")
        plan = self._session.balancer.plan()
        if plan.ends == "first" or plan.local:
            raise ValueError(
                f"policy {self.policy.name!r} gives a rank several micro-batches in a round, and only a "
                "BalancedLoader can hand them out; use one, or policy='bsp' or 'lb-bsp'"
            )
        if self._session.balancer.ledger is not None:
            raise ValueError(
                "Telemetry(ledger=True) names samples by their index, which batch() does not know; use a "
                "BalancedLoader, or leave ledger out"
            )
        if self.policy.needs_epochs:
            raise ValueError(
                f"policy {self.policy.name!r} adapts at the end of an epoch, and batch() has no epochs; give the "
                "policy every=… (in rounds), or use a BalancedLoader"
            )
        if self._session.beside is not None and samples != self.batch_size:
            raise ValueError(
                f"samples must be {self.batch_size} on this rank, got {samples}: beside another reducer gradients "
                "are weighted by the plan; take as many as batch() returns, or use a DistributedOptimizer"
            )
        self._session.begin(MicroBatch(plan, samples))
        return samples

    def evaluate(
        self,
        dataset: Dataset[Any],
        function: Callable[[Any], Mapping[str, Any]],
        *,
        batch_size: int | None = None,
        weight_of: Callable[[Any], Any] | None = None,
        **loader_options: Any,
    ) -> Figures:
        """Return the means of a function over a dataset that all ranks evaluate together; a collective call.

            model.eval()
            figures = balance.evaluate(test, lambda batch: {"loss": loss_fn(model(batch[0]), batch[1])})
            figures["loss"], figures.sums["loss"], figures.weight         # the mean, the sum, the samples

        Each rank does a part in proportion to its speed, each sample once, without gradients. Call it between two
        epochs, or in the loop's body after ``optimizer.step()``. Figures have the same bits on every rank, so ranks
        that stop early, or keep the best model, do so together. If the function fails on one rank, all raise once their
        own parts are done. Plans, speeds, the cursor and the state of random numbers stay as they are.

        ``function`` returns means over the samples of its batch, by name: numbers, or tensors of one shape.
        ``weight_of`` is a function of a batch that returns what they are means of, if not of samples, such as its
        tokens. ``batch_size`` and the other options are those of ``EvaluationLoader``.
        """
        loader = EvaluationLoader(dataset, self, batch_size, **loader_options)
        return evaluated(loader, function, weight_of)

    def surviving_out_of_memory(self) -> AbstractContextManager[None]:
        """Around the body of the loop: a micro-batch that does not fit in memory is done again in smaller parts.

            for x, y in loader:
                with balance.surviving_out_of_memory():
                    ...

        The loader then yields the same samples in parts, and the plans keep to what fits, with headroom, from the next
        round on. For batches of a ``BalancedLoader``. The body must do all of its work with a batch inside the block,
        and, up to ``optimizer.step()``, nothing that cannot be done twice. While micro-batches are accumulated, it
        costs a copy of the gradients. Beside a reducer of your own the body ends early for a part whose gradient is not
        reduced yet, behind its backward pass; what runs out of memory where a collective may have begun (FSDP2, and the
        backward pass that reduces) ends all ranks with an error. More in ``docs/memory.md``.
        """
        session = self._session
        own = [each._gathered for each in session.optimizers]
        undone = own if session.beside is None else [session.beside]
        return session.shortage.survived(undone, lambda: session.can_split_micro_batches)

    def state_dict(self) -> dict[str, Any]:
        """Return plans, policy and every rank's predictor as plain data; a collective call.

        Between two rounds. Beside a reducer of your own, also in the loop's body, after the step.
        """
        session = self._session
        session.exit_loop()
        if session.balancer.in_round:
            raise RoundStateError(
                "state_dict() was called in the middle of a round: a batch was drawn and not trained on. Call it "
                "between two iterations over the loader. End an iteration by stop_at of the loader, or by a break "
                "after step()"
            )
        session.drain()
        mine = session.balancer.state_dict()
        paces = session.wire.allgather_object(mine.pop("pace"), name=f"{session.prefix}.paces")
        return {**mine, "paces": paces}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` of another job returned; before the first round, and on every rank."""
        paces, balancer = state["paces"], self._session.balancer
        if len(paces) != balancer.workers:
            raise ValueError(
                f"the state has {len(paces)} ranks, and this job has {balancer.workers}; launch as many, or load "
                "the parameters of the model alone"
            )
        balancer.load_state_dict({**state, "pace": paces[balancer.rank]})


def _reduced_later(model: Any, *, now: bool) -> AbstractContextManager[None]:
    """Return a context in which backward passes of ``model`` reduce no gradients, unless ``now``."""
    if hasattr(model, "set_requires_gradient_sync"):
        return nullcontext() if now else _sharded_later(model)
    if hasattr(model, "no_sync"):
        later: AbstractContextManager[None] = nullcontext() if now else model.no_sync()
        return later
    raise TypeError(
        f"model must be a DistributedDataParallel or sharded by fully_shard, got {type(model).__name__}; with "
        "hvd.DistributedOptimizer set its backward_passes_per_step instead"
    )


@contextmanager
def _sharded_later(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)

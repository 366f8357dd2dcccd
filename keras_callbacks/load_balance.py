"""The callback with which ``fit`` trains one model on all ranks, each with as many samples as it is fast."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvd_hetero.consistency import Remedies
from hvd_hetero.policies.policy import Policy
from hvd_hetero.session import LoadBalanceBase
from hvd_hetero.watchdog import Patience
from keras_callbacks.keras_versions import build_metrics, build_model, trained_variables
from keras_callbacks.pipeline.balanced_dataset import BalancedDataset
from keras_callbacks.pipeline.sources import number_from
from keras_callbacks.refusals import check_compiled
from keras_callbacks.session import FitSession
from keras_callbacks.start import average
from keras_callbacks.tensorflow_wire import TensorFlowWire
from keras_callbacks.wrapping import is_wrapped, release_from_others, wrap

if TYPE_CHECKING:
    from hvd_hetero.policies.goodput import Goodput
    from hvd_hetero.telemetry.writer import Telemetry
    from hvd_hetero.topology.mixing import Mixing

_REMEDIES = Remedies(
    fingerprint="Give all ranks the same policy, global_batch, data, shuffle, seed, prefetch, weight_of and cost_of of "
    "resize_batches, and the same epochs, initial_epoch and steps_per_epoch of fit",
    contents="Seed every shuffle, also in interleave and flat_map, and what is drawn at random; give arrays whole, not "
    "cut by rank. For data that rightly differ (augmentation), set check_data=False of resize_batches",
    settings="Change them on all ranks alike and before the same step: by a schedule of the optimizer, or by a "
    "callback that all ranks have and that decides by the step or by the logs of an epoch, which are the same "
    "everywhere (those of a step are the rank's own)",
    parameter_norm="A callback that writes weights, or loads them, must do so on every rank alike; and train_step must "
    "change weights by model.optimizer alone, unless they are of local_layers",
    unused="In a loop of your own, call weighted_gradients once for every batch, also for one that you would rather "
    "skip; to accumulate, set max_micro_batch of the policy and train by fit",
    waiting="Give all ranks the same epochs and callbacks, and call collectives of your own on all of them alike: not "
    "in a callback or a part of train_step that one rank leaves out",
)


class LoadBalance(LoadBalanceBase, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """How the global batch is divided among the ranks. Make one per training, after ``hvd.init()``, alike on all ranks.

        balance = LoadBalance(policy="lb-bsp", global_batch=512)
        model.compile(optimizer, loss)
        model.fit(resize_batches((x, y), balance), epochs=5, callbacks=[balance])

    In ``fit`` it wraps the compiled optimizer, broadcasts rank 0's weights and optimizer state, and makes a step of
    ``fit`` a round: all ranks do the same number of steps. Metrics cover all ranks' samples at the end of
    each epoch, whatever the order of the callbacks. The wrapper stays for the next ``fit``; ``release()`` takes it off.

    Parameters
    ----------
    policy
        A name (``"bsp"``, ``"lb-bsp"``, ``"self-adaptive"``, ``"non-blocking"``, ``"lb-non-blocking"``,
        ``"elastic-bsp"``) or a policy object (``StaticAllocation([3, 7])``).
    global_batch
        Samples per round over all ranks together: one process's batch size. (Under ElasticBSP, of one
        iteration of every rank.) ``hvd_hetero.policies.Goodput(start=…, least=…, most=…)`` lets it adapt.
    sync
        ``"allreduce"``, ``"d-psgd"`` or ``"matcha"``, or one of the last two with your own graph
        (``hvd_hetero.topology.mixing``). Under the last two ranks hold different models, and the end of ``fit`` gives
        all of them the mean.
    allow_nan
        If False, NaN or an infinity in some rank's gradient (on a CPU) stops all ranks before the update, with an error
        that names the rank. A ``LossScaleOptimizer`` skips such updates instead.
    local_layers
        Layers that every rank trains by itself, on its own samples: neither broadcast nor synchronised.
    telemetry
        Where rank 0 writes one JSON line per round (``docs/telemetry.md``): a path, or
        ``hvd_hetero.telemetry.Telemetry(path, every=…)`` to write every k-th round.
        None: nowhere.
    progress
        If True, rank 0 writes rounds, samples per second, waiting and batches to standard error, every ten seconds.
    patience
        How long a rank waits for others before it reports which one, and before it ends the job if that cannot go on
        (``hvd_hetero.watchdog.Patience``, ``docs/waiting.md``). None: as ``HVD_HETERO_PATIENCE`` says, or the defaults.
    """

    _session: FitSession

    def __init__(
        self,
        policy: str | Policy = "lb-bsp",
        *,
        global_batch: int | Goodput,
        sync: str | Mixing = "allreduce",
        allow_nan: bool = False,
        local_layers: Sequence[Any] = (),
        telemetry: str | os.PathLike[str] | Telemetry | None = None,
        progress: bool = False,
        patience: Patience | None = None,
    ) -> None:
        if not TensorFlowWire().initialized:
            raise ValueError("Horovod is not initialised; call hvd.init() before LoadBalance(…)")
        super().__init__()
        self._session = FitSession(
            policy, global_batch, self, local_layers,
            telemetry=telemetry, progress=progress, sync=sync, allow_nan=allow_nan, patience=patience,
        )  # fmt: skip
        self._session.balancer.agreement.remedies = _REMEDIES

    def start(self, model: Any, optimizer: Any) -> None:
        """Give all ranks rank 0's weights and optimizer state, in a loop of your own. ``fit`` does so by itself.

        At the beginning of an epoch ``batches`` builds and broadcasts all variables that the first batch would build,
        also those of layers that were added since the last epoch.
        """
        self._session.start(model, optimizer)
        self._session.adapt_rate(optimizer)

    def batches(self, data: BalancedDataset) -> Iterator[Any]:
        """Yield this rank's batches of one epoch, for your own loop around ``weighted_gradients``; see there.

        Each is a round, which ends when the next is asked for.
        """
        session = self._session
        balancer, calls = session.balancer, session.calls
        if not session.sums_gradients:
            raise ValueError(
                f"{session.averaging} does more than average gradients at the end of a round, which only model.fit "
                "can do. Use fit, or another policy and sync='allreduce'"
            )
        if not isinstance(data, BalancedDataset):
            raise ValueError(
                f"data must come from resize_batches, whose batches follow the plan, got {type(data).__name__}; write "
                "balance.batches(resize_batches((x, y), balance)), with map behind resize_batches at most"
            )
        if session.common_start.local_layers:
            raise ValueError(
                "local_layers are for model.fit: weighted_gradients averages all that it gets. Leave them out, and "
                "update those layers by gradients of your own tape"
            )
        if data.queue.has_micro_batches:
            raise ValueError(
                "max_micro_batch_cost is for model.fit: a round of a custom loop is one batch. Leave it out, and "
                "give LoadBalance a smaller global_batch"
            )
        for model, optimizer in session.common_start.new(data.element_spec):
            session.start(model, optimizer)
        session.trains_here()
        session.course.queue = queue = data.queue
        session.course.follow_epoch(queue)
        # A loop that was left before its last batch was used has left a round open.
        balancer.discard_round()
        iterator = iter(data)
        number = 0
        while number == 0 or not queue.at_end:
            queue.prepare(new=number == 0)
            calls.prepare()
            batch = next(iterator)
            calls.begin_whole_round()
            if queue.weight_of is not None:
                calls.weigh(float(number_from("weight_of", queue.weight_of, batch)))
            yield batch
            balancer.expect_next()
            calls.applied()
            number += 1

    @property
    def samples(self) -> int:
        """Samples of this rank in the latest round; 0 if its batch is a stand-in, which weighs nothing."""
        return self._session.calls.samples

    def release(self) -> None:
        """Unwrap the model and its optimizer, which then train this rank alone."""
        self._session.release()

    # What Keras calls.

    def set_model(self, model: Any) -> None:
        """Wrap the optimizer and the train step, before the train function is made of them."""
        session = self._session
        if self.model not in (None, model):
            # Another model's noise and progress say nothing about this one.
            session.balancer.begin_anew()
        super().set_model(model)
        session.course.skipped = 0
        if is_wrapped(session, model):
            return
        session.release()
        release_from_others(model)
        check_compiled(model)
        if session.course.queue is not None:
            build_model(model, model.train_step, session.course.queue.spec)
            build_metrics(model, session.course.queue.spec)
        wrap(session, model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Start all ranks from rank 0's weights."""
        self._session.train_begins(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the number of the epoch, which decides the order of its samples."""
        self._session.course.epoch_begins(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Note whether this is the last step of the epoch."""
        self._session.course.step_begins(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop all ranks, if a callback of one of them has asked for it."""
        self._session.epoch_ends(self.model)

    def on_train_end(self, logs: Any = None) -> None:
        """End training, on all ranks; if each has its own model, all get the mean."""
        session = self._session
        session.course.ends()
        if session.mixing is not None:
            average(trained_variables(self.model), session.wire, session.prefix)

    def on_test_end(self, logs: Any = None) -> None:
        """End an evaluation; if this rank had no batch of it, tell the other ranks."""
        self._session.evaluation.ends()

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begin an evaluation at step 0, or continue it."""
        self._session.evaluation.step_begins(batch)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keep the evaluation's logs, in case that this was its last batch."""
        self._session.evaluation.step_ends(logs or {})

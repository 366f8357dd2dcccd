"""The callback: what ``fit`` needs for the ranks to train one model together, each at its own pace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_hetero.consistency import WaysOut
from hvd_hetero.errors import HeteroError
from hvd_hetero.policies import Policy
from hvd_hetero.session import Session
from hvd_hetero.topology.mixing import Mixing
from hvd_hetero.watchdog import Patience
from keras_callbacks import keras_versions
from keras_callbacks.custom_loop import batches
from keras_callbacks.metrics.of_all_ranks import Figures, global_results
from keras_callbacks.pipeline.balanced_dataset import BalancedDataset, refuses_resized
from keras_callbacks.pipeline.queue import RoundQueue
from keras_callbacks.start import CommonStart
from keras_callbacks.step.calls import RoundCalls
from keras_callbacks.step.exchange import AllReduce, average, exchange_of
from keras_callbacks.step.failures import tells_failures
from keras_callbacks.step.graph import GraphRound
from keras_callbacks.step.train_function import EPOCH_IS_OVER, RoundFunction

__all__ = ["LoadBalance"]

_WAYS_OUT = WaysOut(
    fingerprint="Give all ranks the same policy, global_batch, data, shuffle, seed and prefetch of resize_batches, and "
    "the same epochs, initial_epoch and steps_per_epoch of fit",
    settings="Change them on all ranks alike and before the same step: by a schedule of the optimizer, or by a "
    "callback that all ranks have and that decides by the step or by the logs of an epoch, which are the same "
    "everywhere (those of a step are the rank's own)",
    witness="A callback that writes weights, or loads them, must do so on every rank alike; and train_step must change "
    "weights by model.optimizer alone, unless they are of local_layers",
    unused="In a loop of your own, call weighted_gradients once for every batch, also for one that you would rather "
    "skip; to accumulate, set max_micro_batch of the policy and train by fit",
    waiting="Give all ranks the same epochs and callbacks, and call collectives of your own on all of them alike: not "
    "in a callback or a part of train_step that one rank leaves out",
)


class LoadBalance(RoundCalls, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """How the global batch is divided among the ranks. Make one per training, after ``hvd.init()``, alike on all ranks.

        balance = LoadBalance(policy="lb-bsp", global_batch=512)
        model.compile(optimizer, loss)
        model.fit(resize_batches((x, y), balance), epochs=5, callbacks=[balance])

    In ``fit`` it wraps the compiled optimizer, broadcasts rank 0's weights and optimizer state, and makes a step of
    ``fit`` a round: all ranks do the same number of steps. Metrics are those of all ranks' samples at the end of
    each epoch, whatever the order of the callbacks. The wrapper stays for the next ``fit``; ``release()`` takes it off.

    Parameters
    ----------
    policy
        A name (``"bsp"``, ``"lb-bsp"``, ``"self-adaptive"``, ``"non-blocking"``, ``"elastic-bsp"``) or a policy object
        (``StaticAllocation([3, 7])``).
    global_batch
        Samples per round over all ranks together: what one process would call its batch size. (Under ElasticBSP, of one
        iteration of every rank.)
    sync
        ``"allreduce"``, ``"d-psgd"`` or ``"matcha"``, or one of the last two with a graph of your own
        (``hvd_hetero.topology.mixing``). Under the last two ranks hold different models, and the end of ``fit`` gives
        all of them the mean.
    local_layers
        Layers that every rank trains by itself, on its own samples: neither broadcast nor synchronised.
    telemetry
        Where rank 0 writes one JSON line per round (``docs/telemetry.md``). None: nowhere.
    patience
        How long a rank waits for others before it says for which one, and before it ends the job if that cannot go on
        (``hvd_hetero.watchdog.Patience``, ``docs/waiting.md``). None: as ``HVD_HETERO_PATIENCE`` says, or the defaults.
    """

    def __init__(
        self,
        policy: str | Policy = "lb-bsp",
        *,
        global_batch: int,
        sync: str | Mixing = "allreduce",
        local_layers: Sequence[Any] = (),
        telemetry: str | Path | None = None,
        patience: Patience | None = None,
    ) -> None:
        if not hvd.is_initialized():
            raise ValueError("Horovod is not initialised; call hvd.init() before LoadBalance(…)")
        tf.keras.callbacks.Callback.__init__(self)
        self._training = Session(
            policy, hvd.rank(), hvd.size(), global_batch, telemetry, sync=sync, wire=hvd, patience=patience,
            waits_at_the_end_in=("tensorflow.",),
        )  # fmt: skip
        RoundCalls.__init__(self, self._training, tuple(local_layers))
        self.balancer.ways_out = _WAYS_OUT
        if local_layers and (self.mixing is not None or self.policy.updates_locally):
            raise ValueError(
                "local_layers go with averaged gradients only; use sync='allreduce' and a policy that does not update "
                "locally"
            )
        self.fitting = False
        self.last_step = False
        """whether the step at hand is the last of its epoch, as far as fit knows"""
        self.skipped = 0
        """steps of the epoch at hand that were done before this fit"""
        self.elastic = False
        """whether an elastic state follows this training"""
        self.evaluated: dict[str, Any] | None = None
        """what the last step of an evaluation has told, whose figures are of this rank alone"""
        self.warned: set[str] = set()
        """of which figures a warning has said that they are not of all samples"""
        self._tests: Figures | None = None
        self._undo: list[Callable[[], None]] = []
        self.common_start = CommonStart(self.prefix, self.local_layers)
        self.all_reduce = AllReduce(self)

    # What users ask.

    @property
    def rounds(self) -> int:
        """Rounds that all ranks have finished. The same number on every rank."""
        return self.balancer.rounds

    @property
    def plan(self) -> tuple[int, ...]:
        """Samples of every rank in the round at hand (between rounds: in the next one)."""
        return self.balancer.plan().samples

    @property
    def batch_size(self) -> int:
        """Samples of this rank in the round at hand (between rounds: in the next one)."""
        return self.plan[self.balancer.rank]

    def close(self) -> None:
        """Finish the telemetry, the signals and the watchdog. Done by itself when the process ends."""
        self._training.close()

    def release(self) -> None:
        """Give the model its plain optimizer back, which then trains this rank alone."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._optimizer = None

    def start(self, model: Any, optimizer: Any) -> None:
        """Give all ranks rank 0's weights and optimizer state. ``fit`` does so by itself; for loops of your own.

        What the first batch of a model would build, ``batches`` builds and broadcasts at the beginning of an epoch,
        and so layers that have been added since the last one.
        """
        keras_versions.check_layers(model, self.policy.name)
        weights = self.common_start.give(model, optimizer)
        together = self.mixing is None and not self.policy.updates_locally
        self._witnesses = [v for v in weights if v.trainable and v.shape.num_elements()] if together else []
        self._witness = 0.0
        self._optimizer = optimizer
        self._pending.clear()
        self.balancer.abandon()
        self.failure = None
        self.stop_agreed = False

    def batches(self, data: BalancedDataset) -> Iterator[Any]:
        """The batches of one epoch, for a loop of your own around ``weighted_gradients``; see there."""
        return batches(self, data)

    # What fit says.

    def set_model(self, model: Any) -> None:
        """Wrap the optimizer and the train step, before the train function is made of them."""
        super().set_model(model)
        self.skipped = 0
        if self._optimizer is not None and self._optimizer is model.optimizer and self._function_is_ours(model):
            return
        self.release()
        for attributes in (model.__dict__, getattr(model.optimizer, "__dict__", {})):
            for value in list(attributes.values()):
                if isinstance(former := getattr(value, "wrapped_by", None), LoadBalance):
                    former.release()  # it trained this model, or this optimizer, before
        keras_versions.check_compiled(model)
        self.balancer.meter.queued = bool(tf.config.get_visible_devices("GPU"))
        if self.policy.measures and self.balancer.meter.queued:
            raise ValueError(
                f"policy {self.policy.name!r} cannot time work on a GPU in Keras yet; use policy='bsp' or "
                "StaticAllocation([…]) there"
            )
        if self.queue is not None:
            keras_versions.build(model, model.train_step, self.queue.spec)
        self._attach(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Start all ranks from rank 0's weights."""
        if self.queue is None:
            raise ValueError(
                "fit was given data that this LoadBalance cannot resize; write "
                "model.fit(resize_batches((x, y), balance), callbacks=[balance]), without batch_size"
            )
        model = self.model
        keras_versions.build_optimizer(model.optimizer, model.trainable_variables)
        self.start(model, model.optimizer)
        self.fitting = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the number of the epoch, which decides the order of its samples."""
        assert self.queue is not None, "on_train_begin has checked it"
        self.queue.want_epoch(epoch)
        self._meet(leaving=False)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Note whether this is the last step of the epoch."""
        self.last_step = batch + 1 + self.skipped == (self.params or {}).get("steps")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """All ranks stop, if one of them wants to."""
        self.skipped = 0
        if made := self.common_start.lacks(self.model.trainable_variables):
            raise HeteroError(
                f"{len(made)} variables were made in the course of training, first {made[0].name!r}, so each rank has "
                "values of its own; make all layers in the model's constructor, or build them before fit"
            )
        stops = hvd.allreduce(tf.constant(int(self.wants_to_stop)), op=hvd.Sum, name=f"{self.prefix}.stop")
        self.model.stop_training = bool(stops > 0)

    def on_train_end(self, logs: Any = None) -> None:
        """Training is over, on all ranks."""
        self._meet(leaving=True)
        self.fitting = False
        if self.mixing is not None:
            average(keras_versions.trained_variables(self.model), self.prefix)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """An evaluation begins, or goes on, and its figures are not complete."""
        self.evaluated = None
        if batch == 0 and self._tests is not None:
            self._tests.begin()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Perhaps they are now."""
        self.evaluated = dict(logs or {})

    @property
    def wants_to_stop(self) -> bool:
        """Whether this rank would end training: a callback has said so."""
        stops = self.fitting and self.model.stop_training
        return bool(stops) and stops is not EPOCH_IS_OVER

    def _meet(self, *, leaving: bool) -> None:
        """Wherever a rank begins an epoch or leaves training, all do: else the rest would wait for it for ever."""
        leavers = int(hvd.allreduce(tf.constant(int(leaving)), op=hvd.Sum, name=f"{self.prefix}.meet"))
        if 0 < leavers < hvd.size():
            raise HeteroError(
                f"{leavers} of {hvd.size()} ranks left fit, and the others began another epoch. Give all ranks the "
                "same number of epochs; where a callback of yours stops training on one rank, put balance behind it in "
                "callbacks, which tells the others"
            )

    def _attach(self, model: Any) -> None:
        exchange = exchange_of(self, model)
        graph = GraphRound(self, exchange)
        self._optimizer = model.optimizer
        if isinstance(exchange, AllReduce) and not self.policy.accumulates and not self.local_layers:
            self._undo.append(keras_versions.loss_passes_through(model, graph.weigh))
        self._undo.append(keras_versions.gradients_pass_through(model.optimizer, graph.receive, self))
        figures, self._tests = Figures(self, model), Figures(self, model)
        step = graph.train_step(model.train_step, figures)
        step.wrapped_by = self  # type: ignore[attr-defined]
        self._undo.append(_set(model, "train_step", step))
        self._undo.append(_set(model, "test_step", _observed(model.test_step, self._tests)))
        model.make_train_function(force=True)
        model.train_function = function = RoundFunction(self, model, model.train_function, figures)
        results = global_results(self, model, self._tests, function.close_epoch)
        self._undo.append(_set(model, "get_metrics_result", results))
        model.test_function = None  # it may be that of the plain step

        evaluate = refuses_resized(tells_failures(model.evaluate, lambda: self.elastic))
        self._undo.append(_set(model, "evaluate", evaluate))

        def forget_functions() -> None:
            model.train_function = model.test_function = None

        self._undo.append(forget_functions)

    def _function_is_ours(self, model: Any) -> bool:
        function = model.train_function
        return isinstance(function, RoundFunction) and function.balance is self

    @property
    def epoch_is_over(self) -> bool:
        """Between rounds: whether all ranks know that the epoch at hand has no further step."""
        return self.stop_agreed or self.last_step or (self.queue is not None and self.queue.at_end)

    def go_on(self, place: Mapping[str, Any], steps: int) -> None:
        """The fit that begins goes on in the middle of an epoch, of which so many steps are done."""
        assert self.queue is not None, "resize_batches comes before fit"
        self.queue.go_on(place)
        whole, left = self.queue.rounds, self.queue.rounds_left
        self.skipped = steps
        if whole is not None and left is not None and (self.params or {}).get("steps") == whole:
            self.skipped = whole - left  # it may have been begun in rounds of another size, by other ranks

    def use(self, queue: RoundQueue) -> None:
        """Batches come from this queue from now on."""
        self.queue = queue


def _observed(step: Callable[[Any], Any], figures: Figures) -> Callable[[Any], Any]:
    return keras_versions.as_it_is(lambda data: figures.observed(keras_versions.as_keras_would(step), data))


def _set(model: Any, name: str, value: Any) -> Callable[[], None]:
    former = {name: model.__dict__[name]} if name in model.__dict__ else {}
    object.__setattr__(model, name, value)

    def undo() -> None:
        model.__dict__.pop(name, None)
        model.__dict__.update(former)

    return undo

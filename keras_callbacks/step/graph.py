"""A round inside TensorFlow's graph: the new train step, and the places where the clock is read.

    batch ─ begin ─ forward, backward ─── last gradient ───── report ─▶ allreduce of the table ─ agree
              ▲          └─▶ allreduce of each bucket ─▶ update ▲                                  ▲
         balancer.begin                                   balancer.report                    balancer.agree

``begin``, ``report`` and ``agree`` are calls back into Python, tied into the graph by dependencies: the compute time
ends when the last gradient is ready, and the waiting time when the table is there. A round of several micro-batches is
a loop in the graph over slices of the batch; after each, a call of ``proceed`` decides whether another one follows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvd_hetero.errors import RoundStateError
from keras_callbacks.keras_versions import Update, as_keras_converts, names_of, tf_variables, without_autograph
from keras_callbacks.metrics.of_all_ranks import JoinedMetrics
from keras_callbacks.step.calls import RoundCalls, RoundWeights
from keras_callbacks.step.graph_synchroniser import Gradient, GraphAllreduce, GraphSynchroniser, scaled
from keras_callbacks.step.own_changes import changed_by, trained_by
from keras_callbacks.step.weights import Weights

logger = logging.getLogger(__name__)

# The numbers that describe a micro-batch which begins: the first row and the number of rows of its slice, whether it is
# one (0 at the round's end), this rank's ``RoundWeights``, and the micro-batch's fraction of the round's samples.
_BEGIN, _SIZE, _MORE, _WEIGHT = range(4)
_WEIGHTS = slice(_WEIGHT, _WEIGHT + len(RoundWeights))
_PLANNED = _WEIGHT + RoundWeights.PLANNED
_PART = _WEIGHT + len(RoundWeights)
_NUMBERS = _PART + 1


class GraphRound:
    """One training's rounds in the graph. Its methods are called while the train step is traced."""

    def __init__(
        self,
        calls: RoundCalls,
        synchroniser: GraphSynchroniser,
        local_layers: Sequence[Any] = (),
        weights: Weights | None = None,
        *,
        gathers: bool = False,
        lacks: Callable[[Iterable[Any]], list[Any]] = lambda variables: [],
    ) -> None:
        """``gathers``: a round may have several micro-batches. ``lacks`` returns variables that were not broadcast."""
        self._calls = calls
        self._local_layers = local_layers
        self._synchroniser = synchroniser
        self._weights = Weights() if weights is None else weights
        self._gathers = gathers
        self._lacks = lacks
        self._updated: list[Any] = []  # variables that the update of the traced step changes
        self._state: tf.Tensor | None = None
        self._counted: tf.Tensor | None = None
        """This rank's weights in a round of one micro-batch, if that weighs something else than its samples."""
        self._weighed = False
        """True if the loss of this round is weighted, and with it its gradients."""
        self._gathered: tuple[list[Any], tf.Tensor | None, list[Any], Update] | None = None
        self._gathering = False
        self._graph: Any = None  # of the step that is traced
        self._looked = not isinstance(synchroniser, GraphAllreduce)

    def train_step(self, step: Callable[[Any], Any], figures: JoinedMetrics) -> Callable[[Any], Any]:
        """Return a train step of a whole round, whose update is synchronised and whose figures are observed."""
        whole = self._several if self._gathers else self._one
        self._figures = figures

        def observed(data: Any, state: tf.Tensor, *, again: bool = False) -> Any:
            self._graph = graph = tf.compat.v1.get_default_graph()
            self._updated = []
            self._weights.begin(data, state[_PART])
            try:
                # A tape names the gradients of operations by their scope, and `own_changes` finds them by that name.
                with tf.name_scope("step"):
                    logs = figures.observed(as_keras_converts(step), data, lambda: self._fractions(state), again=again)
            finally:
                self._weights.end()
            if self._updated and not (again or tf.executing_eagerly()):  # else the step is refused for that
                self._require_synchronised(trained_by(graph, self._lacks))
            return logs

        return without_autograph(lambda data: whole(observed, data))

    def weigh(self, loss: Any) -> Any:
        """Return the loss for the train step's gradients: times the weight, if its gradients may be weighted so."""
        # The alternative, a product with every gradient, is another pass over all their memory: overhead_keras.py gave
        # 1.043 for it, and 1.013 for this (convolutional).
        if self._state is None or getattr(loss, "dtype", None) not in (tf.float32, tf.float64):
            return loss  # a narrower type would round the weight
        # A user's own backward pass need not be in proportion to its input.
        if tf.executing_eagerly() or _has_custom_gradients(tf.compat.v1.get_default_graph()):
            return loss
        self._weighed = True
        return loss * tf.cast(self._round_weights(self._state)[RoundWeights.GRADIENT], loss.dtype)

    def _round_weights(self, state: tf.Tensor) -> tf.Tensor:
        """Return this rank's weights in a round of one micro-batch."""
        if self._counted is None and (weight := self._weights.weight()) is not None:
            self._counted = self._calls.host.ask(self._calls.weigh, len(RoundWeights), weight)
        return state[_WEIGHTS] if self._counted is None else self._counted

    def _fractions(self, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the micro-batch's fraction of means over the round, as known after its step; and of its samples."""
        if self._gathering:
            # By plan: `correct` follows once the round's weight is known.
            weight = None if self._gathered is None else self._gathered[1]
            return _part_of_round(state, weight), state[_PART]
        synchroniser = self._synchroniser
        if self._counted is None or synchroniser.correction is None:
            return state[_PART], state[_PART]
        return self._counted[RoundWeights.GRADIENT] * synchroniser.correction, state[_PART] / synchroniser.samples_done

    def receive(self, gradients: list[Any], variables: list[Any], update: Update) -> Any:
        """Return the update by the gradients that the train step hands to the optimizer, or keep them for its end."""
        self._look_at(gradients, variables)
        self._updated = [v for g, v in zip(gradients, variables, strict=True) if g is not None]
        if self._gathering:
            if self._gathered is not None:
                raise ValueError(_TWICE)
            self._gathered = gradients, self._weights.weight(), variables, update
            if self._calls.balancer.policy.updates_locally:
                self._update_locally(gradients, update)
            return None
        state, self._state = self._state, None
        weighed, self._weighed = self._weighed, False
        if state is None:
            raise RoundStateError(_OUTSIDE)
        return update(self._synchronised(gradients, variables, self._round_weights(state), weighed))

    def _require_synchronised(self, trained: list[tf.Variable]) -> None:
        """Refuse variables that the step trains beside the synchronised update, or that were not broadcast."""
        synchronised = set(names_of(updated := tf_variables(self._updated))) | self._own()
        beside = [v for v in trained if v._unique_id not in synchronised]
        if found := beside + self._lacks(updated):
            raise ValueError(_BESIDE.format(number=len(found), name=found[0].name.removesuffix(":0")))

    def _own(self) -> set[str]:
        """Return the names of what this rank trains by itself."""
        return set(names_of(tf_variables(v for layer in self._local_layers for v in layer.trainable_variables)))

    def _look_at(self, gradients: list[Any], variables: list[Any]) -> None:
        """Refuse an update that only some rounds make; warn, once, of gradients that are changed before the sum."""
        # Without this, an update in a tf.cond failed with an error that blamed prefetching.
        graph = tf.compat.v1.get_default_graph()
        while graph is not None and graph is not self._graph:
            if type(graph).__name__ in _IN_A_BRANCH:
                raise ValueError(_SOMETIMES)
            graph = getattr(graph, "outer_graph", None)
        if not self._looked:
            self._looked = True
            if (operation := changed_by(gradients, variables)) and self._calls.balancer.rank == 0:
                logger.warning(_CHANGED, operation)

    def _one(self, step: Callable[..., Any], data: Any) -> Any:
        """Do a round of one micro-batch: the update happens where the train step makes it."""
        self._state, data = self._begin(data)
        self._weighed, self._counted = False, None
        try:
            logs = step(data, self._state)
        except BaseException:
            self._state = None  # so that an evaluation that follows is not taken for part of this round
            raise
        if self._state is not None:
            self._state = None
            raise ValueError(_NEVER)
        return logs

    def _several(self, step: Callable[..., Any], data: Any) -> Any:
        """Do a round of any number of micro-batches: the update follows when all are done."""
        self._state, data = self._begin(data)
        self._counted = None
        before = self._figures.read()
        try:
            gradients, weight, (variables, update), logs = self._gather(step, data, self._state)
            if advanced := self._figures.advanced:
                names = ", ".join(sorted(repr(getattr(v, "path", v.name)) for v in advanced)[:3])
                raise ValueError(_ADVANCED.format(number=len(advanced), names=names))
        except BaseException:
            self._state = None
            raise
        state = self._proceed(gradients, weight)

        def body(state: tf.Tensor, gradients: list[Gradient], logs: Any) -> tuple[Any, ...]:
            # Only a round's first micro-batch may be a stand-in: those of the loop have samples, and update locally.
            self._state = None
            more, weight, _, latest = self._gather(step, data, state, again=True)
            total = [_added(a, b) for a, b in zip(gradients, more, strict=True)]
            logs = self._over_micro_batches(logs, latest, state)
            return self._proceed(total, weight), total, logs

        # Gradients are loop variables, so rounds of one micro-batch keep no memory for them, and no shape changes with
        # the sizes: the step is traced once. Only gradients of rows grow, by rows.
        start = (state, gradients, logs)
        shapes = tf.nest.map_structure(_shape_in_loop, start)
        # One iteration at a time: two at once would need the memory of two micro-batches.
        state, gradients, logs = tf.while_loop(
            lambda state, *_: state[_MORE] > 0, body, start, shape_invariants=shapes, parallel_iterations=1
        )
        self._state = None
        reached = [v for v in variables if v is not None]
        reduced = iter(self._synchronised(gradients, reached, state[_WEIGHTS], weighed=True))
        if weight is not None and self._synchroniser.correction is not None:
            self._figures.correct(before, self._synchroniser.correction, self._synchroniser.samples_done)
        if not self._calls.balancer.policy.updates_locally:
            update([None if v is None else next(reduced) for v in variables])
        return logs

    def _proceed(self, gradients: list[Gradient], weight: tf.Tensor | None) -> tf.Tensor:
        """Return what follows, now that all of a micro-batch is computed."""
        parts = tf.nest.flatten(gradients, expand_composites=True)
        weights = [] if weight is None else [weight]
        return self._calls.host.ask(self._calls.proceed, _NUMBERS, *weights, after=parts, timed=True)

    def _over_micro_batches(self, logs: Any, latest: Any, state: tf.Tensor) -> Any:
        """Return, for figures of the batch, means over the micro-batches so far, by samples; the latest of others."""
        if not isinstance(logs, dict):
            return latest
        part = state[_SIZE] / (state[_BEGIN] + state[_SIZE])

        def mean(former: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
            return former + (new - former) * tf.cast(part, new.dtype) if new.dtype.is_floating else new

        return {
            name: tf.nest.map_structure(mean, logs[name], new) if self._figures.is_of_the_batch(name) else new
            for name, new in latest.items()
        }

    def _gather(
        self, step: Callable[..., Any], data: Any, state: tf.Tensor, *, again: bool = False
    ) -> tuple[list[Gradient], tf.Tensor | None, tuple[list[Any], Update], Any]:
        """Return the weighted gradients of one micro-batch, its weight, the variables, their update, and the logs.

        None stands for a variable without gradient.
        """
        self._gathering, self._gathered = True, None
        try:
            with self._calls.host.for_batches():
                micro_batch = _slice(data, state)
            logs = step(micro_batch, state, again=again)
        finally:
            self._gathering = False
        if self._gathered is None:
            raise ValueError(_NEVER)
        gradients, weight, variables, update = self._gathered
        self._gathered = None
        logs = tf.nest.map_structure(tf.convert_to_tensor, logs)
        reached = [None if g is None else v for g, v in zip(gradients, variables, strict=True)]
        # Weighted here and not at the round's end: the sum needs no factor for what was gathered before, and the NaN of
        # a mean over nothing is gone.
        present = scaled([g for g in gradients if g is not None], _part_of_round(state, weight))
        return present, weight, (reached, update), logs

    def _update_locally(self, gradients: list[Any], update: Update) -> None:
        if self._state is None:
            update(gradients)
            return

        def updated() -> tf.Tensor:
            update(gradients)
            return tf.constant(0)

        # A stand-in must leave no trace: not even in the momentum, which zero gradients would change.
        tf.cond(self._state[_WEIGHT] > 0, updated, lambda: tf.constant(0))

    def _begin(self, data: Any) -> tuple[tf.Tensor, Any]:
        """Start the clock once the batch is there; return the first micro-batch's numbers, and the batch."""
        parts = tf.nest.flatten(data, expand_composites=True)
        size = tf.shape(next(part for part in parts if isinstance(part, tf.Tensor)), out_type=tf.int64)[0]
        kept = parts if self._calls.micro_batches.repeats else []
        state = self._calls.host.ask(self._calls.begin_round, _NUMBERS, size, *kept, after=parts)
        # TensorFlow orders calls by dependencies alone, so nothing of the step may begin before the clock has.
        with tf.control_dependencies([state]), self._calls.host.for_batches():
            return state, tf.nest.map_structure(tf.identity, data, expand_composites=True)

    def _synchronised(
        self, gradients: list[Any], variables: list[Any], weights: tf.Tensor, weighed: bool = False
    ) -> list[Any]:
        """Return the gradients to update with: sums over ranks for shared variables, this rank's own for local ones."""
        own = self._own()
        shared = [
            g is not None and name not in own
            for g, name in zip(gradients, names_of(tf_variables(variables)), strict=True)
        ]
        present = [g for g, here in zip(gradients, shared, strict=True) if here]
        if not present:
            raise ValueError(
                "the loss reaches no variable that ranks share and train; give compile a loss, and check trainable and "
                "local_layers"
            )
        reduced = iter(self._synchroniser(present, weights, weighed=weighed))
        its_own = [g for g, here in zip(gradients, shared, strict=True) if g is not None and not here]
        kept = iter(scaled(its_own, weights[RoundWeights.OWN_MEAN]))  # zero if the rank has held no data
        return [
            None if g is None else next(reduced if here else kept) for g, here in zip(gradients, shared, strict=True)
        ]


def _has_custom_gradients(graph: Any) -> bool:
    """Return whether an operation of the graph, or of a function in it, has a custom gradient, by TensorFlow's type."""
    return b"CustomGradient-" in graph.as_graph_def().SerializeToString()


def _part_of_round(state: tf.Tensor, weight: tf.Tensor | None) -> tf.Tensor:
    """Return a micro-batch's fraction of the round as planned: by its weight if it has one, else by its samples."""
    return state[_PART] if weight is None else weight / state[_PLANNED]


def _added(former: Gradient, new: Gradient) -> Gradient:
    """Return the sum of what was gathered and the new gradient: rows are laid end to end."""
    if not isinstance(new, tf.IndexedSlices):
        return former + new
    values = tf.concat([former.values, new.values], 0)
    return tf.IndexedSlices(values, tf.concat([former.indices, new.indices], 0), new.dense_shape)


def _shape_in_loop(part: Gradient) -> tf.TensorShape:
    return tf.TensorShape([None, *part.shape[1:]]) if isinstance(part, tf.IndexedSlices) else part.shape


def _slice(data: Any, state: tf.Tensor) -> Any:
    begin = tf.cast(state[_BEGIN], tf.int64)
    end = begin + tf.cast(state[_SIZE], tf.int64)
    return tf.nest.map_structure(lambda part: part[begin:end] if isinstance(part, tf.Tensor) else part, data)


_TWICE = (
    "train_step called the optimizer twice, and LoadBalance synchronises one update per step; add the losses, or "
    "update in one call"
)
_IN_A_BRANCH = {"CondBranchFuncGraph", "WhileBodyFuncGraph"}  # not public: where there are none, nothing is refused
_SOMETIMES = (
    "train_step calls model.optimizer in a branch or a loop (tf.cond), and every round ends with one update. Call it "
    "once per step, outside; to accumulate, set max_micro_batch of the policy, or the optimizer's "
    "gradient_accumulation_steps"
)
_CHANGED = (
    "train_step changes gradients, or weights by them, before ranks sum them (%r), so the result depends on how the "
    "batch is divided. The optimizer gets the sum: use its clipnorm, global_clipnorm or clipvalue, or override "
    "apply_gradients in a subclass of it"
)
_BESIDE = (
    "train_step trains {number} variables, first {name!r}, that LoadBalance does not synchronise: it sums gradients "
    "that model.optimizer gets for variables of the model. Make all models that train_step trains attributes of the "
    "one that fit trains, and update them in one call of its optimizer; torch_hooks takes several optimizers"
)
_NEVER = (
    "train_step did not call model.optimizer, so nothing would be synchronised; update by "
    "self.optimizer.apply_gradients(zip(gradients, self.trainable_variables)). If a tf.function of yours does so, it "
    "was traced before the optimizer was wrapped: in a fit without LoadBalance, or to build layers. Build all layers "
    "before (give them an Input), use a new model, or leave the decorator out"
)
_ADVANCED = (
    "train_step, or a layer, advances {number} variables by itself, among them {names}. Under this policy it runs once "
    "per micro-batch, before the update, so ranks would advance them differently. Advance them in a callback's "
    "on_train_batch_end, or choose a policy without micro-batches ('bsp' or 'lb-bsp', without max_micro_batch)"
)
_OUTSIDE = (
    "this optimizer was called outside of a round. Train by model.fit(…, callbacks=[balance]) with the LoadBalance "
    "that wraps it, and call it once per train_step. Or call balance.release() to have the plain optimizer back"
)

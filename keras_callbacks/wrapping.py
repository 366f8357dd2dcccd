"""A compiled model whose ``fit`` trains on all ranks: its optimizer and its steps are wrapped, until released."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_callbacks.keras_versions import (
    as_keras_converts,
    averaged_variables,
    gradients_pass_through,
    loss_passes_through,
    losses_pass_through,
    replace_attribute,
    trained_variables,
    without_autograph,
)
from keras_callbacks.metrics.of_all_ranks import Evaluation, JoinedMetrics, global_results
from keras_callbacks.pipeline.balanced_dataset import refuses_resized
from keras_callbacks.session import FitSession
from keras_callbacks.step.graph import GraphRound
from keras_callbacks.step.graph_synchroniser import (
    GraphAllreduce,
    GraphLocalUpdates,
    GraphNeighbourAverage,
    GraphSynchroniser,
)
from keras_callbacks.step.weights import Weights, common_count
from keras_callbacks.tensorflow_wire import translated_failures
from keras_callbacks.train_function import RoundFunction


def is_wrapped(session: FitSession, model: Any) -> bool:
    """Return whether the model, and its present optimizer, are wrapped for this training."""
    function = model.train_function
    return (
        isinstance(function, RoundFunction)
        and function.session is session
        and function.optimizer is model.optimizer
        and (session.course.queue is None or function.traced == session.course.queue.traced)
    )


def release_from_others(model: Any) -> None:
    """Unwrap the model, and its optimizer, from their former trainings."""
    for attributes in (model.__dict__, getattr(model.optimizer, "__dict__", {})):
        for value in list(attributes.values()):
            if isinstance(former := getattr(value, "wrapped_by", None), FitSession):
                former.release()


def wrap(session: FitSession, model: Any) -> None:
    """Wrap the optimizer and the steps, before the train function is made of them."""
    synchroniser = _synchroniser_of(session, model)
    weight_of = None if session.course.queue is None else session.course.queue.weight_of
    weights = Weights(
        weight_of, lambda counts: session.calls.host.ask(common_count, 1, counts)[0], logs=session.wire.rank == 0
    )
    graph = GraphRound(
        session.calls, synchroniser, session.common_start.local_layers, weights,
        gathers=session.gathers, lacks=session.common_start.lacks,
    )  # fmt: skip
    if session.weighs:
        session.on_release(losses_pass_through(model, weights.of_loss))
    if isinstance(synchroniser, GraphAllreduce) and not session.gathers and not session.common_start.local_layers:
        session.on_release(loss_passes_through(model, graph.weigh))
    # Inside of what sums gradients, since the factor is known once they are summed.
    session.adapt_rate(model.optimizer)
    session.on_release(gradients_pass_through(model.optimizer, graph.receive, session))

    warned: set[str] = set()

    def figures() -> JoinedMetrics:
        return JoinedMetrics(model, session.wire, session.prefix, gathers=session.gathers, warned=warned)

    of_steps, of_tests = figures(), figures()
    step: Any = graph.train_step(model.train_step, of_steps)
    step.wrapped_by = session
    session.on_release(replace_attribute(model, "train_step", step))
    session.on_release(replace_attribute(model, "test_step", _observed(model.test_step, of_tests)))
    model.make_train_function(force=True)
    model.train_function = function = RoundFunction(session, model, model.train_function, of_steps)
    session.evaluation = Evaluation(of_tests, session.course.evaluated)
    results = global_results(model.get_metrics_result, session.evaluation.close, function.close_epoch)
    session.on_release(replace_attribute(model, "get_metrics_result", results))
    # It may have been made of the plain step.
    model.test_function = None
    evaluate = refuses_resized(translated_failures(lambda: session.elastic)(model.evaluate))
    session.on_release(replace_attribute(model, "evaluate", evaluate))
    session.on_release(replace_attribute(model, "predict", refuses_resized(model.predict)))

    def forget_functions() -> None:
        model.train_function = model.test_function = None

    session.on_release(forget_functions)


def _synchroniser_of(session: FitSession, model: Any) -> GraphSynchroniser:
    """Return the synchroniser for the policy and ``sync``."""

    def trained() -> list[tf.Variable]:
        # Asked for in tracing, when all variables exist.
        return trained_variables(model)

    if session.policy.updates_locally:
        return GraphLocalUpdates(session.calls, lambda: [*trained(), *averaged_variables(model.optimizer)])
    if session.mixing is not None:
        return GraphNeighbourAverage(session.calls, trained, session.mixing)
    return GraphAllreduce(session.calls)


def _observed(step: Callable[[Any], Any], figures: JoinedMetrics) -> Callable[[Any], Any]:
    return without_autograph(lambda data: figures.observed(as_keras_converts(step), data))

"""All differences between Keras 3 and tf_keras."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

# A function that receives (gradients, variables) once they are computed, and returns the update.
Update = Callable[[list[Any]], Any]
Receiver = Callable[[list[Any], list[Any], Update], Any]


def is_keras_3(model: Any) -> bool:
    """Return whether a model is of Keras 3; refuse one that is neither that nor of tf_keras."""
    if isinstance(model, tf.keras.Model):
        return any(cls.__module__.startswith("keras.src") for cls in type(model).__mro__)
    raise ValueError(
        f"the model is a {type(model).__module__}.{type(model).__name__}, and tf.keras is "
        f"{tf.keras.Model.__module__.partition('.')[0]} in this process. To train models of tf_keras, set the "
        "environment variable TF_USE_LEGACY_KERAS=1 before TensorFlow is imported; for those of Keras 3, leave it unset"
    )


def backend_of(model: Any) -> str:
    """Return the name of Keras's backend; tf_keras has "tensorflow" alone."""
    if not is_keras_3(model):
        return "tensorflow"
    import keras

    return str(keras.backend.backend())


def steps_per_execution(model: Any) -> int:
    """Return the steps of ``fit`` in one call of the train function."""
    steps = model.steps_per_execution if is_keras_3(model) else getattr(model, "_steps_per_execution", 1)
    return 1 if steps is None else int(steps)


def compiles_by_itself(model: Any) -> bool:
    """Return whether XLA was most likely chosen by ``jit_compile="auto"``, the default of Keras 3."""
    return bool(is_keras_3(model) and model._resolve_auto_jit_compile())


def build_model(model: Any, step: Callable[[Any], Any], spec: Any) -> None:
    """Build all variables that this step makes on such a batch, so that they can be broadcast."""
    if is_built(model) and weights_of(model):
        return
    try:
        # By tracing, as Keras itself: it computes nothing, so no seed moves on, and a model that is trained only by
        # train_step needs no call.
        tf.function(step, autograph=not is_keras_3(model)).get_concrete_function(spec)
    except Exception as error:
        raise ValueError(
            f"model {model.name!r} has parts that its first batch would build, and tracing a step to build them "
            f"failed: {type(error).__name__}: {error}. If training works without LoadBalance, build the model "
            "before fit: give it an Input, or call its parts on a batch"
        ) from error


def build_metrics(model: Any, spec: Any) -> None:
    """Make the metrics of ``compile`` before the train step is traced, which would be traced twice if it made them."""
    metrics = model._compile_metrics if is_keras_3(model) else model.compiled_metrics
    own_step = type(model).train_step is not tf.keras.Model.train_step  # may update metrics by other data
    if metrics is None or metrics.built or own_step or not isinstance(spec, tuple) or not model.built:
        return
    try:
        if not is_keras_3(model):
            metrics.build(model.compute_output_signature(spec[0]), spec[1])
            return
        import keras

        x, y, *_ = tf.nest.map_structure(
            lambda part: keras.KerasTensor(tuple(part.shape), keras.backend.standardize_dtype(part.dtype)), spec
        )
        metrics.build(y, model.compute_output_spec(x, training=False))
    except Exception:  # noqa: BLE001 - the train step meets it again, and says so where users look
        return


def build_optimizer(optimizer: Any, variables: list[Any]) -> None:
    """Build the optimizer's state, if it does not exist yet."""
    if hasattr(optimizer, "_create_all_weights"):  # of tf_keras.optimizers.legacy
        optimizer._create_all_weights(variables)
    elif not getattr(optimizer, "built", False):
        optimizer.build(variables)


def weights_of(model: Any) -> list[tf.Variable]:
    """Return all weights that exist by now, with the plain variables of a model, or of a layer."""
    # A model of tf_keras raises an error if it is asked before it is built.
    tells = model.built or not isinstance(model, tf.Module) or "build" not in type(model).__dict__
    listed = [*tf_variables(model.weights), *plain_variables(model)] if tells else []
    return list({v._unique_id: v for v in listed}.values())


def plain_variables(model: Any) -> list[tf.Variable]:
    """Return the ``tf.Variable``s in attributes, which Keras 3 does not count among the weights (tf_keras does)."""
    # If each rank kept its own, rank 0's would be saved: keras.io's VQ-VAE had -0.2157 and +0.0269 in its codebook.
    if isinstance(model, tf.Module):  # of tf_keras
        return []
    return [v for part in model._flatten_layers() for value in vars(part).values() for v in _variables_in(value)]


def _variables_in(value: Any) -> Iterator[tf.Variable]:
    if isinstance(value, tf.Variable):
        yield value
    elif isinstance(value, tf.Module):
        yield from value.variables
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _variables_in(part)


def is_built(model: Any) -> bool:
    """Return whether all parts of a model are built; a model that is not called never is itself."""
    return all(part.built for part in model._flatten_layers(include_self=has_call(model)))


def has_call(model: Any) -> bool:
    """Return whether a model can be called, and is not trained only by its ``train_step``."""
    return type(model).call is not tf.keras.Model.call


def tf_variables(variables: Iterable[Any]) -> list[tf.Variable]:
    """Return TensorFlow's variables behind Keras 3's; without look-up tables, which tf_keras counts as weights."""
    return [v if isinstance(v, tf.Variable) else v.value for v in variables if hasattr(v, "value")]


def names_of(variables: list[tf.Variable]) -> list[str]:
    """Return names that are unique in this process; the variables' own names are not."""
    return [v._unique_id for v in variables]


def optimizer_variables(optimizer: Any) -> list[tf.Variable]:
    """Return all state of an optimizer, in an order that all ranks share."""
    variables = optimizer.variables
    listed = tf_variables(variables() if callable(variables) else variables)
    names = set(names_of(listed))
    return listed + [v for v in _settings(optimizer) if v._unique_id not in names]  # tf_keras does not list them


def state_like(optimizer: Any, trained: Sequence[Any], names: Collection[str]) -> list[tf.Variable]:
    """Return the state that an optimizer keeps for each of these variables by itself, such as their momentum."""
    # Every optimizer of Keras keeps it in lists, in the order of the variables.
    variables = tf_variables(trained)
    lists = [each for each in vars(optimizer).values() if isinstance(each, list)]
    shapes = [tuple(v.shape) for v in variables]
    aligned = [tf_variables(each) for each in lists if [tuple(getattr(v, "shape", ())) for v in each] == shapes]
    return [v for each in aligned for v, of in zip(each, variables, strict=True) if of._unique_id in names]


def averaged_variables(optimizer: Any) -> list[tf.Variable]:
    """Return the state that follows the gradients, such as momentum."""
    # The settings are equal on all ranks, and their mean would only be rounded.
    names = set(names_of(_settings(optimizer)))
    return [v for v in optimizer_variables(optimizer) if v.dtype.is_floating and v._unique_id not in names]


def _settings(optimizer: Any) -> list[tf.Variable]:
    """Return the variables that callbacks and overflows change: the rate, other settings of tf_keras's, the scale."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    found = [
        getattr(inner, "_learning_rate", None),
        *getattr(inner, "_hyper", {}).values(),  # of tf_keras.optimizers.legacy
        getattr(optimizer, "dynamic_scale", None),
        *getattr(getattr(optimizer, "_loss_scale", None), "_weights", {}).values(),
    ]
    kept = (v for v in found if isinstance(v, tf.Variable) or isinstance(getattr(v, "value", None), tf.Variable))
    return tf_variables(kept)


def advanced_variables(model: Any) -> list[tf.Variable]:
    """Return the variables that a train step may advance, such as a copy of the weights: no metrics, no seeds.

    Plain variables of TensorFlow are among them.
    """
    apart = set(names_of(metrics_state(model)))
    return [v for v in weights_of(model) if v._unique_id not in apart]


def spectral_vectors(model: Any) -> list[tf.Variable]:
    """Return the vectors that SpectralNormalization advances, from the weights alone, in a branch of its graph."""
    kind = tf.keras.layers.SpectralNormalization
    return tf_variables(layer.vector_u for layer in model._flatten_layers() if isinstance(layer, kind) and layer.built)


def trained_variables(model: Any) -> list[tf.Variable]:
    """Return the variables that training changes by gradients."""
    return tf_variables(model.trainable_variables)


def metrics_state(model: Any) -> list[tf.Variable]:
    """Return the variables of metrics, also in attributes of layers, which tf_keras counts among the weights."""
    layers = list(model._flatten_layers())
    metrics = [*model.metrics]
    metrics += [layer for layer in layers if isinstance(layer, tf.keras.metrics.Metric)]
    metrics += [metric for layer in layers for metric in getattr(layer, "_metrics", ())]
    return tf_variables(v for metric in metrics for v in metric.variables)


def follows_schedule(optimizer: Any) -> bool:
    """Return whether the learning rate is a function: of the updates that the optimizer has made, or of anything."""
    rate = _rate(optimizer)
    schedule = isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule)
    return schedule or (callable(rate) and not hasattr(rate, "assign"))


def _rate(optimizer: Any) -> Any:
    """Return the learning rate as the optimizer keeps it: a variable, or a function."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return getattr(inner, "_hyper", {}).get("learning_rate", getattr(inner, "_learning_rate", None))


def scales_losses(optimizer: Any) -> bool:
    """Return whether it multiplies losses by a changing scale, and skips updates in which gradients overflow."""
    return isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer)


def hyper_parameters(optimizer: Any) -> dict[str, Any]:
    """Return the hyper-parameters that schedules change; the learning rate is a tensor, or becomes one in the graph."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # a loss scale has none of its own
    found = {"momentum": getattr(inner, "momentum", None), "weight_decay": getattr(inner, "weight_decay", None)}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def loss_passes_through(model: Any, weigh: Callable[[Any], Any]) -> Callable[[], None]:
    """Pass the loss through ``weigh`` before its gradients are taken, in training; return a function that ends this.

    Does nothing if user code or a loss scale stands between the loss and the update.
    """
    optimizer, keras_3 = model.optimizer, is_keras_3(model)
    # A loss scale finds out how small a loss float16 can handle, and must not get a smaller one. (A fixed
    # ``loss_scale_factor`` is no obstacle.)
    base = tf.keras.optimizers.Optimizer
    between = ("scale_loss", "apply_gradients") if keras_3 else ("compute_gradients", "minimize")
    own_step = type(model).train_step is not tf.keras.Model.train_step or "train_step" in model.__dict__
    if own_step or any(
        name in optimizer.__dict__ or getattr(type(optimizer), name, None) is not getattr(base, name)
        for name in between
    ):
        return lambda: None
    former = getattr(optimizer, between[0])

    def scale_loss(loss: Any) -> Any:
        return former(weigh(loss))

    def compute_gradients(loss: Any, var_list: Any, tape: Any = None) -> Any:
        if tape is not None:  # else the loss is a function
            with tape:
                loss = weigh(loss)
        return former(loss, var_list, tape)

    return replace_attribute(optimizer, between[0], scale_loss if keras_3 else compute_gradients)


def losses_pass_through(model: Any, wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace each loss of ``compile`` by ``wrap`` of it, once Keras has built it; return a function that ends this.

    What ``wrap`` returns has the loss as ``plain``, or is the loss.
    """
    container = model._compile_loss if is_keras_3(model) else model.compiled_loss
    if container is None:
        return lambda: None
    name, build = "_flat_losses" if is_keras_3(model) else "_losses", container.build

    def pass_through(function: Callable[[Any], Any]) -> None:
        losses = getattr(container, name)
        if is_keras_3(model):
            replaced = [each._replace(loss=function(each.loss)) for each in losses]
        else:
            replaced = [None if each is None else function(each) for each in losses]
        setattr(container, name, replaced)

    def build_and_wrap(*args: Any) -> None:
        build(*args)
        pass_through(wrap)

    def undo() -> None:
        put_back()
        if container.built:
            pass_through(lambda loss: getattr(loss, "plain", loss))

    if container.built:
        pass_through(wrap)
    put_back = replace_attribute(container, "build", without_autograph(build_and_wrap))
    return undo


def loss_totals(model: Any) -> list[tf.Variable]:
    """Return the sums of Keras's own means of the loss, in which a batch's loss counts as many times as its samples."""
    container = model._compile_loss if is_keras_3(model) else model.compiled_loss
    metrics = [] if container is None else [*container.metrics, getattr(container, "_total_loss_mean", None)]
    metrics.append(getattr(model, "_loss_tracker", None))
    return tf_variables(metric.total for metric in metrics if hasattr(metric, "total"))


def gradients_pass_through(optimizer: Any, receive: Receiver, wrapped_by: Any) -> Callable[[], None]:
    """Pass all gradients of this optimizer through ``receive`` before they are applied; return what ends this."""
    # The outermost optimizer's method: a loss scale must see the sum over the ranks, so that all skip equal steps. So
    # must a user's own apply_gradients, which may clip before it calls Keras 3's apply: 7e-2 off one process without.
    plain = vars(optimizer).get("apply_gradients", type(optimizer).apply_gradients)
    by_apply = hasattr(optimizer, "apply") and plain is tf.keras.optimizers.Optimizer.apply_gradients
    name = "apply" if by_apply else "apply_gradients"
    update = getattr(optimizer, name)

    def apply(grads: Iterable[Any], trainable_variables: Any = None) -> Any:
        variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
        own = as_keras_converts(update)
        return receive(list(grads), variables, lambda reduced: own(reduced, variables))

    def apply_gradients(grads_and_vars: Iterable[Any], *args: Any, **options: Any) -> Any:
        pairs, own = list(grads_and_vars), as_keras_converts(update)
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        return receive(
            gradients, variables, lambda reduced: own(list(zip(reduced, variables, strict=True)), *args, **options)
        )

    # tf_keras converts a user's own step, and with it all of this package that the step calls: 2 s a rank.
    mine: Any = without_autograph(apply if by_apply else apply_gradients)
    mine.wrapped_by = wrapped_by
    return replace_attribute(optimizer, name, mine)


def replace_attribute(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of this object alone, unseen by Keras; return a function that puts the former one back."""
    # Not a subclass's: what is saved, and its name in the file, stay as they were.
    former = {name: owner.__dict__[name]} if name in owner.__dict__ else {}
    object.__setattr__(owner, name, value)

    def put_back() -> None:
        if owner.__dict__.get(name) is value:
            del owner.__dict__[name]
            owner.__dict__.update(former)

    return put_back


def rate_times(optimizer: Any, factor: tf.Variable, wrapped_by: Any) -> Callable[[], None]:
    """Multiply the learning rate by ``factor`` in each update of this optimizer; return a function that ends this."""

    def at_its_rate(gradients: list[Any], _: list[Any], update: Update) -> Any:
        (rate,) = tf_variables([_rate(optimizer)])
        own = rate.read_value()
        rate.assign(own * tf.cast(factor, own.dtype))
        updated = update(gradients)
        # Before the step ends, so that callbacks, logs and checkpoints see the user's own rate.
        rate.assign(own)
        return updated

    return gradients_pass_through(optimizer, at_its_rate, wrapped_by)


def without_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, marked so that AutoGraph leaves its Python alone. What it calls may still be converted."""
    function.autograph_info__ = {}  # type: ignore[attr-defined]
    return function


def as_keras_converts(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the user's function, with ``if`` and ``for`` converted if Keras would have done so (tf_keras does)."""
    autograph = tf.__internal__.autograph
    here = autograph.control_status_ctx()
    if here.status.name != "ENABLED":  # in an eager step it is not specified, and Keras converts nothing
        return function
    converted: Callable[..., Any] = autograph.tf_convert(function, here)
    return converted

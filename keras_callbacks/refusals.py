"""Refusals, before the first step, of what could not be synchronised, with what to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from keras_callbacks.keras_versions import (
    backend_of,
    compiles_by_itself,
    follows_schedule,
    scales_losses,
    steps_per_execution,
)


def check_compiled(model: Any) -> None:
    """Refuse what could not be synchronised; switch XLA off if Keras has chosen it."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise ValueError("the model is not compiled: call model.compile(optimizer, loss) before model.fit")
    if (backend := backend_of(model)) != "tensorflow":
        raise ValueError(
            f"Keras runs on {backend!r}, and gradients are synchronised inside TensorFlow's graph; "
            "set KERAS_BACKEND=tensorflow, or use torch_hooks with a model in PyTorch"
        )
    if hasattr(optimizer, "_allreduce_grads") or hasattr(optimizer, "_hvd") or "horovod" in type(optimizer).__module__:
        raise ValueError(
            "the optimizer is Horovod's DistributedOptimizer, which on Keras 3 synchronises nothing, and elsewhere "
            "would do so twice; compile the model with the plain optimizer: LoadBalance wraps it in fit"
        )
    inner = getattr(optimizer, "inner_optimizer", None)
    others = [name for name, value in vars(model).items() if _is_another(value, optimizer, inner)]
    if others or isinstance(optimizer, list | tuple):
        raise ValueError(
            f"the model has several optimizers ({', '.join(['optimizer', *others])}); LoadBalance synchronises one: "
            "compile it with a single one, and update all variables in one call. torch_hooks takes several"
        )
    if (steps := steps_per_execution(model)) != 1:
        raise ValueError(
            f"steps_per_execution is {steps}, and the plan may change after every step: compile with "
            "steps_per_execution=1"
        )
    if model.distribute_strategy.num_replicas_in_sync != 1:
        raise ValueError(
            "the model is under a tf.distribute strategy; build and compile it without, Horovod takes its place"
        )
    if model.jit_compile:
        if not compiles_by_itself(model):
            raise ValueError(
                "jit_compile=True compiles the train step with XLA, which has no kernel for Horovod's grouped "
                "allreduce; compile with jit_compile=False"
            )
        model.jit_compile = False


def check_rate(optimizer: Any) -> None:
    """Refuse an optimizer whose learning rate cannot follow a global batch that adapts."""
    if follows_schedule(optimizer):
        raise ValueError(
            "the optimizer's learning rate is a schedule, which counts steps, and with global_batch=Goodput(…) steps "
            "are worth different amounts. Give it a number, and change it in a callback's on_train_batch_begin by "
            "balance.progress"
        )
    if scales_losses(optimizer):
        raise ValueError(
            "global_batch=Goodput(…) goes by the size of gradients, and the optimizer is a LossScaleOptimizer, whose "
            "scale changes it; train in mixed_bfloat16 or float32, or give a global_batch that stays"
        )
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            "global_batch=Goodput(…) makes an update of each round, and gradient_accumulation_steps gathers several; "
            "leave it out, raise most, and give the policy max_micro_batch where memory ends"
        )


def check_local(optimizer: Any, local_layers: Sequence[Any]) -> None:
    """Refuse an optimizer whose update of shared variables would go by the gradients of a rank's own layers."""
    clipped = getattr(getattr(optimizer, "inner_optimizer", optimizer), "global_clipnorm", None)
    if local_layers and (clipped or scales_losses(optimizer)):
        what = f"global_clipnorm={clipped}" if clipped else "LossScaleOptimizer"
        raise ValueError(
            f"{what} of the optimizer goes by all gradients together, and those of local_layers, here "
            f"{', '.join(layer.name for layer in local_layers)}, differ by rank, so ranks would change what they share "
            f"differently; {'use clipnorm or clipvalue' if clipped else 'train in mixed_bfloat16 or float32'}, or "
            "leave local_layers out"
        )


def _is_another(value: Any, *known: Any) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return any(hasattr(type(v), "apply_gradients") and all(v is not one for one in known) for v in values)


def check_layers(model: Any, policy: str, *, gathers: bool = False) -> None:
    """Refuse layers in which ranks wait for one another, unless all do the same anyway.

    Their waiting is inside the graph, and looks like computing: all ranks would seem equally fast. ``gathers``: a round
    may have several micro-batches, and other numbers of them on other ranks, which would wait forever.
    """
    norms = [v for v in model._flatten_layers() if isinstance(v, tf.keras.layers.BatchNormalization) and v.trainable]
    if alone := [layer.name for layer in norms if getattr(layer, "synchronized", False)]:
        raise ValueError(
            f"BatchNormalization(synchronized=True), here {', '.join(alone)}, goes over the replicas of a "
            "tf.distribute strategy, and not over Horovod's ranks. Use a normalisation that needs no other rank, such "
            "as GroupNormalization, or leave synchronized out: each rank then normalises by its own samples"
        )
    waiting = [layer.name for layer in model._flatten_layers() if isinstance(layer, hvd.SyncBatchNormalization)]
    if waiting and (gathers or policy != "bsp"):
        what = f"policy {policy!r}" if policy != "bsp" else "max_micro_batch (or max_micro_batch_cost)"
        raise ValueError(
            f"{what} does not go with Horovod's SyncBatchNormalization, here {', '.join(waiting)}: it weighs ranks "
            "alike whatever they hold, and waits for the slowest, so that all seem equally slow, or forever for one "
            "with fewer micro-batches; use policy='bsp' without them, a normalisation that needs no other rank, such "
            "as GroupNormalization, or torch_hooks.SyncBatchNorm with a model in PyTorch"
        )

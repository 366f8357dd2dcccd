"""Checks, before the first step, that refuse what could not be synchronised, and say what to write instead."""

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
    """Refuse a model that could not be synchronised; switch XLA off if Keras has chosen it."""
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
            "the optimizer's learning rate is a schedule, which counts steps, but global_batch=Goodput(…) changes "
            "the batch, so steps are not equal. Give the optimizer a number, and set it by balance.progress in a "
            "callback's on_train_batch_begin"
        )
    if scales_losses(optimizer):
        raise ValueError(
            "global_batch=Goodput(…) measures the norm of gradients, which the scale of a LossScaleOptimizer changes. "
            "Train in mixed_bfloat16 or float32, or give a constant global_batch"
        )
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            "global_batch=Goodput(…) needs an update in each round; gradient_accumulation_steps makes one in several. "
            "Leave it out and raise most; if memory does not suffice, give the policy max_micro_batch"
        )


def check_local(optimizer: Any, local_layers: Sequence[Any]) -> None:
    """Refuse an optimizer that would update shared variables by the gradients of a rank's own layers."""
    clipped = getattr(getattr(optimizer, "inner_optimizer", optimizer), "global_clipnorm", None)
    if local_layers and (clipped or scales_losses(optimizer)):
        what = f"global_clipnorm={clipped}" if clipped else "LossScaleOptimizer"
        raise ValueError(
            f"{what} of the optimizer depends on all gradients together. Those of local_layers "
            f"({', '.join(layer.name for layer in local_layers)}) differ by rank, so the ranks' models would drift "
            f"apart. {'Use clipnorm or clipvalue' if clipped else 'Train in mixed_bfloat16 or float32'}, or leave "
            "local_layers out"
        )


def _is_another(value: Any, *known: Any) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return any(hasattr(type(v), "apply_gradients") and all(v is not one for one in known) for v in values)


def check_layers(model: Any, policy: str, *, gathers: bool = False) -> None:
    """Refuse layers in which ranks wait for one another, unless all ranks do the same number of equal batches.

    ``gathers``: a round may have several micro-batches.
    """
    norms = [v for v in model._flatten_layers() if isinstance(v, tf.keras.layers.BatchNormalization) and v.trainable]
    if alone := [layer.name for layer in norms if getattr(layer, "synchronized", False)]:
        raise ValueError(
            f"BatchNormalization(synchronized=True), here {', '.join(alone)}, synchronises the replicas of a "
            "tf.distribute strategy, and not Horovod's ranks. Use a normalisation that needs no other rank, such "
            "as GroupNormalization. Or leave synchronized out: each rank then normalises by its own samples"
        )
    # Their waiting is inside the graph, and looks like computing: all ranks would seem equally fast. And a rank with
    # more micro-batches than another waits without end, as two ranks of tf_keras did.
    waiting = [layer.name for layer in model._flatten_layers() if isinstance(layer, hvd.SyncBatchNormalization)]
    if waiting and (gathers or policy != "bsp"):
        what = f"policy {policy!r}" if policy != "bsp" else "max_micro_batch (or max_micro_batch_cost)"
        raise ValueError(
            f"{what} does not go with Horovod's SyncBatchNormalization, here {', '.join(waiting)}. It weights "
            "ranks equally, whatever their samples, and waits forever for a rank with fewer micro-batches. Use "
            "policy='bsp' with one micro-batch a round, a normalisation that needs no other rank, such as "
            "GroupNormalization, or torch_hooks.SyncBatchNorm with a model in PyTorch"
        )

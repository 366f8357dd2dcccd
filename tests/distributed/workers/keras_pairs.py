"""One rank of a training of any options of Keras, and one process that is given the same samples.

The replay shares no code with the package and none of Keras's losses: sums over the samples that all ranks really saw
in a round, divided by what the round's mean is over.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import plain_graphs  # noqa: F401
import pool
import tensorflow as tf
from keras_fits import Start, on_rank_0

from hvd_hetero.policies import BSP, LBBSP, Goodput, NonBlocking, SelfAdaptive, StaticAllocation
from hvd_hetero.rounds import RoundPlan
from hvd_hetero.session import balancer_of
from hvd_hetero.topology.mixing import resolve_mixing
from keras_callbacks import LoadBalance, resize_batches, validation_batches, weighted_gradients

keras = tf.keras
SAMPLES, BATCH, EPOCHS = 30, 8, 2
LOSS_WEIGHTS = {"a": 1.0, "b": 0.5}
CLASS_WEIGHTS = {0: 0.5, 1: 3.0}
pool.LIMIT_S = 60.0  # of a case that hangs: several times what one takes


class Seen(NamedTuple):
    """A micro-batch. ``planned``: samples of its round."""

    epoch: int
    round: int
    planned: int
    samples: list[int]


class Shifting(LBBSP):
    """Other shares in each round."""

    def next(self, plan: RoundPlan, finished: Any) -> RoundPlan:
        share = int(np.random.default_rng([finished.round, 7]).integers(1, plan.total))
        return RoundPlan.of([share, plan.total - share])


class Walking(Goodput):
    """Another batch after every sixteen rounds, and after the first, whatever it costs; the learning rate stays."""

    def __init__(self) -> None:
        super().__init__(start=BATCH, least=6, most=12, learning_rate="constant")
        self.asked = -1

    def reconsider(self, policy: Any, plan: RoundPlan, table: Any, noise: Any, typical_size: float) -> RoundPlan:
        self.asked += 1
        total = {8: 12, 12: 6, 6: 8}[plan.total]
        return plan if self.asked % 3 or total > self.fits else policy.resized(plan, total)


class Notes(keras.layers.Layer):
    """Takes a note of the samples of every micro-batch in training."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self.note = note

    def call(self, x: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        if training:
            tf.numpy_function(self.note, [x[:, 0]], [])
        return x[:, 1:]


class Hides(keras.layers.Layer):
    """Gives predictions the mask that goes with these samples."""

    supports_masking = True

    def call(self, inputs: Any, mask: Any = None) -> tf.Tensor:
        return inputs[0]

    def compute_mask(self, inputs: Any, previous_mask: Any) -> tf.Tensor:
        return visible(inputs[1])


def visible(x: tf.Tensor) -> tf.Tensor:
    """Hide the second prediction of every third sample."""
    return keras.ops.stack([x[:, 0] >= 0, x[:, 0] % 3 > 0], 1)


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x, which begins with a sample's number, two labels of each, and what these weigh."""
    dice = np.random.default_rng(5)
    x = dice.normal(size=(SAMPLES, 4))
    y = (np.stack([x[:, 1:].sum(1), x[:, 1] - x[:, 2]], 1) > 0)[:, :, None].astype("float64")
    x[:, 0] = np.arange(SAMPLES)
    return x, y, dice.integers(1, 5, (SAMPLES, 2)).astype("float64")


def network(case: dict[str, Any], note: Any) -> Any:
    kinds = keras.layers
    x = kinds.Input((4,))
    # A bias before a norm may have a gradient of rounding alone, which Adam would make as large as any.
    options = {"use_bias": case["norm"] is None, "kernel_regularizer": keras.regularizers.L2(1e-3)}
    hidden = kinds.Dense(4, name="first", **options)(Notes(note)(x))
    if case["norm"] is not None:
        hidden = kinds.BatchNormalization(synchronized=case["norm"] == "sync")(hidden)
    hidden, heads = kinds.Activation("tanh")(hidden), {}
    for name in "ab"[: case["outputs"]]:
        masked = case["masks"] == "alike" or (case["masks"] == "apart" and name == "b")
        heads[name] = kinds.Reshape((2, 1), name=f"{name}_shaped" if masked else name)(kinds.Dense(2)(hidden))
        if masked:
            heads[name] = Hides(name=name)([heads[name], x])
    return keras.Model(x, heads if len(heads) > 1 else heads["a"])


def optimizer_of(case: dict[str, Any]) -> Any:
    rate = 0.02 if case["optimizer"] == "adamw" else 0.1 / (BATCH if case["loss"] == "sum" else 1)
    options: dict[str, Any] = {case["clips"]: 0.05} if case["clips"] else {}
    if case["accumulates"]:
        options["gradient_accumulation_steps"] = case["accumulates"]
    if case["ema"]:
        options |= {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3}
    rate = keras.optimizers.schedules.ExponentialDecay(rate, 3, 0.5) if case["schedule"] else rate
    if case["optimizer"] == "adamw":  # epsilon: else rounding of a gradient of nearly zero makes an update of full size
        return keras.optimizers.AdamW(rate, weight_decay=0.1, epsilon=1e-4, **options)
    return keras.optimizers.SGD(rate, momentum=0.9, **options)


def counts_of(y: tf.Tensor) -> tf.Tensor:
    return 1.0 + y % 2.0


def own_mean(y: tf.Tensor, told: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(counts_of(y) * (told - y) ** 2) / tf.reduce_sum(counts_of(y))


def weight_of(case: dict[str, Any]) -> Any:
    def weight(x: tf.Tensor, y: Any, weights: Any = None) -> tf.Tensor:
        y, weights = (part["a"] if isinstance(part, dict) else part for part in (y, weights))
        if case["loss"] == "own":
            return tf.reduce_sum(counts_of(y))
        counts = tf.cast(visible(x), tf.float64) if case["masks"] else tf.ones_like(y[:, :, 0])
        if case["loss"] == "weighted" and weights is not None:
            counts *= tf.cast(weights, tf.float64)  # Keras makes float32 of class weights
        return tf.reduce_sum(counts)

    return weight


def policy_of(case: dict[str, Any]) -> Any:
    limit = [3, 2] if case["max_micro_batch"] == "of each rank" else case["max_micro_batch"]
    return {
        "bsp": lambda: BSP(max_micro_batch=limit),
        "shifting": lambda: Shifting(max_micro_batch=limit),
        "static": lambda: StaticAllocation([1, 2], max_micro_batch=limit),
        "self-adaptive": lambda: SelfAdaptive(total=4, every=2),
        "non-blocking": lambda: NonBlocking(2),
    }[case["policy"]]()


def samples_of(case: dict[str, Any]) -> Any:
    """Return what ``fit`` of one process would get."""
    x, y, weights = arrays()
    names = "ab"[: case["outputs"]]
    labels = {"a": y, "b": y + 2.0}
    parts = [labels[name] for name in names], [weights for _ in names]
    y, weights = (part[0] if len(part) == 1 else dict(zip(names, part, strict=True)) for part in parts)
    return (x, y, weights) if case["weights"] == "sample" else (x, y)


def resized_of(case: dict[str, Any], balance: LoadBalance) -> Any:
    given, options, is_stream = samples_of(case), {}, case["data"] in ("stream", "shard")
    if is_stream:
        given = tf.data.Dataset.from_tensor_slices(given)
        if case["data"] == "shard":
            given = given.skip(12 * hvd.rank()).take(12 if hvd.rank() == 0 else -1)
            options["stream"] = "shard"
    if case["prefetch"] is not None:
        options["prefetch"] = case["prefetch"]
    if case["weight_of"]:
        options["weight_of"] = weight_of(case)
    if case["cost_of"]:
        options["cost_of"] = (lambda x, *_: 1 + x[0] % 5) if is_stream else [1 + i % 5 for i in range(SAMPLES)]
    if case["cost_of"] == "limited":
        options["max_micro_batch_cost"] = 11.0
    return resize_batches(given, balance, shuffle=case["data"] == "arrays", seed=3, **options)


def train(case: dict[str, Any]) -> tuple[list[Seen], Any, dict[str, list[float]]]:
    """Train on this rank; return its micro-batches, the model, and the history."""
    seen: list[Seen] = []

    def note(numbers: np.ndarray) -> None:
        if balance.samples > 0:  # else it stands in for no data
            planned = balancer_of(balance).work.plan.total
            seen.append(Seen(epochs[0], balance.rounds, planned, [int(i) for i in numbers]))

    epochs = [-1]

    class Epochs(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            epochs[0] += 1
            if epochs[0] == 0:
                Start.weights = self.model.get_weights()

    keras.utils.set_random_seed(7 + hvd.rank())  # ranks start apart
    model, optimizer = network(case, note), optimizer_of(case)
    if case["scaler"]:
        optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=2.0**8, dynamic_growth_steps=3)
    loss = {
        "mean": "mse", "own": own_mean, "sum": keras.losses.MeanSquaredError(reduction="sum"),
        "weighted": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    }[case["loss"]]  # fmt: skip
    several = case["outputs"] > 1
    if case["optimizer"] == "two":
        model.second = keras.optimizers.SGD()
    model.compile(
        optimizer, dict.fromkeys("ab", loss) if several else loss, loss_weights=LOSS_WEIGHTS if several else None,
        run_eagerly=case["eager"], steps_per_execution=case["steps_per_execution"],
        jit_compile=True if case["jit_compile"] else "auto",
    )  # fmt: skip
    balance = LoadBalance(
        policy_of(case), global_batch=Walking() if case["global_batch"] == "adapts" else BATCH,
        sync=case["sync"] or "allreduce", local_layers=[model.get_layer("first")] if case["local_layers"] else [],
    )  # fmt: skip
    if case["loop"] == "custom":
        loop(case, model, balance, epochs)
        return seen, model, {}
    options: dict[str, Any] = {"class_weight": CLASS_WEIGHTS} if case["weights"] == "class" else {}
    if case["validation"] == "shared":
        options |= {"validation_data": validation_batches(samples_of(case), balance, 2)}
    elif case["validation"]:
        part = tf.nest.map_structure(lambda array: array[hvd.rank() :: 2], samples_of(case))
        options |= {"validation_data": part, "validation_batch_size": SAMPLES}
    told: dict[str, list[float]] = {}
    batches = resized_of(case, balance)
    for _ in range(case["fits"]):
        history = model.fit(
            batches, epochs=EPOCHS // case["fits"], verbose=0, shuffle=False, callbacks=[balance, Epochs()], **options
        ).history
        for name, values in history.items():
            told.setdefault(name, []).extend(values)
    return seen, model, told


def loop(case: dict[str, Any], model: Any, balance: LoadBalance, epochs: list[int]) -> None:
    """Train by a loop of one's own, as ``docs/keras.md`` has it."""
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    balance.start(model, optimizer)
    Start.weights = model.get_weights()
    batches = resized_of(case, balance)

    def step(x: tf.Tensor, y: Any, weights: Any = None) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(model.compute_loss(x, y, model(x, training=True), weights))
        gradients = weighted_gradients(tape, loss, model.trainable_variables, balance)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    if not case["eager"]:
        step = tf.function(step, input_signature=batches.element_spec)
    for epoch in range(EPOCHS):
        epochs[0] = epoch
        for batch in balance.batches(batches):
            step(*batch)


class Replay:
    """One process, which takes the mean over the samples of a round."""

    def __init__(self, case: dict[str, Any], start: list[np.ndarray]) -> None:
        self.case = case
        self.model, self.optimizer = network(case, lambda _: None), optimizer_of(case)
        self.model.set_weights(start)
        self.optimizer.build(self.model.trainable_variables)
        x, y, weights = arrays()
        if case["weights"] == "class":
            weights = np.where(y[:, :, 0] > 0, CLASS_WEIGHTS[1], CLASS_WEIGHTS[0])
        shown, every = np.array(visible(x)) * 1.0, np.ones((SAMPLES, 2))
        counts = {"a": shown if case["masks"] == "alike" else every, "b": shown if case["masks"] else every}
        weighed = {name: count * weights if case["weights"] else count for name, count in counts.items()}
        self.x, self.labels = x, {"a": y[:, :, 0], "b": y[:, :, 0] + 2.0}
        # What an error counts in the sum, and in what the sum is divided by.
        self.weighed = weighed
        if case["loss"] == "own":
            self.weighed = {name: 1.0 + label % 2.0 for name, label in self.labels.items()}
        self.divided = self.weighed if case["loss"] in ("own", "weighted") else counts

    def loss(self, parts: list[list[int]], planned: int = 0, *, training: bool = True) -> tf.Tensor:
        """Return the mean over all samples of these parts, which are normalised apart.

        If a round has fewer samples than planned, a sum is brought to their number (``docs/keras.md``).
        """
        total, every = tf.add_n(self.model.losses), np.concatenate(parts)
        for part in parts if self.case["norm"] == "batch" else [every]:
            told = self.model(self.x[part], training=training)
            for name, each in told.items() if isinstance(told, dict) else [("a", told)]:
                error = tf.reduce_sum(self.weighed[name][part] * (each[:, :, 0] - self.labels[name][part]) ** 2)
                divisor = self.divided[name][every].sum()
                if self.case["loss"] == "sum":
                    divisor = len(every) / planned
                total += LOSS_WEIGHTS[name] * error / divisor
        return total

    def update(self, parts: list[list[int]], planned: int) -> float:
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.loss(parts, planned)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return float(loss)

    def train(self, seen: list[Seen]) -> dict[str, list[float]]:
        losses: dict[str, list[float]] = {"loss": [], "val_loss": []}
        for epoch in range(EPOCHS):
            rounds = sorted({(each.round, each.planned) for each in seen if each.epoch == epoch})
            updates = [([each.samples for each in seen if each.round == number], planned) for number, planned in rounds]
            sizes = [sum(map(len, parts)) for parts, _ in updates]
            means = [self.update(*each) for each in updates]
            losses["loss"].append(float(np.average(means, weights=sizes)))  # as Keras does
            losses["val_loss"].append(float(self.loss([list(range(SAMPLES))], 1, training=False)))
            if self.case["loop"] == "fit" and (epoch + 1) % (EPOCHS // self.case["fits"]) == 0:
                self.optimizer.finalize_variable_values(self.model.trainable_variables)
        return losses


def replayed_apart(case: dict[str, Any], starts: list[Any], seen: list[list[Seen]]) -> list[list[np.ndarray]]:
    """Train the model of each rank in one process; return their weights.

    Of its samples' mean loss a rank has the gradient g_i, and w_i of what the round's mean is over. With ``d-psgd`` it
    updates the average of its own and its neighbours' weights by n w_i / W g_i. Else local layers are updated by g_i,
    and others by the sum of w_i / W g_i.
    """
    ranks = [Replay(case, start) for start in starts]
    variables = [each.model.trainable_variables for each in ranks]
    own = [id(v) for each in ranks for v in each.model.get_layer("first").trainable_variables]
    mixing = resolve_mixing("d-psgd", len(ranks)) if case["sync"] else None
    for epoch in range(EPOCHS):
        rounds = sorted({(each.round, each.planned) for of_rank in seen for each in of_rank if each.epoch == epoch})
        for number, planned in rounds:
            given = [[each.samples for each in of_rank if each.round == number] for of_rank in seen]
            counted = [
                sum(len(part) if case["loss"] == "sum" else ranks[0].divided["a"][part].sum() for part in parts)
                for parts in given
            ]
            shares, found = np.array(counted) / sum(counted), []
            for replay, trained, parts in zip(ranks, variables, given, strict=True):
                with tf.GradientTape() as tape:
                    loss = replay.loss(parts, planned) if parts else None
                of_rank = [tf.zeros_like(v) for v in trained] if loss is None else tape.gradient(loss, trained)
                found.append([g.numpy() for g in of_rank])
            summed = [np.tensordot(shares, np.stack(each), 1) for each in zip(*found, strict=True)]
            before = [np.stack([v.numpy() for v in each]) for each in zip(*variables, strict=True)]
            for i, (replay, trained) in enumerate(zip(ranks, variables, strict=True)):
                gradients = [g if id(v) in own else s for v, g, s in zip(trained, found[i], summed, strict=True)]
                if mixing is not None:
                    gradients = [len(ranks) * shares[i] * g for g in found[i]]
                    for variable, values in zip(trained, before, strict=True):
                        variable.assign(np.tensordot(mixing.matrix(number)[i], values, 1))
                replay.optimizer.apply_gradients(
                    [(tf.convert_to_tensor(g), v) for g, v in zip(gradients, trained, strict=True)]
                )
        if case["loop"] == "fit" and (epoch + 1) % (EPOCHS // case["fits"]) == 0:
            for replay, trained in zip(ranks, variables, strict=True):
                replay.optimizer.finalize_variable_values(trained)
            for of_ranks in zip(*variables, strict=True) if case["sync"] else ():
                mean = np.mean([v.numpy() for v in of_ranks], axis=0)
                for variable in of_ranks:
                    variable.assign(mean)
            for of_ranks in zip(*(each.optimizer.variables for each in ranks), strict=True) if case["sync"] else ():
                for variable in of_ranks:  # the next fit begins with rank 0's
                    variable.assign(of_ranks[0])
    return [[v.numpy() for v in trained] for trained in variables]


def judge(case: dict[str, Any]) -> dict[str, Any]:
    keras.backend.set_floatx("float64")
    keras.mixed_precision.set_global_policy("float64")
    try:
        seen, model, told = train(case)
    except Exception as error:  # noqa: BLE001 - it is judged
        return {"refused": f"{type(error).__name__}: {error}"}
    weights = [variable.numpy() for variable in model.trainable_variables]
    ranks = hvd.allgather_object((seen, weights, Start.weights), name="seen")
    apart = bool(case["sync"] or case["local_layers"])

    def alone() -> Any:
        if apart:
            of_ranks = [[Seen(*each) for each in seen] for seen, *_ in ranks]
            return replayed_apart(case, [start for *_, start in ranks], of_ranks), {}
        every = [Seen(*each) for seen, *_ in ranks for each in seen]
        one = Replay(case, Start.weights)
        losses = one.train(every)
        return [[variable.numpy() for variable in one.model.trainable_variables]] * len(ranks), losses

    expected, losses = on_rank_0(alone)
    visits = np.zeros((EPOCHS, SAMPLES), int)
    for epoch, *_, numbers in (each for seen, *_ in ranks for each in seen):
        np.add.at(visits[epoch], numbers, 1)
    differences = {
        f"{variable.path} of rank {rank}": float(np.abs(mine - theirs).max())
        for rank, (_, found, _) in enumerate(ranks)
        for variable, mine, theirs in zip(model.trainable_variables, found, expected[rank], strict=True)
    }
    figures = {name: float(np.abs(np.subtract(told[name], losses[name])).max()) for name in losses if name in told}
    return {"apart": differences, "figures": figures, "once": bool((visits == 1).all())}


class Cases(dict[str, Any]):
    """Cases by what they say in JSON."""

    def __missing__(self, name: str) -> Any:
        return lambda: judge(json.loads(name))


if __name__ == "__main__":
    tf.config.threading.set_intra_op_parallelism_threads(1)
    pool.serve(hvd, Cases())

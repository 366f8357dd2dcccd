"""What a train step, or an optimizer of the user's own, does to gradients before the sum; on one rank."""

from __future__ import annotations

import numpy as np
import pytest

hvd = pytest.importorskip("horovod.tensorflow")
import tensorflow as tf  # noqa: E402 - imported by Horovod if it is there

from hvd_hetero.policies import BSP  # noqa: E402
from keras_callbacks import LoadBalance, resize_batches  # noqa: E402

keras = tf.keras
X, Y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
SEVERAL = BSP(max_micro_batch=2)


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


def fit(model, policy="bsp"):
    balance = LoadBalance(policy, global_batch=4)
    model.fit(resize_batches((X, Y), balance), verbose=0, shuffle=False, callbacks=[balance])


class Clipping(keras.Model):
    """Changes gradients in a train step of its own."""

    how = staticmethod(lambda gradients: gradients)
    perturbs, penalty = False, 0.0

    def gradients(self, x, y):
        with tf.GradientTape() as outer, tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean((self(x) - y) ** 2)
            if self.penalty:
                loss += self.penalty * tf.sqrt(tf.reduce_sum(tape.gradient(loss, x) ** 2))
        return outer.gradient(loss, self.trainable_variables), loss

    def train_step(self, batch):
        gradients, loss = self.gradients(*batch)
        if self.perturbs:  # SAM
            steps = [0.05 * g / tf.linalg.global_norm(gradients) for g in gradients]
            for variable, step in zip(self.trainable_variables, steps, strict=True):
                variable.assign_add(step)
            gradients, loss = self.gradients(*batch)
            for variable, step in zip(self.trainable_variables, steps, strict=True):
                variable.assign_sub(step)
        self.optimizer.apply_gradients(zip(self.how(gradients), self.trainable_variables, strict=True))
        return {"own": loss}


@tf.custom_gradient
def straight_through(weight):
    return tf.sign(weight), lambda upstream: tf.where(tf.abs(weight) < 1.0, upstream, 0.0)


class Binary(keras.layers.Dense):
    def call(self, x):
        return x @ straight_through(tf.convert_to_tensor(self.kernel))


def clipping(**how):
    inputs = keras.layers.Input((2,))
    hidden = Binary(3, use_bias=False)(keras.layers.Dense(2, kernel_regularizer="l2")(inputs))
    model = Clipping(inputs, keras.layers.Dense(1)(hidden))
    vars(model).update(how)
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("how", "policy"),
    [
        ({"how": lambda gradients: tf.clip_by_global_norm(gradients, 0.1)[0]}, "bsp"),
        ({"how": lambda gradients: [tf.clip_by_value(g, -0.1, 0.1) for g in gradients]}, "bsp"),
        ({"how": lambda gradients: [tf.where(tf.math.is_nan(g), 0.0, g) for g in gradients]}, SEVERAL),
        ({"perturbs": True}, SEVERAL),
    ],
    ids=["by norm", "by value", "without NaN", "SAM"],
)
def test_gradients_that_a_step_changes_before_they_are_summed_are_told_of_once(how, policy, caplog):
    fit(clipping(**how), policy)
    (warning,) = [r.getMessage() for r in caplog.records if "changes gradients" in r.getMessage()]
    assert "use its clipnorm, global_clipnorm or clipvalue" in warning


@pytest.mark.parametrize(
    "how",
    [{}, {"how": lambda gradients: [0.5 * g - tf.reduce_mean(g) for g in gradients]}, {"penalty": 0.1}],
    ids=["as they are", "scaled and centred", "penalised"],
)
def test_gradients_that_a_step_leaves_or_scales_are_not_told_of(how, caplog):
    fit(clipping(**how))
    assert not [r for r in caplog.records if "changes gradients" in r.getMessage()]


@pytest.mark.parametrize("policy", ["bsp", SEVERAL], ids=["one", "several"])
def test_an_apply_gradients_of_ones_own_gets_the_sum(policy):
    class Own(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, **options):
            pairs = [(tf.clip_by_value(g, -0.1, 0.1), v) for g, v in grads_and_vars]
            return super().apply_gradients(pairs, **options)

    before = np.ones((2, 1), "float32")
    inputs = keras.layers.Input((2,))
    model = Clipping(inputs, keras.layers.Dense(1, use_bias=False)(inputs))
    model.set_weights([before])
    model.compile(Own(0.5))
    balance = LoadBalance(policy, global_batch=8)
    share = balance._session.calls.share
    balance._session.calls.share = lambda: [1e-3, *share()[1:]]  # so little that the sum is not clipped
    model.fit(resize_batches((X, Y), balance), verbose=0, shuffle=False, callbacks=[balance])
    moved = float((before - model.get_weights()[0])[0, 0])
    micro_batches = 4 if policy is SEVERAL else 1
    assert moved == pytest.approx(0.5 * 1e-3 * 2.0 * micro_batches, rel=1e-3), "a tenth, had each been clipped before"
    balance.release()
    assert not {"apply", "apply_gradients"} & vars(model.optimizer).keys()

"""What a traced step says of the states of metrics, on whichever Keras is installed as tf.keras."""

from __future__ import annotations

import pytest

tf = pytest.importorskip("tensorflow")
from keras_callbacks import host  # noqa: E402
from keras_callbacks.reductions import reductions_in  # noqa: E402

keras = tf.keras


class Kept(keras.metrics.Metric):
    """Keeps one number, which ``change`` makes anew of it and of what comes."""

    def __init__(self, change):
        super().__init__(name="kept")
        self.change = change
        self.kept = self.add_weight(name="kept", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.kept.assign(self.change(self.kept, y_pred))

    def result(self):
        return self.kept


def reductions(metric):
    """By the numbers of the metric's variables; those that the step does not assign are left out."""

    def update():
        y = tf.constant([[0.25], [0.75]])
        metric.update_state(tf.round(y), y)

    update()  # some variables exist only then
    variables = host.plain(metric.variables)
    graph = tf.function(update).get_concrete_function().graph
    found = reductions_in(graph, variables)
    return [found[v._unique_id] for v in variables if v._unique_id in found]


@pytest.mark.parametrize(
    ("change", "reduction"),
    [
        (lambda kept, new: tf.convert_to_tensor(kept) + tf.reduce_sum(new), "sum"),
        (lambda kept, new: tf.reduce_sum(new) + tf.convert_to_tensor(kept), "sum"),
        (lambda kept, new: tf.convert_to_tensor(kept) - tf.reduce_sum(new), "sum"),
        (lambda kept, new: tf.maximum(tf.convert_to_tensor(kept), tf.reduce_max(new)), "max"),
        (lambda kept, new: tf.cast(tf.minimum(tf.reduce_min(new), tf.convert_to_tensor(kept)), tf.float32), "min"),
        (lambda kept, new: 0.9 * tf.convert_to_tensor(kept) + 0.1 * tf.reduce_mean(new), "unknown"),
        (lambda kept, new: tf.reduce_max(new), "unknown"),
    ],
    ids=["sum", "sum the other way round", "difference", "maximum", "minimum", "moving average", "the latest"],
)
def test_an_update_says_what_is_kept(change, reduction):
    assert reductions(Kept(change)) == [reduction]


@pytest.mark.parametrize(
    "name",
    [
        "Mean", "Sum", "MeanSquaredError", "BinaryAccuracy", "AUC", "Precision", "Recall", "TruePositives", "BinaryIoU",
        "R2Score", "RootMeanSquaredError", "SensitivityAtSpecificity", "F1Score",
    ],
)  # fmt: skip
def test_all_that_keras_itself_keeps_is_a_sum(name):
    cls = getattr(keras.metrics, name)
    metric = cls(0.5) if name == "SensitivityAtSpecificity" else cls()
    if name in ("Mean", "Sum"):
        update = metric.update_state
        metric.update_state = lambda y_true, y_pred: update(y_pred)
    found = reductions(metric)
    assert found
    assert set(found) == {"sum"}

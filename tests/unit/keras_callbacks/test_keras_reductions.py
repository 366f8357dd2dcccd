"""What a traced step says of the states of metrics, on whichever Keras is installed as tf.keras."""

from __future__ import annotations

import pytest

tf = pytest.importorskip("tensorflow")
from keras_callbacks.keras_versions import tf_variables  # noqa: E402
from keras_callbacks.metrics.reductions import of_no_batch, updates_in, variables_of, weigh  # noqa: E402
from keras_callbacks.metrics.step_results import Told  # noqa: E402

keras = tf.keras


class Kept(keras.metrics.Metric):
    """Keeps one number, which ``change`` makes again of it and of what comes."""

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
    variables = tf_variables(metric.variables)
    graph = tf.function(update).get_concrete_function().graph
    found = updates_in(graph, variables_of(graph, variables))
    return [found[v._unique_id].kind for v in variables if v._unique_id in found]


@pytest.mark.parametrize(
    ("update", "counts"),
    [
        (lambda mean, batch: mean.update_state(tf.reduce_mean(batch)), True),
        (lambda mean, batch: mean.update_state(tf.reduce_mean(batch), sample_weight=0.5), True),
        (lambda mean, batch: mean.update_state(batch), False),
        (lambda mean, batch: mean.update_state(tf.reduce_mean(batch), sample_weight=tf.shape(batch)[0]), False),
    ],
    ids=["its mean", "its mean with a weight", "its samples", "its mean with its length as weight"],
)
def test_a_mean_of_batches_is_told_from_a_mean_of_samples_and_grows_by_its_share(update, counts):
    mean = keras.metrics.Mean()
    variables = tf_variables(mean.variables)

    @tf.function
    def step(batch):
        update(mean, batch)
        graph = tf.compat.v1.get_default_graph()
        updates = updates_in(graph, variables_of(graph, variables))
        assert any(u.counts_batches for u in updates.values()) == counts
        weigh(updates.values(), tf.constant(0.25))

    step.get_concrete_function(tf.TensorSpec([None]))
    step(tf.constant([1.0, 2.0, 6.0]))
    assert float(mean.result()) == pytest.approx(3.0)
    alone = keras.metrics.Mean()
    update(alone, tf.constant([1.0, 2.0, 6.0]))
    expected = [float(v.numpy()) / 4 for v in tf_variables(alone.variables)]
    assert [float(v.numpy()) for v in variables] == pytest.approx(expected)


def test_figures_are_told_again_of_another_state_unless_the_batch_has_a_part_in_them():
    mean, other, weight = keras.metrics.Mean(), keras.metrics.Mean(), tf.Variable(2.0)
    made, seed = {}, tf.Variable(1.0)

    @tf.function
    def step(batch):
        before = other.result()
        mean.update_state(batch)
        other.update_state(batch)
        figures = {
            "mean": mean.result(),
            "of both": {"root": tf.sqrt(mean.result() + other.result())},
            "constant": tf.constant(3.0),
            "of the batch": tf.reduce_max(batch),
            "mixed": mean.result() + batch[0],
            "before": before,
            "weight": weight + 0.0,
            "in a function": tf.function(lambda: 2 * mean.result())(),
            "in a branch": tf.cond(batch[0] > 0, mean.result, lambda: tf.constant(0.0)),
            "of the batch in a function": tf.function(lambda: tf.convert_to_tensor(weight) * batch[0] + seed)(),
        }
        figures = tf.nest.map_structure(tf.identity, figures)
        graph = tf.compat.v1.get_default_graph()
        known = [*tf_variables([*mean.variables, *other.variables]), weight, seed]
        handles = variables_of(graph, known)
        metrics = tf_variables([*mean.variables, *other.variables])
        made["told"] = Told(graph, figures, handles, updates_in(graph, handles), [weight], metrics)
        return figures

    step(tf.constant([1.0, 3.0]))
    told = made["told"]
    assert set(told.state) == {"mean", "of both", "constant"}
    assert told.partly_of_state == ["mixed", "before", "in a function", "in a branch"]
    for metric in (mean, other):
        metric.reset_state()
    mean.update_state([7.0])
    other.update_state([9.0])
    again = told.compute()
    assert float(again["mean"]) == 7.0
    assert float(again["of both"]["root"]) == 4.0
    assert float(again["constant"]) == 3.0


def test_what_a_step_advances_alike_on_all_ranks_is_told_from_what_depends_on_the_batch():
    names = ["weight", "teacher", "count", "statistic", "follower_of_statistic", "mixed", "noise", "idle"]
    found = {}

    @tf.function
    def step(batch):
        v["weight"].assign_sub(0.1 * batch)
        v["teacher"].assign(0.9 * v["teacher"] + 0.1 * v["weight"] * v["count"])
        v["count"].assign_add(1.0)
        v["statistic"].assign(0.9 * v["statistic"] + 0.1 * batch)
        v["follower_of_statistic"].assign(0.5 * v["statistic"])
        v["mixed"].assign(v["weight"] * batch)
        v["noise"].assign(v["noise"] + tf.random.uniform([]))
        graph = tf.compat.v1.get_default_graph()
        handles = variables_of(graph, v.values())
        found["all"] = of_no_batch(graph, handles, updates_in(graph, handles), v.values(), [v["weight"]])

    v = {name: tf.Variable(1.0) for name in names}
    step.get_concrete_function(tf.TensorSpec([]))
    assert [name for name in names if any(each is v[name] for each in found["all"])] == ["teacher", "count"]


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

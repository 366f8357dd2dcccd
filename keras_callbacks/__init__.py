"""hvd-hetero for Keras 3 and tf_keras: one callback in ``model.fit``, on data that it can resize."""

from keras_callbacks.custom_loop import average_by_samples, weighted_gradients
from keras_callbacks.data import resize_batches, validation_batches
from keras_callbacks.learning_rates import LearningRateSchedule, LearningRateWarmup
from keras_callbacks.load_balance import LoadBalance

__all__ = [
    "LearningRateSchedule", "LearningRateWarmup", "LoadBalance", "average_by_samples", "resize_batches",
    "validation_batches", "weighted_gradients",
]  # fmt: skip

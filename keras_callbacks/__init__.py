"""hvd-hetero for Keras 3 and tf_keras: one callback in ``model.fit``, on data that it can resize."""

from keras_callbacks.data import resize_batches
from keras_callbacks.load_balance import LoadBalance

__all__ = ["LoadBalance", "resize_batches"]

"""To be imported before TensorFlow runs anything: graphs then run as they were traced, and are not optimised first.

Optimising takes a quarter of the processor time of a small ``fit``. It is TensorFlow's, and knows no version of Keras.
So tf_keras runs without it, and Keras 3 with it where the weights of many kinds of training are compared: exactness,
ported scripts, elastic jobs (of every kind of round) and examples.
"""

import tensorflow as tf

tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

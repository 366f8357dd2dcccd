"""To be imported before TensorFlow runs anything: graphs then run as they were traced, and are not optimised first.

Optimising takes a sixth of the processor time of a small ``fit``. It is TensorFlow's, and knows no version of Keras, so
one version runs with it and the other without.
"""

import tensorflow as tf

tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

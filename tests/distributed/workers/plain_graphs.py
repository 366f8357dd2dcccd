"""To be imported before TensorFlow runs anything: graphs then run as they were traced, and are not optimised first.

Optimising takes a quarter of the processor time of a small ``fit``. It is TensorFlow's, and knows no version of Keras
and no change of ranks. So ranks run without it but in the tests of exactness on Keras 3, whose worker calls `optimise`.
"""

import tensorflow as tf

tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def optimise(on: bool) -> None:
    """Have TensorFlow optimise graphs that are traced from now on, as it does for users."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not on})

"""Graphs run as they were traced, and keep no stacks, as most do on ranks: a third of these tests' time.

On ranks of Keras 3, exactness and ported scripts run them as TensorFlow optimises them.
"""

import tests.distributed.workers.plain_graphs
import tests.distributed.workers.without_stacks  # noqa: F401

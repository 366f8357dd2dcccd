"""Graphs run as they were traced, and keep no stacks, as most do on ranks: a third of these tests' time.

On ranks of Keras 3, exactness and ported scripts run them as TensorFlow optimises them.
"""

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("horovod") and find_spec("tensorflow") else ["test_*.py"]
if not collect_ignore_glob:
    import tests.distributed.workers.plain_graphs
    import tests.distributed.workers.without_stacks  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def horovod():
    """One rank, without horovodrun."""
    import horovod.tensorflow as hvd

    hvd.init()
    yield
    hvd.shutdown()

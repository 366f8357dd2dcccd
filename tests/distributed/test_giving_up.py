"""A rank that gives up is done with that, whatever its other threads are about to send."""

import pytest
from limits import TORCH_S

pytestmark = pytest.mark.distributed


def test_a_thread_that_sends_while_horovod_lets_go_of_a_tensor_does_not_wait_for_ever(launch):
    result = launch("giving_up.py", 2, framework="torch", timeout_s=TORCH_S)
    assert result.reports[0] == {
        "ended by": "another",  # with the locks that a released Horovod holds there, this is where all stops
        "waited for the sender": True,
        "sending": "is told that Horovod has given up",
    }

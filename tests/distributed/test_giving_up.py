"""A rank that gives up is done with that, whatever its other threads are about to send."""

import pytest
from limits import TORCH_S

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def outcome(launch):
    return launch("giving_up.py", 2, framework="torch", timeout_s=TORCH_S).reports[0]


def test_a_thread_that_sends_while_horovod_lets_go_of_a_tensor_does_not_wait_for_ever(outcome):
    assert outcome["giving up"] == {
        "ended by": "another",  # with the locks that a released Horovod holds there, this is where all stops
        "waited for the sender": True,
        "sending": "is told that Horovod has given up",
    }


def test_a_rank_that_waits_for_a_collective_leaves_the_processor_to_others(outcome):
    """The launch sets HOROVOD_WAIT_SLEEP_US; the other rank comes a second late."""
    assert outcome["awake_s"] < 0.15, "a released Horovod yields the processor in a loop"

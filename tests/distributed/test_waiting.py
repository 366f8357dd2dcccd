"""Ranks that wait for one another say for whom and where, and a job that cannot go on ends with that on every rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from limits import KERAS_S, TORCH_S

from hvd_hetero.testing import RankError, launch
from hvd_hetero.watchdog import EXIT_CODE

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "waiting.py"


@pytest.mark.parametrize(
    ("case", "elsewhere"),
    [
        ("a_metric_averaged_in_the_body", r"hvd\.allreduce\(\) at waiting\.py:\d+, .*lambda"),
        ("a_metric_averaged_in_the_body/micro-batches", r"hvd\.allreduce\(\) at waiting\.py:\d+, .*lambda"),
        ("a_stop_that_one_rank_decides", r"hvd\.allreduce\(\) at waiting\.py:\d+, evaluate\(\)"),
    ],
)
def test_ranks_that_wait_for_one_another_end_with_a_message_on_each(case, elsewhere):
    with pytest.raises(RankError) as caught:
        launch(WORKER, 2, [case], timeout_s=TORCH_S)
    assert EXIT_CODE in caught.value.exit_codes.values()
    for said in caught.value.result.stderr:
        assert re.search(r"has waited for \d+ s in round \d+, at ", said)
        assert re.search(elsewhere, said)
        assert "all ranks wait, in different collectives. The body of the loop runs once per micro-batch" in said
        assert "The job ends (Patience(deadlock=4))" in said
        assert "Thread 0x" in said  # the stacks


def test_a_rank_that_is_stopped_is_known_by_its_silence():
    with pytest.raises(RankError) as caught:
        launch(WORKER, 2, ["a_rank_that_is_stopped"], timeout_s=TORCH_S)
    assert caught.value.exit_codes[0] == EXIT_CODE
    said = caught.value.result.stderr[0]
    assert re.search(r"rank 0 has waited for \d+ s in round \d, at .* for rank 1, which does not answer: stopped", said)


def test_a_rank_that_is_at_work_is_waited_for():
    result = launch(WORKER, 2, ["a_long_evaluation_on_one_rank"], timeout_s=TORCH_S)
    assert result.reports == (6, 6)
    said = result.stderr[0]
    assert re.search(
        r"rank 0 has waited for \d+ s in round 3, .* for rank 1, .*evaluate_at_length\(\), and does not", said
    )
    assert 2 <= said.count("has waited for") <= 4  # after 2, 4, 8 and perhaps 16 s
    assert "has waited" not in result.stderr[1]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("a_rank_that_is_stopped", r"for rank 1, which does not answer: stopped"),
        ("a_collective_on_one_rank", r"hvd\.allreduce\(\) at keras_waiting\.py:\d+, Stuck\.on_train_batch_end\(\)"),
    ],
)
def test_a_fit_that_gets_stuck_ends_with_a_message(case, said):
    """Keras 3: a rank that is stopped for good, and a collective that one rank alone calls in a callback."""
    worker = WORKER.with_name("keras_waiting.py")
    with pytest.raises(RankError) as caught:
        launch(worker, 2, [case], timeout_s=KERAS_S, env={"TF_CPP_MIN_LOG_LEVEL": "2"})
    assert caught.value.exit_codes[0] == EXIT_CODE
    message = caught.value.result.stderr[0]
    assert re.search(r"rank 0 has waited for \d+ s in round \d", message)
    assert re.search(said, message)

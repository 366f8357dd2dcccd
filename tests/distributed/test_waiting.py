"""Ranks that wait for one another say for whom and where, and a job that cannot go on ends with that on every rank."""

from __future__ import annotations

import re
from functools import partial

import pytest
from limits import KERAS_S, TORCH_S
from side_by_side import side_by_side

from hvd_hetero.testing import RankError
from hvd_hetero.watchdog import EXIT_CODE

pytestmark = pytest.mark.distributed
OVER_TORCH = "a_stop_that_one_rank_decides, over torch.distributed"
FUNCTIONAL = "a_functional_collective_in_the_body/no data, over torch.distributed"
CASES = {
    "waiting.py": [
        "a_stop_that_one_rank_decides",
        "a_rank_that_is_stopped",
        "a_long_evaluation_on_one_rank",
        "a_rank_that_raises",
    ],
    "keras_waiting.py": ["a_fit_with_a_rank_that_is_stopped", "a_fit_with_a_collective_on_one_rank"],
}


@pytest.fixture(scope="module")
def jobs(request, launch):
    def start(worker, case):
        framework, limit_s = ("torch", TORCH_S) if worker == "waiting.py" else ("Keras 3", KERAS_S)
        return launch(worker, 2, [case], framework=framework, timeout_s=limit_s)

    started = {case: partial(start, worker, case) for worker, cases in CASES.items() for case in cases}
    options = {"framework": "torch.distributed", "timeout_s": TORCH_S}
    for name in (OVER_TORCH, FUNCTIONAL):
        started[name] = partial(launch, "waiting.py", 2, [name.partition(",")[0]], **options)
    with side_by_side(request, started) as jobs:
        yield jobs


def failure_of(job):
    with pytest.raises(RankError) as caught:
        job.result()
    return caught.value


@pytest.mark.parametrize(
    ("case", "elsewhere"),
    [
        ("a_stop_that_one_rank_decides", r"hvd\.allreduce\(\) at waiting\.py:\d+, evaluate\(\)"),
        (FUNCTIONAL, r"dist\.\w+\(\) at waiting\.py:\d+, .*average\(\)"),
        (OVER_TORCH, r"dist\.all_reduce\(\) at ranks\.py:\d+, ProcessGroup\.allreduce\(\)"),
    ],
)
def test_ranks_that_wait_for_one_another_end_with_a_message_on_each(jobs, case, elsewhere):
    failure = failure_of(jobs[case])
    assert EXIT_CODE in failure.exit_codes.values()
    for said in failure.result.stderr:
        assert re.search(r"has waited for \d+ s in round \d+, at ", said)
        assert re.search(elsewhere, said)
        assert "all ranks wait, in different collectives. The body of the loop runs once per micro-batch" in said
        assert "The job ends (Patience(deadlock=4))" in said
        assert "Thread 0x" in said  # the stacks


@pytest.mark.parametrize("case", ["a_rank_that_is_stopped"])
def test_a_rank_that_is_stopped_is_known_by_its_silence(jobs, case):
    failure = failure_of(jobs[case])
    assert failure.exit_codes[0] == EXIT_CODE
    said = failure.result.stderr[0]
    assert re.search(r"rank 0 has waited for \d+ s in round \d, at .* for rank 1, which does not answer: stopped", said)


@pytest.mark.parametrize("case", ["a_rank_that_raises"])
def test_a_rank_that_raises_is_named_on_the_others(jobs, case):
    first, second = failure_of(jobs[case]).result.stderr
    assert "Horovod has been shut down" in first, "what Horovod says of it there, and no more"
    assert first.count("rank 1 has failed: ValueError: label 7 of 5 classes.") == 1
    assert "has failed" not in second, "rank 0 fails because of it, which is no news"


@pytest.mark.parametrize("case", ["a_long_evaluation_on_one_rank"])
def test_a_rank_that_is_at_work_is_waited_for(jobs, case):
    result = jobs[case].result()
    assert result.reports == (6, 6)
    said = result.stderr[0]
    assert re.search(r"rank 0 has waited for \d+ s in round 3, .* for rank 1, .*evaluate_at_length\(\), at work", said)
    in_round_3 = r"has waited for \d+ s in round 3"  # in others a busy machine may keep ranks waiting, too
    assert 2 <= len(re.findall(in_round_3, said)) <= 4  # after 2, 4, 8 and perhaps 16 s
    assert not re.search(in_round_3, result.stderr[1])


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("a_fit_with_a_rank_that_is_stopped", r"for rank 1, which does not answer: stopped"),
        (
            "a_fit_with_a_collective_on_one_rank",
            r"hvd\.allreduce\(\) at keras_waiting\.py:\d+, Stuck\.on_train_batch_end\(\)",
        ),
    ],
)
def test_a_fit_of_keras_that_gets_stuck_ends_with_a_message(jobs, case, said):
    """Keras 3: a rank that is stopped for good, and a collective that one rank alone calls in a callback."""
    failure = failure_of(jobs[case])
    assert failure.exit_codes[0] == EXIT_CODE
    message = failure.result.stderr[0]
    assert re.search(r"rank 0 has waited for \d+ s in round \d", message)
    assert re.search(said, message)

"""Ranks that train alike are not told that they part, on like kernels and on unlike ones.

The long form of the check, in the commands of a machine that is quiet (some minutes):

    HVD_HETERO_TEST_ROUNDS=2000 .venv/bin/python -m pytest tests/distributed/test_agreement.py
"""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.distributed
MODELS = "large, AdamW, clipped", "images", "recurrent, RMSprop", "transformer", "float16"
LONG = "HVD_HETERO_TEST_ROUNDS"
ROUNDS = int(os.environ.get(LONG, "12"))
# The short form has one model of each kind of kernel, one of them once more on kernels that are alike.
CASES = [(model, "unlike") for model in ("images", "transformer", "float16")] + [(MODELS[0], "like")]
if LONG in os.environ:
    CASES = [(model, kernels) for model in MODELS for kernels in ("like", "unlike")]


@pytest.fixture(scope="module")
def ranks(pool):
    with pool("agreement.py", 2, "torch") as ranks:
        yield ranks


@pytest.mark.parametrize(("model", "kernels"), CASES)
def test_ranks_that_train_alike_hear_of_no_difference(ranks, model, kernels):
    for rank in ranks:
        outcome = rank[f"{model}, {kernels} kernels"]
        assert outcome["rounds"] == ROUNDS
        if kernels == "like":
            assert outcome["apart"] == 0.0

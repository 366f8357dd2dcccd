"""How gradients lie in memory does not matter, nor which of them leave together."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from limits import TORCH_S

pytestmark = pytest.mark.distributed
ROUNDS = 6


@pytest.fixture(scope="module")
def job(launch, tmp_path_factory):
    """What the ranks report, and what Horovod of rank 0 says that it did: operations by the names of tensors."""
    path = tmp_path_factory.mktemp("timeline") / "timeline.json"
    result = launch("torch_layouts.py", 2, framework="torch", timeout_s=TORCH_S, env={"HOROVOD_TIMELINE": str(path)})
    tensors, done = {}, Counter()
    for event in json.loads(path.read_text().rstrip(",]\n ") + "]"):
        if event.get("name") == "process_name":
            tensors[event["pid"]] = event["args"].get("name", "")
        elif event.get("ph") == "B":
            done[tensors[event["pid"]], event["name"]] += 1
    return result.reports, done


@pytest.fixture(scope="module")
def ranks(job):
    return job[0]


def test_the_table_travels_by_itself_in_the_first_round_alone(job):
    """By what Horovod says that it did."""
    _, done = job
    tables = {tensor: count for (tensor, said), count in done.items() if said == "ALLREDUCE" and ".table" in tensor}
    assert len(tables) >= 12, "one for each training"
    assert set(tables.values()) == {1}, tables


def test_every_round_posts_as_many_collectives_and_the_first_the_table_besides(ranks):
    for rank in ranks:
        assert set(rank["collectives"]) == {"even", "uneven", "in micro-batches"}
        for first, *others in rank["collectives"].values():
            assert others == [first - 1] * (ROUNDS - 1), "once it is known what is trained"
            assert 1 < others[0] < 6, "fewer than there are parameters"


def test_channels_last_transposed_and_empty_parameters_train_as_plain_ones_also_with_fused_optimizers(ranks):
    assert len(ranks[0]["off"]) == 8
    for rank in ranks:
        assert all(off <= 1e-12 for off in rank["off"].values()), rank["off"]


def test_ranks_whose_parameters_lie_in_memory_in_different_orders_are_refused(ranks):
    for rank in ranks:
        assert "do not train the same parameters" in rank["differ"]
    assert "strides" in ranks[1]["differ"]


def test_ranks_that_compress_differently_are_refused(ranks):
    for rank in ranks:
        assert "do not call DistributedOptimizer alike" in rank["compression"]
    assert "this rank has compression=FP16Compressor" in ranks[1]["compression"]


def test_a_gradient_that_a_hook_changes_before_it_was_summed_is_refused(ranks):
    for rank in ranks:
        assert "'3.weight' was changed between backward() and step()" in rank["late"]


def test_gradients_that_are_kept_change_nothing_nor_where_they_are_put_back_for_any_parameter(ranks):
    for rank in ranks:
        assert set(rank["kept"]) == {"kept", "put_back", "put_crosswise"}
        assert all(off <= 1e-12 for off in rank["kept"].values()), rank["kept"]


def test_gradients_keep_their_weight_where_what_leaves_together_changes(ranks):
    assert all(rank["thawed"] <= 1e-12 for rank in ranks)

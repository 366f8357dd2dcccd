"""Scaled losses beside DDP, FSDP2 and Horovod's own optimizer: exact, timed, and told where it goes wrong."""

from __future__ import annotations

import re
import statistics

import pytest

from hvd_hetero.testing import quota_available

pytestmark = pytest.mark.distributed
JOBS = {
    "2 ranks of torch.distributed": (2, "torch.distributed"),
    "3 ranks of torch.distributed": (3, "torch.distributed"),
    "2 ranks of Horovod": (2, "torch"),
    "3 ranks of Horovod": (3, "torch"),
}
FOUR = {"4 ranks of torch.distributed": (4, "torch.distributed")}
ANY = [
    "momentum", "adamw", "clipped", "frozen", "static", "bsp", "lb-bsp", "loader with a worker",
]  # fmt: skip
TOKENS = ["tokens", "tokens, k = 3", "tokens told to scale", "lengths"]
SEVERAL = ["k = 3", "k = 3, reduced each time", "max_micro_batch", "lengths, k = 2 at least"]
EXACT = {
    "ddp": [
        *ANY,
        *SEVERAL,
        *TOKENS,
        "decay in the loss",
        "penalty",
        "find_unused_parameters",
        "static_graph",
        "scaler",
    ],
    "fsdp": [*ANY, *SEVERAL, *TOKENS, "kept whole"],
    "horovod": [*ANY, *TOKENS, "decay in the loss", "penalty", "k = 3", "sums"],
}


@pytest.fixture(scope="module")
def ranks(request, pool):
    with pool("torch_beside.py", *(JOBS | FOUR)[request.param]) as ranks:
        yield ranks


def of(*kinds: str, ranks: int):
    """Jobs of so many ranks on which one of these reducers is."""
    wires = {"Horovod" if kind == "horovod" else "torch.distributed" for kind in kinds}
    found = [f"{ranks} ranks of {wire}" for wire in sorted(wires)]
    return pytest.mark.parametrize("ranks", found, indirect=True, scope="module")


def require_exact(outcome):
    assert outcome["difference"] <= 1e-10
    assert outcome["between_ranks"] == 0.0
    assert outcome["visited"]


# All cases on two ranks, on three those in which it matters how many ranks there are.
OF_THREE = {
    "ddp": ["momentum", "static", "k = 3", "max_micro_batch"],
    "fsdp": ["momentum", "k = 3"],
    "horovod": ["momentum", "static", "sums"],
}
for kind in OF_THREE:
    OF_THREE[kind] += ["tokens", "lengths"]
OWN = {
    "own": [
        "tokens", "tokens, max_micro_batch", "tokens, a rank without data", "lengths", "lengths, in micro-batches",
        "lengths of a stream", "rests",
    ],
}  # fmt: skip


BOTH = ["", ", tokens", ", max_micro_batch"]
ADAPTS = {"own": BOTH, "ddp": [*BOTH, ", k = 2", ", clipped", ", reduced each time"]}
ADAPTS = {kind: [f"a batch that adapts{how}" for how in hows] for kind, hows in ADAPTS.items()}


def cases(table, *kinds):
    return pytest.mark.parametrize("case", [f"{kind}: {case}" for kind in kinds for case in table[kind]])


@of("ddp", ranks=2)
@cases(EXACT, "ddp", "fsdp")
def test_ddp_and_fsdp2_train_as_one_process_does(ranks, case):
    require_exact(ranks[0][case])


@of("ddp", ranks=3)
@cases(OF_THREE, "ddp", "fsdp")
def test_three_ranks_of_ddp_and_fsdp2_train_as_one_process_does(ranks, case):
    require_exact(ranks[0][case])


@of("horovod", ranks=2)
@cases(EXACT, "horovod")
def test_horovods_own_optimizer_trains_as_one_process_does(ranks, case):
    require_exact(ranks[0][case])


@of("horovod", ranks=3)
@cases(OF_THREE, "horovod")
def test_three_ranks_of_horovods_own_optimizer_train_as_one_process_does(ranks, case):
    require_exact(ranks[0][case])


@of("ddp", "horovod", ranks=2)
@cases(OWN, "own")
def test_unequal_samples_train_as_one_process_does(ranks, case):
    require_exact(ranks[0][case])


@of("ddp", ranks=3)
@cases(OWN, "own")
def test_unequal_samples_of_three_ranks_train_as_one_process_does(ranks, case):
    require_exact(ranks[0][case])


@of("ddp", ranks=2)
@cases(ADAPTS, "ddp", "own")
def test_a_batch_that_adapts_trains_as_one_process_that_measures_noise_itself(ranks, case):
    require_adapted(ranks[0][case])


@of("ddp", ranks=3)
@cases(ADAPTS, "ddp", "own")
def test_three_ranks_whose_batch_adapts_train_as_one_process_does(ranks, case):
    require_adapted(ranks[0][case])


def require_adapted(outcome):
    assert outcome["scale"] <= 1e-8, "the noise scale that is told"
    require_exact(outcome)
    assert outcome["scales"] > 3
    assert outcome["totals"] >= 3


@of("ddp", "horovod", ranks=2)
def test_a_rank_that_costs_more_than_it_gives_has_rested(ranks):
    assert 0 in ranks[0]["own: rests"]["micro_batches"]


@of("ddp", ranks=2)
@pytest.mark.parametrize("case", ["0, k = 1", "0, k = 3", "1, k = 1", "1, k = 3"])
def test_deepspeeds_engine_trains_as_one_process_does(ranks, case):
    pytest.importorskip("deepspeed")
    outcome = ranks[0][f"deepspeed: {case}"]
    assert outcome["difference"] <= 1e-5, "of 32 bits"
    assert outcome["between_ranks"] == 0.0
    assert outcome["visited"]


@of("fsdp", ranks=2)
def test_mixed_precision_of_fsdp2_is_near(ranks):
    assert 0 < ranks[0]["fsdp: mixed precision"]["difference"] < 0.02


@of("ddp", ranks=2)
def test_the_hard_cases_did_occur(ranks):
    """Splits that change all the time, and unequal micro-batches in equal numbers."""
    assert ranks[0]["ddp: momentum"]["splits"] >= 5
    assert ranks[0]["ddp: momentum"]["tables"] == 30, "one a round, where they cost nothing"
    assert ranks[0]["ddp: k = 3"]["micro_batches"] == [3]
    assert ranks[0]["ddp: k = 3"]["splits"] >= 3
    assert max(ranks[0]["ddp: max_micro_batch"]["micro_batches"]) >= 2
    assert ranks[0]["ddp: lb-bsp"]["tables"] < 30, "steps of a millisecond pay for few"
    assert ranks[0]["ddp: static"]["micro_batches"] == [1], "shares of a batch"


@of("ddp", ranks=2)
@pytest.mark.parametrize("how", ["ddp", "fsdp, checkpointed"])
def test_a_rank_times_its_own_work(ranks, how):
    require_own_time(ranks, how)


@of("fsdp", ranks=3)
def test_three_ranks_time_their_own_work_under_fsdp2(ranks):
    require_own_time(ranks, "fsdp")


@pytest.mark.parametrize("case", ["ddp: momentum", "ddp: k = 3", "fsdp: momentum"])
@pytest.mark.parametrize("ranks", FOUR, indirect=True, scope="module")
def test_four_ranks_train_as_one_process_does(ranks, case):
    require_exact(ranks[0][case])


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", FOUR, indirect=True, scope="module")
def test_four_ranks_time_their_own_work(ranks, how):
    require_own_time(ranks, how)


@of("horovod", ranks=2)
def test_a_rank_times_its_own_work_beside_horovods_optimizer(ranks):
    require_own_time(ranks, "horovod")


def require_own_time(ranks, how):
    outcome = ranks[0][f"{how}: own time"]
    slept_s = outcome["slept_s"]
    for rank, slept in enumerate(slept_s):
        own_s = min(of_round[rank] for of_round in outcome["compute_s"])
        # On a quiet machine within 3 ms; three ranks on two busy cores once were beyond. Waits are a fifth of a second.
        assert slept <= own_s <= 1.05 * slept + 15e-3, "a busy machine adds some to all but the shortest"
    waits = [statistics.median(each) for each in zip(*outcome["wait_s"], strict=True)]
    assert waits[0] > 0.8 * (slept_s[-1] - slept_s[0])


@of("ddp", ranks=2)
@pytest.mark.parametrize("case", ["ddp: slow rank", "fsdp: slow rank, k = 3"])
def test_lb_bsp_gives_the_slow_rank_less(ranks, case):
    require_less_for_the_slow_rank(ranks, case)


@of("horovod", ranks=2)
def test_lb_bsp_gives_the_slow_rank_less_beside_horovods_optimizer(ranks):
    require_less_for_the_slow_rank(ranks, "horovod: slow rank")


def require_less_for_the_slow_rank(ranks, case):
    plans = ranks[0][case]["plans"]
    # Of the whole second half, and with room above: on a busy machine, hitches of one rank move single plans.
    fast, slow = (statistics.median(shares) for shares in zip(*plans[len(plans) // 2 :], strict=True))
    assert 1.3 < fast / slow < 4.0


@of("fsdp", ranks=3)
@pytest.mark.parametrize("cause", ["throttled", "input"])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_the_report_names_the_slow_rank_and_its_cause(ranks, how, cause):
    if cause == "throttled" and not (support := quota_available()):
        pytest.skip(support.why)
    told, slow = ranks[0][f"{how}: {cause}"], len(ranks) - 1
    assert told["named"][slow] == cause
    # A busy machine takes time from any rank, and anywhere in its round.
    assert {*told["named"][:slow]} <= {"", "competition", "loop", "input"} - {cause}
    assert cause in told["why"]
    assert f"Rank {slow}" in told["verdict"]


@of("ddp", ranks=2)
def test_a_training_under_torchrun_goes_on_from_a_file(ranks):
    for rank in ranks:
        assert rank["ddp: saved"] == {"began": 11, "apart": 0.0}


@of("horovod", ranks=2)
@pytest.mark.parametrize("keep", ["saved", "committed"])
def test_a_training_with_horovods_own_optimizer_goes_on_where_it_was_kept(ranks, keep):
    for rank in ranks:
        assert rank[f"horovod: {keep}"]["began"] == 11
        assert rank[f"horovod: {keep}"]["apart"] <= 1e-14, "Horovod sums in another order now and then"


@of("fsdp", ranks=2)
def test_a_sharded_model_does_not_go_into_one_file(ranks):
    for rank in ranks:
        assert re.match("ValueError: model is sharded.*torch.distributed.checkpoint", rank["fsdp: saved"])


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("no scalar", r"ValueError: loss must be one number.*got shape \(2,\); scale loss.mean\(\)"),
        ("no tensor", "TypeError: loss must be a tensor, got float"),
        ("not scaled", r"RoundStateError: the loss of the last batch was not scaled.*balance.scale\(loss\)"),
        ("not propagated", r"RoundStateError: the scaled loss of the last batch was not used"),
        ("twice", "RoundStateError: scale.. came twice for one batch"),
        ("each of two", "RoundStateError: scale.. came twice for one batch.*of several models too.*scale their sum"),
        ("sum of two", "nothing was refused"),
        ("no gradient", r"ValueError: loss has no gradient: it was computed or scaled under torch.no_grad\(\)"),
        ("outside", "RoundStateError: scale.. came without a batch"),
        ("collective", "nothing was refused"),
        ("learning rates", r"PlanMismatchError: round \d: ranks \[1\] have other hyper-parameters"),
        ("NaN", r"HeteroError: round 4: the gradient of ranks \[1\] is not finite"),
        ("policy", "ValueError: policy 'non-blocking' needs a reducer of this package.*optimizer = DistributedOptim"),
        ("no data", "ValueError: policy 'static' needs a reducer of this package"),
        ("wrapped too late", "ValueError: balance has begun beside a reducer of your own"),
        ("weighs nothing", r"ValueError: weight_of gave 0.*round 3\b"),
        ("negative weight", "ValueError: weight must be.*-1"),
        ("two weights", "ValueError: weight of scale.*weight_of"),
    ],
)
@of("ddp", "horovod", ranks=2)
def test_what_goes_wrong_is_told(ranks, attempt, message):
    for rank in ranks:
        assert re.match(message, rank["attempts"][attempt])


@of("ddp", ranks=2)
@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("no reducer", r"PlanMismatchError: round \d+: ranks \[1\] hold other parameters.*DistributedDataParallel"),
        ("step in between", "RoundStateError: step.. came in the middle of a round.*if balance.round_complete"),
        ("cleared in between", "RoundStateError: zero_grad.. came in the middle of a round"),
        ("adapts, by hand", "ValueError: global_batch=Goodput.*could not measure"),
        ("adapts, not cleared", "ValueError: global_batch=Goodput.*zero_grad"),
        ("adapts, in shards", "ValueError: global_batch=Goodput.*fully_shard.*torch_hooks.DistributedOptimizer"),
        ("not to be accumulated", "TypeError: model must be a DistributedDataParallel or sharded by fully_shard"),
    ],
)
def test_what_goes_wrong_beside_ddp_is_told(ranks, attempt, message):
    for rank in ranks:
        assert re.match(message, rank["attempts"][attempt])


@of("horovod", ranks=2)
@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("adapts", "ValueError: global_batch=Goodput.*hvd.DistributedOptimizer.*torch_hooks.DistributedOptimizer"),
        ("sums", "ValueError: hvd.DistributedOptimizer makes the sum.*reducer='sum'"),
        ("closure", r"RoundStateError: step.closure. of hvd.DistributedOptimizer reduces.*skip_synchronize"),
        ("closure that reduces", "nothing was refused"),
    ],
)
def test_what_goes_wrong_beside_horovods_optimizer_is_told(ranks, attempt, message):
    for rank in ranks:
        assert re.match(message, rank["attempts"][attempt])

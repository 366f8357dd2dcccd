"""The benchmark of causes counts as right what is right, and nothing else."""

from dataclasses import replace

import pytest
from script_modules import load

benchmark = load("causes", "benchmarks")


def outcome(cause, slow, *named):
    """An outcome whose verdict tells what the ranks were given."""
    why = tuple(sorted({*named} - {""}))
    verdict = "late" if why else "nothing"
    return benchmark.Outcome(cause, "given", "bsp", slow, [0.0, 0.5], 0.1, list(named), "It is slow.", verdict, why)


@pytest.mark.parametrize("cause", [name for name in benchmark.CAUSES if name != "network"])
def test_the_slow_rank_alone_must_get_its_cause(cause):
    kind = benchmark.CAUSES[cause].kind
    assert outcome(cause, 1, "", kind).right
    assert outcome(cause, 0, kind, "").right
    for wrong in (("", ""), (kind, ""), (kind, kind), ("", "unknown")):
        assert not outcome(cause, 1, *wrong).right


def test_the_network_is_all_ranks_cause_and_a_clean_run_has_none():
    assert outcome("network", 1, "network", "network").right
    assert not outcome("network", 1, "", "network").right
    assert outcome(benchmark.CLEAN, 0, "", "").right
    assert not outcome(benchmark.CLEAN, 0, "unknown", "").right


@pytest.mark.parametrize(("wrong", "alarms", "met"), [(0, 0, True), (1, 0, True), (2, 0, False), (0, 1, False)])
def test_the_target_is_nineteen_of_twenty_and_no_alarm(wrong, alarms, met):
    known = [outcome("work", 1, "", "slower")] * (20 - wrong) + [outcome("work", 1, "", "unknown")] * wrong
    clean = [outcome(benchmark.CLEAN, 0, "", "")] * (10 - alarms)
    clean += [replace(clean[0], named=["slower", ""])] * alarms
    text, judged = benchmark.table([*clean, *known], {"network": "there is no tc"})
    assert judged == met
    assert f"Right: {20 - wrong} of 20" in text
    assert f"alarms in {alarms} of 10 clean runs" in text
    assert "Skipped: network, because there is no tc." in text
    assert ("missed" in text) != met

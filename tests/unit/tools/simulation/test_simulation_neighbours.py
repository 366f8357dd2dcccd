"""D-PSGD and MATCHA in simulated time: how long their exchanges take, what they train, and how they are asked for."""

import numpy as np
import pytest

from hvd_hetero.policies import BSP, ElasticBSP, NonBlocking
from hvd_hetero.tools.simulation import Cluster, Network, Options, RoundSimulation, simulate
from hvd_hetero.topology import complete
from hvd_hetero.topology.mixing import NeighbourMixing, resolve_mixing

SLOW_LINKS = Network("ring", latency_s=0.5, message_bytes=100.0, bandwidth=100.0)  # 1.5 s a message


def test_a_round_of_d_psgd_takes_one_exchange_after_the_other_and_its_table():
    """Four who all average, a second of computing: three turns of 1.5 s, and 2 · 3 · 0.5 s for the table."""
    options = Options(sync=NeighbourMixing(complete(4)))
    finished = RoundSimulation(Cluster.of_speeds([100.0] * 4, SLOW_LINKS), BSP(), 400, options=options).step()
    assert finished.elapsed_s == pytest.approx(1.0 + 3 * 1.5 + 3.0)


def test_a_round_of_matcha_takes_as_many_exchanges_as_are_drawn():
    """Round for round the matchings that production draws: on a ring of six none, one or two; one in the mean."""
    machines = Cluster.of_speeds([100.0] * 6, SLOW_LINKS)
    taken_s = np.array(simulate(machines, BSP(), 600, 400, options=Options(sync="matcha")).elapsed_s)
    drawn = np.array([resolve_mixing("matcha", 6).exchanges(r) for r in range(400)])
    assert taken_s == pytest.approx(1.0 + 1.5 * drawn + 5.0)
    assert set(drawn.tolist()) == {0, 1, 2}
    assert drawn.mean() == pytest.approx(1.0, abs=0.1)


def test_on_recorded_machines_a_round_keeps_its_recorded_transfer():
    """What an exchange would have taken there is not known, so none is made free."""
    machines = Cluster.of_speeds([100.0] * 4, Network("recorded", recorded_s=(0.25, 0.75)))
    for sync in ("allreduce", "d-psgd", "matcha"):
        assert simulate(machines, BSP(), 400, 4, options=Options(sync=sync)).elapsed_s == [1.25, 1.75] * 2


def test_non_blocking_d_psgd_ends_with_the_first_and_then_exchanges():
    """The slow of two does four of its ten micro-batches, 12 s, as under allreduce; then one exchange and the table."""
    machines = Cluster.of_speeds([1.0, 1 / 3], SLOW_LINKS)
    finished = RoundSimulation(machines, NonBlocking(10), 20, options=Options(sync="d-psgd")).step()
    assert finished.table.column("micro_batches").tolist() == [10, 4]
    assert finished.elapsed_s == pytest.approx(12.0 + 1.5 + 1.0)


@pytest.mark.parametrize(
    ("network", "policy", "sync", "said"),
    [
        (Network("server"), BSP(), "d-psgd", r"'server'.*'ring'"),
        (Network(), ElasticBSP(updates="local"), "matcha", "local updates"),
        (Network(), BSP(), "dpsgd", "'d-psgd'"),
        (Network(), BSP(), NeighbourMixing(complete(4)), r"sync.* 4 nodes.* 3 ranks"),
    ],
)
def test_what_cannot_be_is_refused(network, policy, sync, said):
    machines = Cluster.of_speeds([100.0] * 3, network)
    with pytest.raises(ValueError, match=said):
        RoundSimulation(machines, policy, 60, options=Options(sync=sync))


DESCRIPTION = """
policies = ["d-psgd", "matcha", { name = "lb-bsp", predictor = "ema", sync = "d-psgd" }]
[training]
global_batch = 240
rounds = 60
[network]
latency_ms = 10
message_mb = 1
bandwidth_mbps = 80
[[workers]]
count = 3
samples_per_s = 100
[[workers]]
samples_per_s = 300
"""


def test_both_are_asked_for_by_name(described, asked):
    """60 samples at 100/s; messages of 0.1 s and 10 ms: two exchanges, or one in the mean, against 6 quarter ones."""
    rows = asked(described(text=DESCRIPTION))["policies"]
    assert set(rows) == {"bsp", "best-split", "d-psgd", "matcha", "lb-bsp d-psgd ema"}
    assert rows["bsp"]["round_s"] == pytest.approx(0.6 + 6 * (0.01 + 0.025))
    assert rows["d-psgd"]["round_s"] == pytest.approx(0.6 + 2 * 0.11 + 0.06)
    assert rows["matcha"]["round_s"] == pytest.approx(0.6 + 0.11 + 0.06, rel=0.05)
    assert rows["lb-bsp d-psgd ema"]["round_s"] == pytest.approx(0.4 + 2 * 0.11 + 0.06, rel=0.02)
    assert rows["matcha"]["transfer_share"] < rows["d-psgd"]["transfer_share"]

"""Several hosts: network namespaces with links between them, some of which are cut.

Each job takes all its cases one by one, and the cut for good last, because that ends it.
"""

from __future__ import annotations

import re
import subprocess
import time
from threading import Timer

import pytest
from support.namespaces import Hosts, hosts_available

from hvd_hetero.testing import RankError
from hvd_hetero.watchdog import EXIT_CODE

support = hosts_available()
pytestmark = [pytest.mark.distributed, pytest.mark.skipif(not support, reason=support.why)]
ROUNDS = 12
POLICIES = ["lb-bsp", "every round another", "non-blocking", "elastic-bsp"]  # one of each kind of round
JOBS = {"2 hosts, torchrun": (2, "torch.distributed"), "3 hosts, torchrun": (3, "torch.distributed")}
JOBS |= {"2 hosts, horovodrun": (2, "torch")}
TWO = [name for name in JOBS if name.startswith("2")]


@pytest.fixture(scope="module", params=list(JOBS))
def job(request, pool, launch):
    """The ranks of a job, its hosts, and when one was cut off. A second interface of each host leads nowhere."""
    count, framework = JOBS[request.param]
    with Hosts(count, delay_s=0.001) as hosts:
        for host in range(count):
            for command in (
                "link add lost0 type veth peer name lost1",
                f"address add 192.0.2.{host + 1}/24 dev lost0",
                "link set lost0 up",
                "link set lost1 up",
            ):
                subprocess.run([*hosts.on(host), "ip", *command.split()], check=True)

        cuts = []

        def cut(rank, line):
            if line.startswith("cut for"):
                hosts.cut(count - 1)
                cuts.append(time.monotonic())
            if line.startswith("cut for seconds: "):
                Timer(float(line.rpartition(" ")[2]), hosts.mend, [count - 1]).start()

        starter = hosts.horovodrun() if framework == "torch" else hosts.torchrun()
        options = {"framework": framework, "starter": starter, "on_line": cut}
        with pool("hosts.py", count, args=[ROUNDS], **options) as ranks:
            yield ranks, hosts, cuts


@pytest.mark.parametrize("policy", POLICIES)
def test_training_over_several_hosts_is_that_of_one_process(job, policy):
    ranks, *_ = job
    outcome = ranks[0][policy]
    assert len(outcome["rounds"]) == ROUNDS
    assert outcome["difference"] <= 1e-10
    assert outcome["between_ranks"] == 0.0


def test_the_signal_of_a_non_blocking_round_crosses_the_network_and_ends_it_early(job):
    ranks, *_ = job
    outcome = ranks[0]["non-blocking"]
    cut = sum(done[-1] < plan[-1] for done, plan in zip(outcome["shares"], outcome["planned"], strict=True))
    assert cut >= ROUNDS / 5


def test_ranks_listen_and_connect_on_the_interface_that_is_named_and_on_no_other(job):
    ranks, hosts, _ = job
    for rank, address in zip(ranks, hosts.addresses, strict=True):
        assert rank["addresses"]["named"] == [address]
        assert rank["addresses"]["bound"] == [address]
        assert rank["addresses"]["unnamed"][0] == address  # by the host's own name


@pytest.mark.parametrize("job", TWO, indirect=True)
def test_a_link_that_is_cut_for_3_s_heals_and_training_is_exact(job):
    ranks, *_ = job
    outcome = ranks[0]["a cut of 3 s"]
    assert 2.5 <= outcome["longest_s"] <= 15.0
    assert outcome["difference"] <= 1e-10
    assert outcome["between_ranks"] == 0.0


@pytest.mark.parametrize("job", ["2 hosts, torchrun"], indirect=True)
def test_a_link_that_is_cut_for_good_ends_every_rank_with_a_message_that_names_the_other_host(job):
    failure, took_s = cut_for_good(job)
    assert took_s < 30.0  # two seconds to the warning, six of silence, questions, and the agents' own end
    assert failure.exit_codes == {0: EXIT_CODE, 1: EXIT_CODE}
    for rank, other in ((0, 1), (1, 0)):
        said = failure.result.stderr[rank]
        assert says_who_is_silent(said, rank, other)
        assert "The job ends (Patience(silent=6))." in said


@pytest.mark.parametrize("job", ["2 hosts, horovodrun"], indirect=True)
def test_a_silent_host_is_named_before_horovod_gives_up_on_it(job):
    failure, took_s = cut_for_good(job)
    assert took_s < 20.0 + 15.0
    said = failure.result.stderr[0]
    assert says_who_is_silent(said, 0, 1)
    assert "Collectives fail after 20 s of it." in said
    assert said.index("does not answer") < said.index("HorovodInternalError")


def cut_for_good(job):
    """How the job ended, and how long after the cut."""
    ranks, _, cuts = job
    with pytest.raises(RankError) as caught:
        _ = ranks[0]["a cut for good"]
    return caught.value, time.monotonic() - cuts[-1]


def says_who_is_silent(said, rank, other):
    return re.search(
        rf"rank {rank} has waited for \d+ s .* for rank {other} on host{other}, which does not answer", said
    )

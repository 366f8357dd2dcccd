"""Ray starts the ranks: on two hosts, which are network namespaces, each a node with one rank."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import elastic_jobs
import numpy as np
import pytest
from limits import TORCH_S
from support.namespaces import Hosts, hosts_available

from hvd_hetero.telemetry import read_run

support = hosts_available()
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install ray)"),
    pytest.mark.skipif(not support, reason=support.why),
]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STARTED_S = 90.0  # a node, on a busy machine
POLICIES, ROUNDS = ["lb-bsp", "static", "non-blocking"], 24
RAY = "ray.scripts.scripts"  # what the command `ray` runs
STORE = str(80 << 20)  # bytes of memory for Ray's objects; about the least that it takes


class Cluster:
    """Two nodes of Ray, and programs that use them."""

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.hosts, self.nodes, self._directory = hosts, [], directory
        token = directory / "token"  # by which Ray knows its own; otherwise it makes one below the home directory
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self.address = f"{hosts.addresses[0]}:6379"
        paths = [ROOT, HERE, HERE / "workers", ROOT / "benchmarks"]
        self.environ = {
            **os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "RAY_ADDRESS": self.address,
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_DEDUP_LOGS": "0",
            "RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0",
            "HOROVOD_WAIT_SLEEP_US": "1000", "HOROVOD_CYCLE_TIME": "2",
        }  # fmt: skip
        self._node(0, "--head", "--port", "6379", "--include-dashboard=false", "--no-monitor")
        self._node(1, "--address", self.address)

    def _node(self, host: int, *options: str) -> None:
        command = [
            *self.hosts.on(host), sys.executable, "-m", RAY, "start", *options, "--node-ip-address",
            self.hosts.addresses[host], "--num-cpus", "1", "--object-store-memory", STORE,
            "--temp-dir", str(self._directory / str(host)), "--disable-usage-stats", "--block",
        ]  # fmt: skip
        log = self._directory / f"{host}.log"
        with log.open("w") as file:
            self.nodes.append(subprocess.Popen(command, env=self.environ, stdout=file, stderr=subprocess.STDOUT))
        begin_s = time.monotonic()
        while "Ray runtime started" not in log.read_text():
            if self.nodes[host].poll() is not None or time.monotonic() - begin_s > STARTED_S:
                pytest.skip(f"Ray itself does not start here: {log.read_text()[-500:]}")  # nothing of ours runs yet
            time.sleep(0.05)

    def run(self, script: Path, *arguments: object, on_line: Callable[[str], None] = lambda _: None) -> str:
        """What a program on the first host, and the ranks that it had started, said."""
        command = [*self.hosts.on(0), sys.executable, "-u", str(script), *map(str, arguments)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        said: list[str] = []
        with subprocess.Popen(command, env=self.environ, text=True, **streams) as process:
            limit = Timer(TORCH_S, process.kill)
            limit.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    said.append(line)
                    on_line(line)
            finally:
                limit.cancel()
                if sys.exc_info()[0] is not None:
                    process.kill()
        assert process.returncode == 0, "".join(said)
        return "".join(said)

    def close(self) -> None:
        """End the nodes. Whatever is left ends with the hosts."""
        for node in self.nodes:
            node.terminate()
        for node in self.nodes:
            try:
                node.wait(20.0)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))  # sockets need short names
        hosts = stack.enter_context(Hosts(2, delay_s=0.001))
        cluster = Cluster(hosts, Path(directory))
        stack.callback(cluster.close)
        yield cluster


@pytest.fixture(scope="module")
def of_fixed_size(cluster) -> dict[str, Any]:
    said = cluster.run(HERE / "workers/ray_jobs.py", "of fixed size", json.dumps([POLICIES, ROUNDS]))
    return result_of(said) | {"said": said}


def result_of(said: str) -> Any:
    """What the job returned: other processes may write after it, into the same pipe."""
    return json.loads(re.findall(r"^RESULT (.*)$", said, re.MULTILINE)[-1])


@pytest.mark.parametrize("policy", POLICIES)
def test_training_by_a_ray_executor_is_that_of_one_process_and_visits_each_sample_once(of_fixed_size, policy):
    outcome = of_fixed_size["ranks"][0][policy]
    assert len(outcome["rounds"]) == ROUNDS
    assert outcome["difference"] <= 1e-10
    assert outcome["between_ranks"] == 0.0
    epochs = outcome["epochs"]
    assert epochs[-1] > 0
    for epoch in range(epochs[-1]):  # the last one was left in the middle
        visited = sorted(i for r, of in zip(outcome["rounds"], epochs, strict=True) if of == epoch for i in r)
        assert visited == list(range(outcome["samples"]))


def test_ranks_of_ray_use_the_interface_that_horovod_found_and_share_a_key(of_fixed_size, cluster):
    ranks = of_fixed_size["ranks"]
    for rank in ranks:
        assert rank["interface"] == cluster.hosts.interface
        assert rank["named"] == rank["bound"]
        assert rank["keys"][0] == rank["keys"][1] != ""
    assert "DeprecationWarning" not in of_fixed_size["said"], "Horovod calls what Ray will remove"
    assert sorted(rank["named"] for rank in ranks) == [[address] for address in cluster.hosts.addresses]


def test_the_signal_of_a_non_blocking_round_ends_it_early_between_ranks_of_ray(of_fixed_size):
    outcome = of_fixed_size["ranks"][0]["non-blocking"]
    cut = sum(done[-1] < plan[-1] for done, plan in zip(outcome["shares"], outcome["planned"], strict=True))
    assert cut >= ROUNDS / 5


def test_a_rank_that_is_late_is_named_and_one_that_is_killed_ends_the_job(of_fixed_size):
    """The jobs of the tests below run on the same cluster, and after it."""
    assert re.search(r"rank 0 has waited for \d+ s .* for rank 1, which is at ray_jobs\.py", of_fixed_size["said"])
    # Ray tells what it hears of first: that the rank is gone, or what the other rank says of it.
    assert re.match(r"ActorDiedError: |RayTaskError\(HorovodInternalError\): ", of_fixed_size["lost"])
    assert of_fixed_size["took_s"] < TORCH_S / 4


def test_a_rank_killed_under_an_elastic_ray_executor_costs_no_sample(cluster, reliability):
    def launch(script, ranks, arguments, *, env, **_):
        job = json.dumps([cluster.hosts.interface, env, *arguments])
        said = cluster.run(HERE / "workers/ray_jobs.py", "elastic", job)
        assert result_of(said) == 1, "ranks that came to the end"
        assert "DeprecationWarning" not in said, "Horovod calls what Ray will remove"
        return SimpleNamespace(stderr=[said])

    reports, record, said = elastic_jobs.run(
        launch, reliability, "_reliability_rank.py", "torch", TORCH_S,
        ranks=2, policy="lb-bsp", faults=[["kill", {"rank": 1, "at": 7, "late": True}]],
    )  # fmt: skip
    assert [each["size"] for each in record.memberships] == [2, 1]
    assert record.lost > 0, "it was killed while something was uncommitted"
    assert "1 ranks go on after round" in said
    assert reliability.faults_of(record, elastic_jobs.SAMPLES, elastic_jobs.EPOCHS) is None
    expected = reliability.replayed(record.rounds, record.rates(), 0.9, elastic_jobs.SAMPLES)
    (report,) = reports
    np.testing.assert_allclose(report["parameters"], expected, rtol=1e-9)


def test_the_example_learns_and_writes_telemetry_on_the_host_of_rank_0(cluster, tmp_path):
    path = tmp_path / "run.jsonl"
    said = cluster.run(ROOT / "examples/torch_ray.py", "--slow", 1, "--telemetry", path)
    told = re.findall(r"epoch \d: accuracy ([\d.]+), batches (\d+) \+ (\d+)", said)
    assert len(told) == 8
    assert float(told[-1][0]) > 0.85
    # Of all epochs: on a busy machine a hitch of the fast rank can make the last batches equal.
    assert sum(int(fast) for _, fast, _ in told) > sum(int(slow) for *_, slow in told)
    assert f"2 ranks are done, with an accuracy of {told[-1][0]}" in said
    run = read_run(path)
    assert [run.samples[run.epoch == epoch].sum() for epoch in range(8)] == [1500] * 8


def test_the_elastic_example_goes_on_without_a_rank_that_was_killed_and_learns_all_the_same(cluster):
    processes: dict[str, int] = {}
    killed: list[int] = []

    def kill(line: str) -> None:
        if begun := re.search(r"process (\d+) is rank (\d) of 2", line):
            processes[begun[2]] = int(begun[1])
        if ": accuracy" in line and "1" in processes and not killed:  # lines of two hosts come in any order
            killed.append(processes["1"])
            os.kill(processes["1"], signal.SIGKILL)

    options = ["--nics", cluster.hosts.interface, "--epochs", 20]
    said = cluster.run(ROOT / "examples/torch_ray_elastic.py", *options, on_line=kill)
    assert "is rank 0 of 1 after round" in said
    epochs = [int(epoch) for epoch in re.findall(r"epoch (\d+): accuracy", said)]
    assert epochs == sorted(epochs), "an epoch that was committed is not done again"
    assert epochs[-1] == 20
    assert float(re.search(r"1 ranks are done, with an accuracy of ([\d.]+)", said)[1]) > 0.85

"""The Horovod that is installed reads no pickle but those of its own job: its stores, one by one."""

import base64
import os
import pickle
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest

pytest.importorskip("horovod")

from horovod.runner.common.util import network, secret
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.elastic.worker import WorkerNotificationClient, WorkerNotificationManager
from horovod.runner.http.http_client import put_data_into_kvstore, read_data_from_kvstore
from horovod.runner.http.http_server import KVStoreServer, RendezvousServer

HOST = "127.0.0.1"


class Payload:
    """Once it is unpickled, there is a file."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


class Listener:
    """Hears of changes, as the state of an elastic job does."""

    def __init__(self):
        self.heard: list[tuple[int, int]] = []

    def on_hosts_updated(self, timestamp, update):
        self.heard.append((timestamp, update))


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("_HOROVOD_SECRET_KEY", "of this job")


@pytest.fixture
def proof(tmp_path):
    return tmp_path / "unpickled"


@pytest.fixture
def body(proof):
    return base64.b64encode(pickle.dumps(Payload(proof)))


@pytest.fixture
def store():
    """The store of `horovod.run`: functions for the ranks, and what they return."""
    server = KVStoreServer(verbose=0)
    yield HOST, server.start_server()
    server.shutdown_server()


@pytest.fixture
def registered():
    return []


@pytest.fixture
def driver(registered):
    """The elastic launcher's server. It keeps whoever registers."""
    keeping = SimpleNamespace(register_worker_server=lambda *worker: registered.append(worker))
    server = RendezvousServer()
    yield HOST, server.start(create_rendezvous_handler(keeping))
    server.stop()


def put(address, path, body, token):
    """Put without Horovod's client; return the status."""
    headers = {} if token is None else {"X-Horovod-Token": token}
    request = Request(f"http://{address[0]}:{address[1]}/{path}", data=body, headers=headers, method="PUT")
    try:
        with urlopen(request) as answer:
            return int(answer.status)
    except HTTPError as refusal:
        return refusal.code
    except OSError:
        return 0  # closed before the body was read


@pytest.mark.parametrize("token", [None, "", "0" * 64, "\xe9"])
def test_a_result_without_the_token_is_not_stored(store, token, body, proof):
    """The payload of CVE-2026-31234: what any process puts there, `horovod.run` unpickled as a rank's result."""
    status = put(store, "runfunc_result/0", body, token)
    with suppress(RuntimeError):  # not found
        read_data_from_kvstore(*store, "runfunc_result", "0")
    assert not proof.exists(), "it was unpickled"
    assert status in (0, 403)


def test_a_result_with_the_token_but_without_a_digest_is_not_unpickled(store, body, proof):
    """The token can be read on the network."""
    assert put(store, "runfunc_result/0", body, secret.request_token()) == 200
    with pytest.raises(PermissionError, match="runfunc_result/0"):
        read_data_from_kvstore(*store, "runfunc_result", "0")
    assert not proof.exists()


def test_a_digest_is_good_for_its_own_place_only(store, proof):
    """What was read on the network is no good as the result of another rank."""
    put_data_into_kvstore(*store, "runfunc_result", "0", Payload(proof))
    url = f"http://{HOST}:{store[1]}/runfunc_result/0"
    with urlopen(Request(url, headers={"X-Horovod-Token": secret.request_token()})) as answer:
        taken = answer.read()
    assert put(store, "runfunc_result/1", taken, secret.request_token()) == 200
    with pytest.raises(PermissionError, match="runfunc_result/1"):
        read_data_from_kvstore(*store, "runfunc_result", "1")
    assert not proof.exists()
    read_data_from_kvstore(*store, "runfunc_result", "0")
    assert proof.exists(), "the payload is one"


def test_another_jobs_key_opens_nothing(store, proof, monkeypatch):
    """Two jobs of one user on a machine do not mix either."""
    with monkeypatch.context() as other:
        other.setenv("_HOROVOD_SECRET_KEY", "of another job")
        token, signed = secret.request_token(), secret.sign("runfunc", "func", b"")
    assert put(store, "runfunc/func", signed, token) in (0, 403)
    assert put(store, "runfunc/func", signed, secret.request_token()) == 200
    with pytest.raises(PermissionError):
        read_data_from_kvstore(*store, "runfunc", "func")


@pytest.mark.parametrize("known", [False, True], ids=["a stranger", "one who knows the token"])
def test_the_elastic_launcher_unpickles_no_strangers_address(driver, known, body, proof, registered, capsys):
    """The payload of CVE-2024-10190."""
    token = secret.request_token() if known else None
    assert put(driver, "worker_addresses/localhost:0", body, token) in (0, 403)
    assert not proof.exists()
    assert registered == []
    refused = "worker_addresses/localhost:0 was not put there by a process of this job"
    assert (refused in capsys.readouterr().err) == known


def test_an_elastic_rank_registers_and_is_told_of_changes(driver, registered):
    """It listens at its interface only, and takes messages made with the job's key only, which it did not send."""
    manager, listener = WorkerNotificationManager(), Listener()
    manager.register_listener(listener)
    manager.init(driver[0], driver[1], nic="lo", hostname="localhost", local_rank=0)
    ((host, slot, addresses, shared),) = registered
    assert (host, slot, list(addresses), shared) == ("localhost", 0, ["lo"], b"of this job")
    assert manager._service._server.server_address[0] == HOST
    WorkerNotificationClient(addresses, shared, verbose=0).notify_hosts_updated(7, 1)
    assert listener.heard == [(7, 1)]
    with pytest.raises(network.NoValidAddressesFound):
        WorkerNotificationClient(addresses, b"of another job", verbose=0)
    manager._service.shutdown()


def test_no_proxy_stands_between_launcher_and_ranks(store, monkeypatch):
    """It would see the token, and end questions that wait for their answer. Here there is none at its address."""
    monkeypatch.setenv("http_proxy", f"http://{HOST}:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)  # it reads the variables when it is made
    put_data_into_kvstore(*store, "runfunc", "func", "a function")
    assert read_data_from_kvstore(*store, "runfunc", "func") == "a function"


def test_a_server_listens_at_the_address_it_is_given():
    """And at no other."""
    server = RendezvousServer()
    port = server.start(host="127.0.0.2")
    with socket.create_connection(("127.0.0.2", port), timeout=10):
        pass
    sockets = psutil.Process().net_connections("tcp")
    listens = {each.laddr.ip for each in sockets if each.laddr.port == port and each.status == psutil.CONN_LISTEN}
    assert listens == {"127.0.0.2"}, "of this process: others may have the same port elsewhere"
    server.stop()


def test_the_first_process_to_ask_makes_the_key_and_its_children_have_it(monkeypatch):
    """The launcher's ranks inherit its environment."""
    monkeypatch.delenv("_HOROVOD_SECRET_KEY")
    made = secret.job_key()
    assert len(made) == 64
    ask = "from horovod.runner.common.util import secret; print(secret.job_key().decode(), end='')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, check=True)
    assert done.stdout == made == secret.job_key()

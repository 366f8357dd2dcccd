"""The launcher of the Horovod that is installed tells ranks where all others are, in one answer."""

import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("horovod")

from horovod.runner.common.util import secret
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.http import http_server
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer, RendezvousServer

HOST = "127.0.0.1"
SOON_S = 20.0
ADDRESSES = {"0": b"0at1.0at2.", "1": b"1at0.1at2.", "2": b"2at0.2at1."}  # of each rank, one for each other one
AT_1 = b"0 5\n0at1.2 5\n2at1."


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("_HOROVOD_SECRET_KEY", "of this job")


Send = Callable[..., bytes | int]


@pytest.fixture(scope="module", params=[False, True], ids=["a fixed job", "an elastic job"])
def launcher(request):
    """A launcher's server, and its port."""
    server = RendezvousServer()
    driver = SimpleNamespace(_worker_registry=SimpleNamespace(get_recorded_slots=list))
    handler = create_rendezvous_handler(driver) if request.param else RendezvousHandler
    yield server, server.start(handler, host=HOST)
    server.stop()
    server._httpd.server_close()


@pytest.fixture
def send(launcher):
    """Send a request to the launcher of three ranks on two hosts; return the answer, or the status of one without."""
    server, port = launcher
    server.init([SlotInfo(f"host{r // 2}", r, r % 2, r // 2, 3, 2 - r // 2, 2 - r % 2) for r in range(3)])

    def send(method, path, body=None):
        url, headers = f"http://{HOST}:{port}/{path}", {"X-Horovod-Token": secret.request_token()}
        try:
            with urlopen(Request(url, data=body, headers=headers, method=method), timeout=SOON_S) as answer:
                return bytes(answer.read())
        except HTTPError as refusal:
            return refusal.code

    return send


def asked(send, path):
    """Ask in a thread; the answer is put into the queue that this returns."""
    answer: queue.Queue[bytes | int] = queue.Queue()
    threading.Thread(target=lambda: answer.put(send("GET", path)), daemon=True).start()
    return answer


@pytest.mark.parametrize("scope", ["global", "global_process_set_hash_1"], ids=["planned", "of a process set"])
def test_a_rank_hears_of_all_others_as_soon_as_the_last_one_has_come(send, scope, monkeypatch):
    """Each rank's address for this one, of those that it has for all."""
    monkeypatch.setattr(http_server, "HOLD_SECONDS", SOON_S)
    for rank in "01":
        send("PUT", f"{scope}/{rank}", ADDRESSES[rank])
    answers = [asked(send, f"{scope}/all_of_3_for_{rank}") for rank in (0, 1)]
    for answer in answers:
        with pytest.raises(queue.Empty):
            answer.get(timeout=0.1)
    send("PUT", f"{scope}/2", ADDRESSES["2"])
    first, second = (answer.get(timeout=SOON_S / 2) for answer in answers)
    assert (first, second) == (b"1 5\n1at0.2 5\n2at0.", AT_1)
    assert send("GET", f"{scope}/all_of_3_for_2") == b"0 5\n0at2.1 5\n1at2.", "who comes last does not wait"


def test_a_rank_that_waits_hears_who_is_there_once_a_second(send, monkeypatch):
    """So it can say for whom it has waited in vain."""
    monkeypatch.setattr(http_server, "HOLD_SECONDS", 0.01)
    assert send("GET", "global/all_of_3_for_1") == b""
    send("PUT", "global/1", ADDRESSES["1"])
    send("PUT", "global/2", ADDRESSES["2"])
    assert send("GET", "global/all_of_3_for_1") == b"2 5\n2at1."


def test_other_keys_are_answered_one_by_one(send, monkeypatch):
    """Ranks of a released Horovod ask so; their host names do not make a scope complete."""
    send("PUT", "global/0", ADDRESSES["0"])
    assert send("GET", "global/0") == ADDRESSES["0"]
    assert send("GET", "global/1") == 404
    monkeypatch.setattr(http_server, "HOLD_SECONDS", 0.3)
    for rank in range(3):
        send("PUT", f"global/rank_{rank}", b"a")
    began = time.monotonic()
    assert send("GET", "global/all_of_3_for_1") == b"0 5\n0at1."
    assert time.monotonic() - began >= 0.3, "the others were waited for"


def test_a_scope_that_is_done_leaves_the_others_as_they_are(send):
    """Else the next meeting of a job that is not elastic finds former addresses."""
    for scope in ("local_host0", "cross_1"):
        send("PUT", f"{scope}/0", b"former")
    send("DELETE", "local_host0/1")
    send("DELETE", "cross_1/0")  # the only one
    assert send("GET", "cross_1/0") == 404
    send("DELETE", "local_host0/0")
    assert send("GET", "local_host0/0") == 404


@pytest.fixture
def busy():
    """A server that takes no connections yet."""
    server = RendezvousHTTPServer((HOST, 0), RendezvousHandler, 0)
    yield server
    server.server_close()


def test_as_many_ranks_as_may_ask_at_once_are_connected(busy):
    """One for which the queue has no room tries again after a second, and then after more."""
    with ExitStack() as connections:
        made = [
            connections.enter_context(socket.create_connection(busy.server_address[:2], timeout=0.5))
            for _ in range(100)
        ]
        assert len({connection.getsockname() for connection in made}) == 100


@pytest.mark.parametrize(("error", "told"), [(ConnectionResetError, False), (KeyError, True)])
def test_only_a_rank_that_is_gone_leaves_no_trace(busy, error, told, capsys):
    """Ranks are lost while they wait for an answer, which is no error of the launcher's."""
    try:
        raise error("a")
    except error:
        busy.handle_error(None, (HOST, 1))
    assert (error.__name__ in capsys.readouterr().err) == told

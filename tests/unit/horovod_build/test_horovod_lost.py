"""The launcher of elastic jobs does not leave ranks waiting for one that is lost, and says when too few are left."""

from http.client import HTTPConnection

import pytest
from horovod.runner.common.util import secret
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.http import http_server
from launcher_of_elastic_jobs import SOON_S, Job, eventually

HOST = "127.0.0.1"
QUESTION = "/global/all_of_2_for_0"


@pytest.fixture
def ask(monkeypatch):
    """A job, and a function that asks its launcher for the addresses of the other rank; it returns the status."""
    monkeypatch.setenv("_HOROVOD_SECRET_KEY", "of this job")
    monkeypatch.setattr(http_server, "HOLD_SECONDS", 0.02)
    job, server = Job(monkeypatch), http_server.RendezvousServer()
    port = server.start(create_rendezvous_handler(job.driver), host=HOST)

    def ask():
        connection = HTTPConnection(HOST, port, timeout=SOON_S)
        connection.request("GET", QUESTION, headers={"X-Horovod-Token": secret.request_token()})
        status = connection.getresponse().status
        connection.close()
        return status

    yield job, ask
    job.driver.stop()
    server.stop()
    server._httpd.server_close()


def test_who_waits_for_a_rank_that_has_ended_before_it_came_is_refused_at_once_and_has_a_place_without_it(ask):
    job, ask = ask
    assert ask() == 200, "the other one may still come"
    job.loses("b")
    assert eventually(lambda: ask() == 410)
    job.stop_training("a")
    assert eventually(lambda: job.driver.world_size() == 1)
    assert ask() == 200


def test_a_job_with_too_few_ranks_says_how_many_it_needs_and_what_ends_it(monkeypatch, caplog):
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "5")
    job = Job(monkeypatch, least=2)
    job.loses("b")
    job.stop_training("a")
    assert eventually(lambda: "needs 2 slots on 1 host(s) or more and has 1 on 1." in caplog.text)
    assert "It ends after 5 s (--elastic-timeout)." in caplog.text
    assert eventually(job.driver.finished)
    why = job.driver.get_results().error_message
    assert "could not go on. Timed out waiting for minimum number of slots" in why
    assert "at least 2 Horovod processes" in why

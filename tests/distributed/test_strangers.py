"""A job keeps strangers out: another user of the machine tries, while a launcher waits for its rank."""

from __future__ import annotations

import base64
import os
import pickle
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hvd_hetero.testing import Elastic

pytestmark = pytest.mark.distributed
TIMEOUT_S = 60.0
KEY = "_HOROVOD_SECRET_KEY"

# Becomes another user if it may; the payload comes by standard input, the answer's status goes to standard output.
STRANGER = """
import encodings.idna, http.client, os, sys  # all that is needed, while its files can be read
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
address, port, method, path = sys.argv[1:]
connection = http.client.HTTPConnection(address, int(port), timeout=10)
try:
    connection.request(method, path, body=sys.stdin.buffer.read())
    print(connection.getresponse().status)
except ConnectionError:
    print("refused")  # after the status, but before the body was read
"""


class Payload:
    """Once it is unpickled, the name of whoever has done so stands in a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"id -un > '{self.proof}'",)


def request(address, port, method, path, body=b""):
    command = [sys.executable, "-I", "-c", STRANGER, address, port, method, path]
    done = subprocess.run(command, input=body, capture_output=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def key_of(pid):
    return psutil.Process(int(pid)).environ().get(KEY)


def command_lines():
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            yield " ".join(process.cmdline())


def reachable(port):
    """At which of the machine's addresses something listens at the port."""
    addresses = {a.address for of in psutil.net_if_addrs().values() for a in of if a.family == socket.AF_INET}
    found = set()
    for address in addresses:
        with suppress(ConnectionError), socket.create_connection((address, int(port)), timeout=10):
            found.add(address)
    return found


@pytest.fixture(params=["static", "elastic"])
def during(request, launch, tmp_path):
    """Do something while a job of one rank runs, knowing its launcher's address and port, and its rank's process."""

    def run(act):
        done = tmp_path / "done"
        kept = []

        def on_line(rank, line):
            try:
                kept.append(act(*line.split()))
            finally:
                done.touch()

        elastic = Elastic() if request.param == "elastic" else None
        launch("listens.py", 1, [done], timeout_s=TIMEOUT_S, elastic=elastic, on_line=on_line)
        return kept[0]

    return run


def test_a_pickle_of_another_user_is_not_read(during, tmp_path):
    """The payload of CVE-2024-10190: the launcher took the addresses of workers from anybody, as a pickle."""
    proof = tmp_path / "proof"
    body = base64.b64encode(pickle.dumps(Payload(proof)))
    answer = during(lambda address, port, pid: request(address, port, "PUT", "/worker_addresses/127.0.0.1:0", body))
    assert not proof.exists(), f"it was unpickled by {proof.read_text().strip()}"
    assert answer in ("403", "refused")


def test_another_user_neither_reads_nor_writes_what_ranks_exchange(during):
    """Nor is it told which files there are in the launcher's directory."""

    def act(address, port, pid):
        return {m: request(address, port, m, "/global/0", b"x") for m in ("PUT", "GET", "DELETE", "HEAD")}

    answers = during(act)
    assert set(answers.values()) <= {"403", "501", "refused"}, answers  # 501: there is no such method


def test_the_launcher_listens_where_its_ranks_look_for_it_and_nowhere_else(during):
    """`--network-interface lo`, which every job has that is launched here."""
    assert during(lambda address, port, pid: ({address}, reachable(port))) == ({"127.0.0.1"}, {"127.0.0.1"})


def test_the_key_is_in_the_environment_of_the_rank_and_in_no_command_line(during):
    """Which every user of the machine can read."""
    key, lines = during(lambda address, port, pid: (key_of(pid), list(command_lines())))
    assert key
    assert any("listens.py" in line for line in lines)
    assert [line for line in lines if key in line] == []


REMOTE = """
import sys
from horovod.runner.http.http_client import put_data_into_kvstore, read_data_from_kvstore
import os
at = (os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"], "mine", "0")
put_data_into_kvstore(*at, {"sent": 1})
print("read", read_data_from_kvstore(*at))
"""


def test_a_rank_of_another_host_gets_the_key_by_standard_input(tmp_path):
    """An ssh that stays on this machine, and keeps what it was called with."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\n"
        f'echo "$*" >> {tmp_path}/called\n'
        'while [ "$1" != elsewhere ]; do shift; done; shift\n'
        'while [ "$1" = -o ]; do shift 2; done\n'
        f'exec env -u {KEY} sh -c "$*; echo \\"end \\${KEY}\\" >> {tmp_path}/keys"\n'
    )
    ssh.chmod(0o755)
    horovodrun = Path(sys.executable).with_name("horovodrun")
    options = ["-np", "1", "--gloo", "-H", "elsewhere:1", "--network-interface", "lo", "--disable-cache"]
    done = subprocess.run(
        [horovodrun, *options, sys.executable, "-c", REMOTE],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", KEY: ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "read {'sent': 1}" in done.stdout
    keys = {line.removeprefix("end ") for line in (tmp_path / "keys").read_text().splitlines()}
    (key,) = keys
    assert len(key) == 64
    assert key not in (tmp_path / "called").read_text()


INTRUSION = """
import horovod

def shown(stranger, body):
    import subprocess, sys
    from horovod.runner.http.http_client import read_data_from_kvstore
    at = sys.argv[1:3]  # where this rank has got its function from, as everybody can read in the list of processes
    command = [sys.executable, "-I", "-c", stranger, *at, "PUT", "/runfunc/func"]
    answer = subprocess.run(command, input=body, capture_output=True, check=True).stdout.decode().strip()
    read_data_from_kvstore(at[0], int(at[1]), "runfunc", "func")
    return answer

if __name__ == "__main__":
    stranger, body = open("stranger").read(), open("body", "rb").read()
    print(horovod.run(shown, (stranger, body), num_proc=1, use_gloo=True, network_interfaces=["lo"]))
"""


def test_another_user_does_not_replace_the_function_that_ranks_fetch(tmp_path):
    """The payload of CVE-2026-31234: the store of `horovod.run` took it from anybody, and ranks unpickled it."""
    proof = tmp_path / "proof"
    (tmp_path / "run.py").write_text(INTRUSION)
    (tmp_path / "stranger").write_text(STRANGER)
    (tmp_path / "body").write_bytes(base64.b64encode(pickle.dumps(Payload(proof))))
    command = [sys.executable, "run.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, cwd=tmp_path)
    assert not proof.exists(), f"it was unpickled by {proof.read_text().strip()}"
    assert done.stdout.splitlines()[-1:] in (["['403']"], ["['refused']"]), done.stdout + done.stderr


RESULTS = """
import horovod

def shown():
    import os
    return os.environ["HOROVOD_RANK"]

if __name__ == "__main__":
    print(horovod.run(shown, num_proc=2, use_gloo=True, network_interfaces=["lo"]))
"""


def test_functions_and_results_still_travel(tmp_path):
    """`horovod.run` sends a function to the ranks and fetches what it returns, as pickles that carry a digest."""
    script = tmp_path / "run.py"
    script.write_text(RESULTS)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.stdout.splitlines()[-1:] == ["['0', '1']"], done.stdout + done.stderr

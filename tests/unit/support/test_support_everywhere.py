"""One command on several hosts: each knows its number, all are waited for, and a failure is told."""

import json
import signal
import subprocess
import sys

import pytest
from support import everywhere


def on_two(command, **keywords):
    prefixes = json.dumps([["/usr/bin/env", "AT=a"], ["/usr/bin/env", "AT=b"]])
    program = [sys.executable, everywhere.__file__, prefixes, "NUMBER", "sh", "-c", command]
    return subprocess.Popen(program, stdout=subprocess.PIPE, text=True, **keywords)


@pytest.mark.parametrize(("command", "code"), [("true", 0), ('sleep "0.$NUMBER"; exit $((3 * NUMBER))', 3)])
def test_all_are_waited_for_and_the_code_is_that_of_the_first_failure(command, code):
    job = on_two(f'echo "$AT $NUMBER"; {command}')
    said, _ = job.communicate(timeout=20)
    assert sorted(said.splitlines()) == ["a 0", "b 1"]
    assert job.returncode == code


def test_a_signal_is_passed_on_to_all_and_ends_the_job():
    with on_two("echo ready; exec sleep 60") as job:
        assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        job.send_signal(signal.SIGTERM)
        assert job.wait(20) == 128 + signal.SIGTERM

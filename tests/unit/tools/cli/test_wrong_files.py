"""Files that a command cannot use: one sentence that names the file, and the exit code of wrong arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
import recorded_runs

from hvd_hetero.telemetry import Telemetry
from hvd_hetero.tools.cli import main

COMMANDS = {
    "report": ["report", "FILE", "--no-page"],
    "compared": ["report", "good.jsonl", "FILE", "--no-page"],
    "simulate": ["simulate", "--from", "FILE", "--quiet"],
    "worth": ["simulate", "--from", "FILE", "--worth"],
    "described": ["simulate", "FILE"],
    "replay": ["replay", "FILE", "again.py:again"],
}
CONTENTS = {
    "empty": lambda lines: b"",
    "header alone": lambda lines: lines[0],
    "header cut short": lambda lines: lines[0][:-5],
    "a line cut in its middle": lambda lines: lines[0] + lines[1][:30] + b"\n" + b"".join(lines[2:]),
    "text": lambda lines: b"loss 0.3\nloss 0.2\n",
    "JSON of another program": lambda lines: b'{"loss": 0.3}\n{"ledger": 0.2}\n',
    "binary": lambda lines: bytes(range(256)) * 20,
    "folder": None,
    "missing": None,
}


def write(path: Path, rounds: int = 12, batch: int = 10) -> list[bytes]:
    """Write a run of two ranks with a ledger, and return its lines."""
    writer = recorded_runs.write(Telemetry(path, ledger=True), 0)
    for number in range(rounds):
        samples = [[2 * rank * batch + i for i in range(batch)] for rank in range(2)]
        writer.file.write_ledger(
            {"round": number, "epoch": number // 3, "total": 2 * batch, "ledger": [[each] for each in samples]}
        )
        writer(recorded_runs.finished(number, wait_s=0.5, samples=batch))
    writer.close()
    return path.read_bytes().splitlines(keepends=True)


@pytest.fixture
def lines(tmp_path, monkeypatch) -> list[bytes]:
    monkeypatch.chdir(tmp_path)
    Path("again.py").write_text("def again(parts):\n    return [part.round for part in parts if part.last]\n")
    return write(Path("good.jsonl"))


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_file_is_named_in_one_sentence(lines, capsys, command, content):
    file = Path("wrong.jsonl")
    if CONTENTS[content] is not None:
        file.write_bytes(CONTENTS[content](lines))
    elif content == "folder":
        file.mkdir()
    assert main([file.name if word == "FILE" else word for word in COMMANDS[command]]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert err.startswith("hvd-hetero: error: ")
    assert "wrong.jsonl" in err
    assert ";" in err or ":" in err.split("wrong.jsonl", 1)[1], "what is wrong, and what to do"


@pytest.mark.parametrize("command", ["simulate", "worth"])
def test_one_round_is_too_few_to_simulate(lines, capsys, command):
    Path("wrong.jsonl").write_bytes(b"".join(lines[:3]))
    assert main(["wrong.jsonl" if word == "FILE" else word for word in COMMANDS[command]]) == 2
    assert "wrong.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "described"])
def test_a_last_line_cut_short_is_left_out(lines, capsys, command):
    Path("cut.jsonl").write_bytes(b"".join(lines)[:-20])
    assert main(["cut.jsonl" if word == "FILE" else word for word in COMMANDS[command]]) == 0
    if command == "replay":
        assert str([*range(12)]) in capsys.readouterr().out


@pytest.mark.parametrize("command", ["simulate", "worth"])
def test_a_policy_that_the_batch_is_too_small_for_is_left_out(lines, tmp_path, capsys, command):
    write(Path("small.jsonl"), batch=6)
    assert main(["small.jsonl" if word == "FILE" else word for word in COMMANDS[command]]) == 0
    out, err = capsys.readouterr()
    assert "lb-bsp" in out
    assert ("self-adaptive is left out" in err) == (command == "simulate")


def test_a_membership_without_a_round_is_passed_over(lines, capsys):
    Path("later.jsonl").write_bytes(lines[0].replace(b'"began":"', b'"began":"9'))
    assert main(["replay", "good.jsonl", "later.jsonl", "again.py:again"]) == 0
    assert str([*range(12)]) in capsys.readouterr().out


def test_a_replay_begins_with_the_round_after_a_checkpoint(lines, capsys):
    assert main(["replay", "--from-round", "7", "good.jsonl", "again.py:again"]) == 0
    assert str([*range(7, 12)]) in capsys.readouterr().out
    Path("later.jsonl").write_bytes(lines[0] + b"".join(lines[10:]))
    assert main(["replay", "later.jsonl", "again.py:again"]) == 2
    assert "rounds 5 to 11 alone" in capsys.readouterr().err

"""What tests of ``hvd-hetero simulate`` share: a small description, and how the command answers or refuses."""

import json

import pytest

from hvd_hetero.tools.cli import main

SMALL = """
policies = ["bsp", "lb-bsp", "elastic-bsp"]
[training]
global_batch = 60
rounds = 40
[[workers]]
count = 2
samples_per_s = 100
[[workers]]
samples_per_s = 400
"""


@pytest.fixture
def described(tmp_path):
    """Write a description with replacements, and return its path."""

    def write(*changes, text=SMALL):
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def asked(capsys):
    """Ask the command, and return its JSON; policies are by their names."""

    def ask(*arguments):
        assert main(["simulate", *map(str, arguments), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        if "policies" in document:
            document["policies"] = {row["policy"]: row for row in document["policies"]}
        return document

    return ask

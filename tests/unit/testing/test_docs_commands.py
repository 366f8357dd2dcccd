"""The commands of the documentation run as printed, on files of the names that it uses; those that cannot say why."""

import json
import re
import shlex

import doc_blocks
import pytest
from report_runs import record

from hvd_hetero.policies import BSP, LBBSP
from hvd_hetero.tools.cli import main
from hvd_hetero.tools.simulation import Cluster, Compute, Jitter, Worker
from hvd_hetero.tools.simulation.whole_rounds import WholeRounds

ELSEWHERE = "{} has it"
# What is not run here, by a pattern that the whole command matches, and why.
NOT_RUN = {
    r"(pip|.*/pip) install .*": "installs",
    r"python3\.11 -m venv .*|\. ~/hvd/bin/activate": "makes an environment",
    r"export \w+=.*": "sets variables for what follows",
    r"hosts=\$\(scontrol .*": "needs Slurm",
    r"srun .*|--nproc-per-node 2 --master-addr \"\$HEAD\".*": "needs Slurm",
    r"make (demo|test).*": "takes minutes; test_examples.py launches the demo, and make test is what runs this",
    r"(\w+=\S+ )?hvd-hetero build-horovod --install( --force)?": "builds; tests/unit/horovod_build, and setup",
    r"hvd-hetero check( --ranks \d)?": "launches ranks of each framework; tests/unit/tools/cli has it, in parts",
    r"torchrun --nproc-per-node 2 examples/torch_torchrun\.py .*": ELSEWHERE.format("test_examples.py"),
    r"horovodrun -np 2 python examples/keras_digits\.py .*": ELSEWHERE.format("test_examples.py"),
    r"(\w+=\S+ )?(horovodrun|torchrun) .*\btrain\.py": "a script of the reader's; hosts: test_hosts.py",
    r"\.venv/bin/python .*": "runs the tests themselves",
    r"hvd-hetero replay .*": "a script of the reader's; test_torch_ledger.py",
    r"hvd-hetero simulate --from|hvd-hetero COMMAND --help": "names an option, or any command",
}
RUN = r"hvd-hetero (report|simulate (?!--from$)|profile) ?.*"
# Makes the description of the examples small: the documentation's takes half a minute.
SMALLER = {"rounds = 400": "rounds = 12"}
STEP = """
def step(batch_size):
    if batch_size > 40:
        raise MemoryError
    sum(range(2000 * batch_size))
"""

ALL = [(where, command) for page in doc_blocks.PAGES for where, command in doc_blocks.commands(page)]
TO_RUN = [
    (where, command) for where, command in ALL if re.fullmatch(RUN, command) and command != "hvd-hetero simulate --from"
]


def went_on(path, at):
    """Number the rounds of a file as of a job that began again at that round."""
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    rounds = [json.loads(line) for line in lines]
    lines = [json.dumps({**line, "round": line["round"] + at}) for line in rounds]
    path.write_text("\n".join([first, *lines, ""]), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that the documentation's commands read."""
    path = tmp_path_factory.mktemp("reader")
    cluster = Cluster(tuple(Worker(Compute.at_speed(v), variation=(Jitter(sigma=0.05),)) for v in (100, 200, 400)))
    policies = {"run": LBBSP, "bsp": BSP, "lb-bsp": LBBSP, "keras-bsp": BSP, "keras-lb-bsp": LBBSP}
    for name, policy in policies.items():
        data = WholeRounds(210 * 10 + 50, shuffle=True, seed=0)
        record(path / f"{name}.jsonl", cluster, policy(), 210, 24, data=data)
    went_on(path / "run.jsonl", at=90)
    (path / "examples").mkdir()
    described = (doc_blocks.ROOT / "examples" / "cluster.toml").read_text(encoding="utf-8")
    for setting, small in SMALLER.items():
        assert described.count(setting) == 1
        described = described.replace(setting, small)
    (path / "examples" / "cluster.toml").write_text(described, encoding="utf-8")
    (path / "train.py").write_text(STEP, encoding="utf-8")
    return path


@pytest.mark.parametrize("command", list(dict.fromkeys(command for _, command in TO_RUN)))
def test_a_command_of_the_documentation_runs_as_printed(command, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("COLUMNS", "120")
    assert main(shlex.split(command)[1:]) == 0
    assert "".join(capsys.readouterr()).strip()
    if command.startswith("hvd-hetero report"):
        first = command.split()[2]
        assert (folder / first).with_suffix(".html").stat().st_size > 0


def test_no_command_is_neither_run_nor_listed():
    unseen = [
        f"{where}: {command}"
        for where, command in ALL
        if (where, command) not in TO_RUN and not any(re.fullmatch(known, command) for known in NOT_RUN)
    ]
    assert not unseen, "run these, or say in NOT_RUN why not"


def test_nothing_is_listed_that_the_documentation_no_longer_has():
    assert [known for known in NOT_RUN if not any(re.fullmatch(known, command) for _, command in ALL)] == []
    assert len(TO_RUN) >= 12

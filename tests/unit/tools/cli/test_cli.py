"""The command ``hvd-hetero``: exit codes and what goes where."""

import subprocess
import sys

import pytest

from hvd_hetero import __version__
from hvd_hetero.errors import HeteroError
from hvd_hetero.tools.cli import commands as cli


def command(outcome):
    """A table with one command, which ends as told."""

    def run(args):
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome + int(args.more)

    def add_arguments(parser):
        parser.add_argument("--more", default="0")

    return (cli.Command("try", "try something", add_arguments, run),)


def test_version_of_the_installed_command():
    """``--version`` prints the package's version and nothing else."""
    done = subprocess.run(
        [sys.executable, "-m", "hvd_hetero.tools.cli", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"hvd-hetero {__version__}\n", "")


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["try", "--no-such-option"]])
def test_usage_errors_exit_with_2(argv, capsys):
    """No command, an unknown one, and an unknown option end with the usage on stderr."""
    with pytest.raises(SystemExit) as caught:
        cli.main(argv, command(0))
    assert caught.value.code == 2
    assert "usage: hvd-hetero" in capsys.readouterr().err


def test_a_commands_result_is_the_exit_code():
    """Options reach the command, and what it returns is returned."""
    assert cli.main(["try", "--more", "3"], command(4)) == 7


@pytest.mark.parametrize(
    ("error", "code"), [(HeteroError("all is lost"), 1), (OSError("all is lost"), 1), (ValueError("all is lost"), 2)]
)
def test_errors_are_one_line_and_exit_with_1_or_2(error, code, capsys):
    """A failure that was foreseen shows its message, no traceback; what was asked wrongly exits as a usage error."""
    assert cli.main(["try"], command(error)) == code
    assert capsys.readouterr() == ("", "hvd-hetero: error: all is lost\n")


def test_traceback_on_demand():
    """With --traceback the exception itself comes out."""
    with pytest.raises(HeteroError, match="all is lost"):
        cli.main(["--traceback", "try"], command(HeteroError("all is lost")))


def test_a_bug_is_not_hidden():
    """What nobody foresaw keeps its traceback."""
    with pytest.raises(KeyError):
        cli.main(["try"], command(KeyError("bug")))


def test_interruption_exits_with_130(capsys):
    """Ctrl-C is one line and the shell's code for it."""
    assert cli.main(["try"], command(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "hvd-hetero: interrupted\n"


def test_every_command_has_help(capsys):
    """Each command of the table is in the overall help with its line, and has a help of its own."""
    for argv in (["--help"], *([each.name, "--help"] for each in cli.COMMANDS)):
        with pytest.raises(SystemExit) as caught:
            cli.main(argv)
        assert caught.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(f"{each.name} {each.help}" in said for each in cli.COMMANDS)


PRINTS = """
import sys
from hvd_hetero.tools.cli import commands
from hvd_hetero.tools.cli.output import printer

def run(args):
    if how == "rich":
        for _ in range(50_000):
            printer().print("a line")
    else:
        sys.stdout.write("a line\\n" * 50_000 if how == "text" else "a line\\n")
    return 0

how, sys.argv[1:] = sys.argv[1], ["try"]
sys.exit(commands.main(None, (commands.Command("try", "try something", lambda parser: None, run),)))
"""


@pytest.mark.parametrize("how", ["rich", "text", "short"])
def test_a_reader_who_leaves_is_no_error(how):
    """As ``| head -1`` does: nothing is said, and the code is that of a program that SIGPIPE ends."""
    with subprocess.Popen(
        [sys.executable, "-c", PRINTS, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as job:
        if how == "short":
            job.stdout.close()  # before anything is written: it is known only at the end
        else:
            assert job.stdout.readline() == b"a line\n"
            job.stdout.close()
        assert (job.stderr.read(), job.wait(60)) == (b"", 141)


def test_a_pipe_that_is_not_the_output_is_an_error(capsys):
    """Such as that to a process which the command has started."""
    assert cli.main(["try"], command(BrokenPipeError("the worker is gone"))) == 1
    assert capsys.readouterr().err == "hvd-hetero: error: the worker is gone\n"

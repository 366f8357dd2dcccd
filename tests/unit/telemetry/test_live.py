"""The live view keeps to the last line of the terminal, as an emulated terminal shows, and to itself elsewhere."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import pty
import select
import struct
import sys
import termios
import threading
import tty

import pyte
import pytest
from recorded_runs import finished
from rich.console import Console
from rich.progress import Progress
from tqdm import tqdm

from hvd_hetero.telemetry import Recorder
from hvd_hetero.telemetry.bottom_line import BottomLine, OpenedTerminal, size_of
from hvd_hetero.telemetry.live import PROGRESS, LiveView

COLUMNS, ROWS = 100, 8
GIVEN_BACK = b"\x1b[r\x1b8"


class Terminal(io.StringIO):
    """What is written appears on an emulated screen; each write is counted."""

    def __init__(self):
        super().__init__()
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.Stream(self.screen)
        self.writes = 0

    def write(self, text):
        self.writes += 1
        self._stream.feed(text.replace("\n", "\r\n"))  # as the kernel does
        return len(text)

    def isatty(self):
        return True

    @property
    def lines(self):
        return [line.rstrip() for line in self.screen.display]


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def viewed(terminal, workers=2):
    """A live view on the terminal, its clock, and a function that finishes a round."""
    clock = Clock()
    view = LiveView(BottomLine(terminal, lambda _: (COLUMNS, ROWS)), clock)
    recorder = Recorder()
    recorder.add(view)
    rounds = iter(range(1000))

    def finish(seconds=1.0, **figures):
        clock.now_s += seconds
        recorder(finished(next(rounds), workers, seconds, **figures))

    return view, recorder, finish


def test_the_last_line_has_rounds_rate_waiting_and_batches():
    terminal = Terminal()
    _, _, finish = viewed(terminal)
    finish(seconds=100.0)  # the start, which counts no more once there is another round
    for _ in range(5):
        finish(seconds=2.0, samples=[30, 10], wait_s=[0.0, 1.0])
    assert terminal.lines[-1] == (
        " hvd-hetero  round 4 of epoch 1 · 20 samples/s · waiting 25%, rank 1 most: 50% · batches 30 10"
    )


def test_a_thousand_ranks_fit_into_the_line():
    terminal = Terminal()
    _, _, finish = viewed(terminal, 1000)
    for _ in range(3):
        finish(samples=[10] * 999 + [2], wait_s=0.0)
    assert "batches 2 to 10" in terminal.lines[-1]
    assert terminal.lines[-2] == ""


def test_a_bar_of_tqdm_and_lines_of_others_stay_whole_and_the_view_stays_below():
    terminal = Terminal()
    _, recorder, finish = viewed(terminal)
    bar = tqdm(total=20, file=terminal, ncols=60, mininterval=0, miniters=1, desc="mine")
    for step in range(20):
        finish()
        bar.update()
        if step % 5 == 0:
            bar.clear()
            terminal.write(f"line {step}\n")
            bar.refresh()
    bar.close()
    assert terminal.lines[-1].startswith(" hvd-hetero  round 18")
    told = terminal.lines[:-1]
    assert [line for line in told if line.startswith("line")] == ["line 0", "line 5", "line 10", "line 15"]
    assert sum(line.startswith("mine: 100%") for line in told) == 1
    assert not any("hvd-hetero" in line for line in told)
    recorder.close()
    terminal.write("after\n")
    assert not any("hvd-hetero" in line for line in terminal.lines)
    assert "after" in terminal.lines


def test_a_bar_of_keras_that_returns_to_the_beginning_of_its_line_stays_whole():
    terminal = Terminal()
    _, _, finish = viewed(terminal)
    for epoch in range(4):
        terminal.write(f"Epoch {epoch + 1}/4\n")
        for step in range(1, 11):
            terminal.write(f"\r\x1b[1m{step}/10\x1b[0m {'━' * step}{' ' * (10 - step)} 1s 20ms/step - loss: 0.5")
            finish()
        terminal.write("\n")
    told = [line for line in terminal.lines[:-1] if line]
    assert told[-2:] == ["Epoch 4/4", "10/10 ━━━━━━━━━━ 1s 20ms/step - loss: 0.5"]
    assert terminal.lines[-1].startswith(" hvd-hetero  round 38 of epoch 12")


def test_at_the_end_of_the_screen_nothing_that_was_there_is_lost():
    terminal = Terminal()
    terminal.write("".join(f"line {k}\n" for k in range(ROWS - 1)) + "prompt")
    _, recorder, finish = viewed(terminal)
    finish()
    finish()
    assert terminal.lines[-2] == "prompt"
    terminal.write(" goes on")
    assert terminal.lines[-2] == "prompt goes on"
    recorder.close()
    assert terminal.lines[-2:] == ["prompt goes on", ""]


def test_it_is_written_at_most_once_a_second():
    terminal = Terminal()
    _, _, finish = viewed(terminal)
    for _ in range(101):
        finish(seconds=0.05)
    assert 5 <= terminal.writes <= 6


def test_a_terminal_that_changes_its_size_is_followed():
    terminal, size = Terminal(), [COLUMNS, ROWS]
    line = BottomLine(terminal, lambda _: tuple(size))
    line.show("one")
    size[1] = ROWS + 4
    terminal.screen.resize(ROWS + 4, COLUMNS)
    line.show("two")
    assert terminal.lines[-1] == "two"
    assert sum(text in ("one", "two") for text in terminal.lines) == 1
    size[1] = 2
    line.show("too low for a line of its own")
    assert terminal.lines[-1] == "two"


# Where it is shown.


def shown_on(monkeypatch, stream):
    monkeypatch.setattr("sys.stderr", stream)
    view = LiveView()
    recorder = Recorder()
    recorder.add(view)
    for number in range(3):
        recorder(finished(number))
    recorder.close()


def test_without_a_terminal_nothing_is_written(monkeypatch):
    monkeypatch.delenv(PROGRESS, raising=False)
    pipe = io.StringIO()
    shown_on(monkeypatch, pipe)
    assert pipe.getvalue() == ""
    shown_on(monkeypatch, None)


def test_a_terminal_that_knows_no_sequences_is_left_alone(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    shown_on(monkeypatch, terminal)
    assert terminal.writes == 0


@pytest.fixture
def opened(monkeypatch):
    """Both ends of a terminal that the environment names: what it shows is read from the first."""
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(PROGRESS, os.ttyname(theirs))
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def drained(ours, end=b""):
    """What has been written to the terminal since the last look: up to this end, else until nothing more comes."""
    told = b""
    while not (end and told.endswith(end)) and select.select([ours], [], [], 10.0 if end else 0.1)[0]:
        told += os.read(ours, 100_000)
    return told


def test_a_real_terminal_is_written_to_by_name_where_standard_error_is_a_pipe(monkeypatch, opened, caplog):
    shown_on(monkeypatch, io.StringIO())
    written = drained(opened[0], GIVEN_BACK).decode()
    assert "round 0 of epoch 0" in written
    assert written.endswith(GIVEN_BACK.decode()), "the line is given back"
    assert not caplog.records


def test_of_two_views_on_one_terminal_the_second_shows_nothing_and_says_so(opened, caplog):
    ours, _ = opened
    views = [LiveView(clock=Clock()) for _ in range(2)]
    recorders = [Recorder() for _ in views]
    for recorder, view in zip(recorders, views, strict=True):
        recorder.add(view)
        recorder(finished(0))
        recorder(finished(1))
    assert drained(ours).count(b"hvd-hetero") == 1
    assert caplog.text.count("another live view has this terminal") == 1
    recorders[1].close()
    assert drained(ours) == b"", "the first one keeps its line"
    recorders[0].close()
    assert drained(ours, GIVEN_BACK).endswith(GIVEN_BACK)
    shown_again = Recorder()
    shown_again.add(LiveView(clock=Clock()))
    shown_again(finished(0))
    shown_again(finished(1))
    assert b"round 0 of epoch 0" in drained(ours), "a terminal that was given back can be taken again"
    shown_again.close()


def test_a_terminal_that_does_not_exist_ends_the_view_alone(monkeypatch, caplog):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(PROGRESS, "/dev/no-such-terminal")
    shown_on(monkeypatch, io.StringIO())
    (said,) = caplog.records
    assert (said.levelname, said.exc_info) == ("WARNING", None)
    assert said.getMessage() == (
        "the live view shows nothing: HVD_HETERO_PROGRESS must name a terminal, as the command tty does, got "
        "'/dev/no-such-terminal': No such file or directory; name one, or none"
    )


@pytest.mark.parametrize("words", ["not a tty", "kein Terminal", ""])
def test_what_the_command_tty_says_where_there_is_no_terminal_names_none(monkeypatch, caplog, words):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(PROGRESS, words)
    pipe = io.StringIO()
    shown_on(monkeypatch, pipe)
    assert (pipe.getvalue(), caplog.records) == ("", [])


def test_a_terminal_of_standard_error_is_written_to_by_itself(monkeypatch, opened):
    """Beside a progress bar of rich, which puts in the place of standard error what would print the sequences."""
    ours, theirs = opened
    monkeypatch.setenv(PROGRESS, "not a tty")
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    with open(theirs, "w", closefd=False) as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        clock, recorder = Clock(), Recorder()
        recorder.add(LiveView(clock=clock))
        console = Console(file=terminal, force_terminal=True, width=COLUMNS, height=ROWS)
        with Progress(console=console, auto_refresh=False) as progress:
            assert sys.stderr is not terminal
            task = progress.add_task("mine", total=10)
            for number in range(10):
                clock.now_s += 2.0
                recorder(finished(number))
                progress.update(task, advance=1, refresh=True)
                sys.stderr.write(f"line {number}\n") if number == 4 else None
        stream.feed(drained(ours).replace(b"\n", b"\r\n"))  # the terminal is raw
        lines = [line.rstrip() for line in screen.display]
        recorder.close()
    assert lines[-1].startswith(" hvd-hetero  round 8 of epoch 2")
    told = [line for line in lines[:-1] if line]
    assert told[0] == "line 4"
    assert [line.split()[0] for line in told[1:]] == ["mine"]
    assert "100%" in told[1]


def test_a_terminal_without_a_name_is_written_to_by_its_number(monkeypatch, opened):
    ours, theirs = opened

    def nameless(number):
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.delenv(PROGRESS)
    monkeypatch.setattr("os.ttyname", nameless)
    with open(theirs, "w", closefd=False) as terminal:
        shown_on(monkeypatch, terminal)
    assert b"round 0 of epoch 0" in drained(ours, GIVEN_BACK)


def test_a_terminal_that_was_stopped_holds_nobody_up_and_shows_again_when_it_goes_on(opened, caplog):
    ours, theirs = opened
    clock, recorder = Clock(), Recorder()
    recorder.add(LiveView(clock=clock))

    def train(numbers):
        for number in numbers:
            clock.now_s += 2.0
            recorder(finished(number))

    termios.tcflow(theirs, termios.TCOOFF)  # as Ctrl-S does
    training = threading.Thread(target=train, args=(range(4),), daemon=True)
    training.start()
    training.join(10.0)
    waits = training.is_alive()
    termios.tcflow(theirs, termios.TCOON)
    training.join(10.0)
    assert not waits
    train([4])
    recorder.close()
    written = drained(ours, GIVEN_BACK).decode()
    assert "round 3 of epoch" in written
    assert written.count(f"\x1b[1;{ROWS - 1}r") == 1, "the line is taken when the terminal takes it"
    assert written.endswith(GIVEN_BACK.decode())
    assert not caplog.records


def test_what_a_full_terminal_takes_in_part_is_completed_before_the_next(opened):
    ours, theirs = opened
    line = BottomLine(OpenedTerminal(os.ttyname(theirs)))
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    for count in range(3):
        for number in range(2000):
            line.show(f"\x1b[1m{count} {number:4} {'x' * 80}\x1b[0m")  # until it takes no more, and on
        stream.feed(drained(ours))
        line.show(f"\x1b[1mlast {count}\x1b[0m")
        stream.feed(drained(ours))
        assert [text.rstrip() for text in screen.display] == [""] * (ROWS - 1) + [f"last {count}"]
    line.close()


def test_a_pipe_in_the_place_of_a_terminal_is_named_and_never_waited_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TERM", "xterm")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv(PROGRESS, str(pipe))
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)):  # a reader, who never reads
        shown_on(monkeypatch, io.StringIO())
    assert "is no terminal; name one, or none" in caplog.text
    caplog.clear()
    shown_on(monkeypatch, io.StringIO())
    assert "No such device or address" in caplog.text


def test_what_is_no_terminal_has_no_size(tmp_path):
    with (tmp_path / "file").open("w") as file:
        assert size_of(file) == (0, 0)
        BottomLine(file).show("text")
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("columns", [1, 20])
def test_a_narrow_terminal_shows_the_beginning(columns):
    terminal = Terminal()
    recorder = Recorder()
    recorder.add(LiveView(BottomLine(terminal, lambda _: (columns, ROWS)), Clock()))
    recorder(finished(0))
    recorder(finished(1))
    assert len(terminal.lines[-1]) < max(columns, 2)
    assert terminal.lines[-2] == ""

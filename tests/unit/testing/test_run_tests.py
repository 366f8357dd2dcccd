"""The runner of the tests: what it has kept back is told, whatever ends it."""

import threading

from script_modules import load

run_tests = load("run_tests", "scripts")


def test_the_output_of_the_tests_that_ran_beside_is_told_though_the_run_is_ended(monkeypatch, capsys):
    """It is ended while both halves run: the one that writes into a file, and the one that writes here."""
    written = threading.Event()

    def pytest(paths, only, output=None):
        if output is None:
            assert written.wait(10)
            raise KeyboardInterrupt
        output.write("what the tests of Keras said")
        written.set()
        return run_tests.Count(passed=1)

    monkeypatch.setattr(run_tests, "pytest", pytest)
    try:
        run_tests.distributed("")
    except KeyboardInterrupt:
        assert "what the tests of Keras said" in capsys.readouterr().out
    else:
        raise AssertionError("the interruption got lost")

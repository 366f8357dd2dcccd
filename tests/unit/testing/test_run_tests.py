"""The runner of the tests: what it has kept back is told, whatever ends it."""

import threading

from script_modules import load

run_tests = load("run_tests", "scripts")


def test_the_output_of_the_tests_that_ran_beside_is_told_though_the_run_is_ended(monkeypatch, capsys):
    """It is ended while both halves run: the one that writes into a file, and the one that writes here."""
    written = threading.Event()

    def pytest(paths, only):
        if run_tests.OUTPUT.get() is None:
            assert written.wait(10)
            raise KeyboardInterrupt
        run_tests.say("what the tests of Keras said")
        written.set()
        return run_tests.Count(passed=1)

    monkeypatch.setattr(run_tests, "pytest", pytest)
    try:
        run_tests.distributed("")
    except KeyboardInterrupt:
        assert "what the tests of Keras said" in capsys.readouterr().out
    else:
        raise AssertionError("the interruption got lost")


def test_stages_that_run_beside_tests_are_told_and_counted_after_them(monkeypatch, capsys):
    """Also one that fails; and alone, where those tests are not asked for."""
    ran = []

    def checked(program, *arguments):
        ran.append(" ".join((program, *arguments)))
        return run_tests.Count(failed=1) if "built_wheel" in ran[-1] else run_tests.Count(passed=1)

    monkeypatch.setattr(run_tests, "checked", checked)
    monkeypatch.setattr(run_tests, "unit", lambda only: [run_tests.Count(passed=9)])
    monkeypatch.setattr(run_tests, "distributed", lambda only: [run_tests.Count(passed=7)])
    monkeypatch.setattr("sys.argv", ["run_tests.py", "types", "unit", "wheel", "gates", "distributed"])
    assert run_tests.main() == 1
    said = capsys.readouterr().out
    assert said.index("--- distributed: 7 passed, 0 failed") < said.index("--- wheel: 0 passed, 1 failed")
    assert said.index("--- distributed") < said.index("--- types: 1 passed"), "of two, beside the later one"
    assert "--- gates: 7 passed, 0 failed" in said
    assert said.endswith("\nfailed: wheel\n\n24 passed, 1 failed\n")
    monkeypatch.setattr("sys.argv", ["run_tests.py", "types", "unit"])
    assert run_tests.main() == 0
    said = capsys.readouterr().out
    assert said.index("--- unit: 9 passed, 0 failed") < said.index("--- types: 1 passed")
    assert said.endswith("\n10 passed, 0 failed\n")
    monkeypatch.setattr("sys.argv", ["run_tests.py", "gates"])
    assert run_tests.main() == 0
    assert capsys.readouterr().out.endswith("\n7 passed, 0 failed\n")


def test_each_file_of_distributed_tests_runs_once_as_a_whole_or_in_two_halves(monkeypatch):
    ran = {}

    def pytest(paths, only):
        for path in paths:
            ran.setdefault(path, []).append(only)
        return run_tests.Count(passed=1)

    monkeypatch.setattr(run_tests, "pytest", pytest)
    monkeypatch.setattr("sys.argv", ["run_tests.py", "ray", "distributed"])
    assert run_tests.main() == 0
    files = (run_tests.ROOT / "tests/distributed").glob("test_*.py")
    assert sorted(ran) == sorted(str(file.relative_to(run_tests.ROOT)) for file in files)
    assert {tuple(sorted(parts)) for parts in ran.values()} == {("",), ("keras", "not keras")}

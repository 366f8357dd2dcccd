"""The gate of words: what the glossary retires is found in prose, as a part of a name, or as a name alone."""

import pytest
from script_modules import load

gate = load("glossary", "scripts/gates")

GLOSSARY = """
| word | write |
|---|---|
| rank | process |

## Retired

| retired | write |
|---|---|
| scheme | policy |
| way out, ways out | remedy |
| `told`, `Face` | a name of what it holds |
"""


def found(text, path="torch_hooks/x.py"):
    words, names = gate.retired(GLOSSARY)
    return [word for _, word in gate.found_in(path, text, gate.pattern_of(words), names)]


def test_only_the_last_table_retires_words():
    assert gate.retired(GLOSSARY) == (["scheme", "way out", "ways out"], {"told", "Face"})


@pytest.mark.parametrize(
    "text",
    [
        "# each scheme",
        "x = 'Schemes of all'",
        "_scheme_of = 1",
        "class BspScheme: ...",
        "_WAYS_OUT = 2",
        "# no way-out",
    ],
)
def test_words_of_prose_are_found_everywhere(text):
    assert len(found(text)) == 1
    assert found(text, "docs/page.md") == found(text, "tests/test_x.py") == found(text)


@pytest.mark.parametrize(
    "text", ["# a schemer", "x = 'prefers-color-scheme'", "always_output = 1", "# a way to get out"]
)
def test_other_words_that_hold_them_pass(text):
    assert found(text) == []


def test_names_are_found_in_code_alone():
    assert found("told = Face(told)\n") == ["told", "Face", "told"]
    assert found("# told by a rank\nx = 'Face'\nretold = 1\n") == []
    assert found("told = 1\n", "tests/test_x.py") == found("`told`", "docs/page.md") == []


def test_lines_are_counted_from_one():
    words, names = gate.retired(GLOSSARY)
    assert list(gate.found_in("a.py", "\ntold = 1\n# scheme\n", gate.pattern_of(words), names)) == [
        (3, "scheme"),
        (2, "told"),
    ]


def test_the_program_fails_and_names_the_place(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gate, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["glossary.py"])
    monkeypatch.setattr(gate.subprocess, "run", lambda *_, **__: type("Listed", (), {"stdout": "CHANGELOG.md a.py"}))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/glossary.md").write_text(GLOSSARY)
    (tmp_path / "a.py").write_text("told = 1\n")
    (tmp_path / "CHANGELOG.md").write_text("schemes are policies now")
    assert gate.main() == 1
    assert capsys.readouterr().out.startswith("a.py:1: 'told' is retired")
    (tmp_path / "a.py").write_text("answer = 1\n")
    assert gate.main() == 0
    (tmp_path / "docs/glossary.md").write_text("none")
    assert gate.main() == 1

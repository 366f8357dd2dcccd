"""The Python of the documentation: it compiles, its imports exist, and the page on extensions runs as it stands."""

import ast
import contextlib
import io

import doc_blocks
import pytest

from hvd_hetero.testing import run_on_threads
from hvd_hetero.testing.policies import run

OURS = ("hvd_hetero", "torch_hooks", "keras_callbacks")
OTHERS = {"horovod", "torch", "tensorflow", "keras", "statistics", "mlflow", "wandb", "ray", "os", "numpy"}
NO_PYTHON = {"docs/porting.md": "# before  "}  # two columns, side by side
FENCED = [block for page in doc_blocks.PAGES for block in doc_blocks.blocks(page) if doc_blocks.is_python(block)]
BLOCKS = [block for block in FENCED if not block.text.startswith(NO_PYTHON.get(block.page, "none begins so"))]
EXTENDING = doc_blocks.ROOT / "docs" / "extending.md"


def parsed(block):
    """The syntax tree; an … stands for what the reader fills in."""
    return ast.parse(block.text.replace("…", "..."), block.where)


def names_of(module):
    """What can be imported from a module of this repository, without importing it; None: there is no such module."""
    path = doc_blocks.ROOT.joinpath(*module.split("."))
    folder = (
        {entry.stem for entry in path.iterdir() if entry.suffix == ".py" or entry.is_dir()} if path.is_dir() else set()
    )
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return None
    found = set(folder)
    body = ast.parse(file.read_text(encoding="utf-8")).body
    body += [node for each in body if isinstance(each, ast.If) for node in each.body]  # names that are imported lazily
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def wrong_imports(tree):
    """Yield what a block imports and cannot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wanted = [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            wanted = [(node.module, [alias.name for alias in node.names])]
        else:
            continue
        for module, names in wanted:
            if module.partition(".")[0] not in OURS:
                if module.partition(".")[0] not in OTHERS:
                    yield module
            elif (known := names_of(module)) is None:
                yield module
            else:
                yield from (f"{module}.{name}" for name in names if name not in known)


def test_there_is_python_in_the_documentation():
    assert len(BLOCKS) > 30
    assert len(FENCED) - len(BLOCKS) == len(NO_PYTHON)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.where)
def test_a_block_compiles_and_what_it_imports_exists(block):
    tree = parsed(block)
    compile(tree, block.where, "exec")
    assert list(wrong_imports(tree)) == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("import hvd_hetero.no_such", ["hvd_hetero.no_such"]),
        ("from torch_hooks import LoadBalance, Nobody", ["torch_hooks.Nobody"]),
        ("from hvd_hetero.policies import LBBSP", []),
        ("import unheard_of", ["unheard_of"]),
    ],
)
def test_an_import_that_cannot_be_is_found(line, wrong):
    assert list(wrong_imports(ast.parse(line))) == wrong


def test_the_page_on_extensions_runs_and_prints_what_it_shows():
    code = [block for block in doc_blocks.blocks(EXTENDING) if doc_blocks.is_python(block)]
    shown = [block.text for block in doc_blocks.blocks(EXTENDING) if not block.language]
    first = next(at for at, block in enumerate(code) if "from torch_hooks" in block.text)
    names, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in code[:first]:
            exec(compile(block.text, block.where, "exec"), names)
    assert [printed.getvalue()] == shown
    assert len(run(names["TestBySamplesDone"]())) == 7
    assert len(run(names["TestMedianOfFive"]())) == 10

    def train(_rank):
        mine = dict(names)
        told = []
        for block in code[first:]:
            exec(compile(block.text, block.where, "exec"), mine)
            told.append(mine["balance"].policy.name)
            mine["balance"].close()
        return told

    pytest.importorskip("torch")
    assert run_on_threads(train, ranks=2) == [["by-samples-done", "lb-bsp"]] * 2

"""Gate: the core imports with no framework and no extra.

All modules of ``hvd_hetero`` are imported in an interpreter in which importing any installed package fails, except
NumPy, SciPy, psutil and, for the command line alone, rich. The builder of Horovod is no dependency either. Exit code 0
or 1.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

# Runs in the fresh interpreter. sys.argv: the allowed top-level names, and the modules to import.
PROGRAM = """
import importlib, importlib.abc, importlib.metadata, sys
allowed, modules = (set(text.split(",")) for text in sys.argv[1:])
forbidden = {*importlib.metadata.packages_distributions(), "horovod_build", "horovod", "torch", "tensorflow", "keras"}
forbidden -= allowed
class Gate(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in forbidden:
            raise ModuleNotFoundError(f"{name} is not a dependency of this module", name=name)
sys.meta_path.insert(0, Gate())
for module in sorted(modules):
    importlib.import_module(module)
"""
CORE = {"hvd_hetero", "numpy", "scipy", "psutil"}
COMMAND_LINE = "hvd_hetero.tools.cli"


def modules() -> list[str]:
    """Return the names of all modules of the core, as they lie in the checkout."""
    files = sorted((ROOT / "hvd_hetero").rglob("*.py"))
    return [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]


def imports(names: list[str], allowed: set[str]) -> str:
    """Import modules under the gate and return what was said about a failure, or an empty string."""
    argv = [sys.executable, "-c", PROGRAM, ",".join(allowed), ",".join(names)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


def main() -> int:
    """Run the gate."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    if not imports(["torch"], CORE).endswith("torch is not a dependency of this module"):
        print("the gate itself is open: torch could be imported through it")
        return 1
    core = [name for name in modules() if not name.startswith(COMMAND_LINE)]
    command_line = [name for name in modules() if name.startswith(COMMAND_LINE)]
    problems = [said for said in (imports(core, CORE), imports(command_line, CORE | {"rich"})) if said]
    for said in problems:
        print(said)
    print(f"{len(core) + len(command_line)} modules of the core, {len(problems)} groups with forbidden imports")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

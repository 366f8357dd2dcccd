"""Gate: an adapter imports where the other framework does not exist. Takes the adapter's name; exit code 0 or 1."""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
OTHERS = {
    "torch_hooks": ("tensorflow", "keras", "tf_keras", "horovod.tensorflow", "horovod.keras", "keras_callbacks"),
    "keras_callbacks": ("torch", "horovod.torch", "torch_hooks"),
}

# Runs in a fresh interpreter. sys.argv: the names that must not be imported, and the modules to import.
PROGRAM = """
import importlib, importlib.abc, sys
others, modules = (text.split(",") for text in sys.argv[1:])
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == other or name.startswith(other + ".") for other in others):
            raise ModuleNotFoundError(f"No module named {name!r} (hidden by the gate)", name=name)
sys.meta_path.insert(0, Absent())
for module in modules:
    importlib.import_module(module)
assert not set(others) & set(sys.modules), set(others) & set(sys.modules)
"""


def main() -> int:
    """Run the gate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("adapter", choices=sorted(OTHERS))
    adapter = parser.parse_args().adapter
    files = sorted((ROOT / adapter).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    argv = [sys.executable, "-c", PROGRAM, ",".join(OTHERS[adapter]), ",".join(names)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)
    print(
        done.stderr.strip() if done.returncode else f"{len(names)} modules import without {', '.join(OTHERS[adapter])}"
    )
    return 1 if done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())

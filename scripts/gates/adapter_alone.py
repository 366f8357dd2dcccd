"""Gate: an adapter imports where the other framework does not exist, and PyTorch's also where Horovod does not.

That is all of it but what is for elastic jobs of Horovod, and Horovod's wire. Takes the adapter's name; exit code 0 or
1.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
OTHERS = {
    "torch_hooks": ("tensorflow", "keras", "tf_keras", "horovod.tensorflow", "horovod.keras", "keras_callbacks"),
    "keras_callbacks": ("torch", "horovod.torch", "torch_hooks"),
}
NEED_HOROVOD = {"torch_hooks": ("torch_hooks.elastic", "torch_hooks.wires.horovod")}

# Runs in a fresh interpreter. sys.argv: the names that must not be imported, and the modules to import.
PROGRAM = """
import importlib, sys
others, modules = (text.split(",") for text in sys.argv[1:])
class Without:
    # As where they are not installed: also who only asks whether they are there is told so.
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        hidden = any(name == other or name.startswith(other + ".") for other in others)
        return None if hidden else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Without, sys.meta_path)
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
    failed = not imports(names, OTHERS[adapter])
    if adapter in NEED_HOROVOD:
        failed |= not imports([name for name in names if name not in NEED_HOROVOD[adapter]], ("horovod",))
    return int(failed)


def imports(names: Sequence[str], absent: Sequence[str]) -> bool:
    """Return whether these modules import where others are absent, and say so."""
    argv = [sys.executable, "-c", PROGRAM, ",".join(absent), ",".join(names)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)
    print(done.stderr.strip() if done.returncode else f"{len(names)} modules import without {', '.join(absent)}")
    return not done.returncode


if __name__ == "__main__":
    sys.exit(main())

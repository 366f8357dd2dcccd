"""Gate: an adapter imports where the other framework does not exist, and PyTorch's also where Horovod does not.

Excepted are modules for elastic jobs of Horovod, and Horovod's wire. Takes the adapter's name; exit code 0 or 1.
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

# Runs in a fresh interpreter. sys.argv: a pair for each time, of the names that must not be imported and of the modules
# to import. Each time this project's are imported again; packages that they need stay imported.
PROGRAM = """
import importlib, sys
hidden = ()
def is_of(name, others):
    return any(name == other or name.startswith(other + ".") for other in others)
class Without:
    # As where they are not installed: also who only asks whether they are there is told so.
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if is_of(name, hidden) else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Without, sys.meta_path)
for others, modules in zip(sys.argv[1::2], sys.argv[2::2]):
    hidden, modules = others.split(","), modules.split(",")
    for name in [name for name in sys.modules if is_of(name, (modules[0].partition(".")[0], "hvd_hetero"))]:
        del sys.modules[name]
    for module in modules:
        importlib.import_module(module)
    assert not [name for name in sys.modules if is_of(name, hidden)], hidden
"""


def main() -> int:
    """Run the gate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("adapter", choices=sorted(OTHERS))
    adapter = parser.parse_args().adapter
    files = sorted((ROOT / adapter).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    pairs = [(OTHERS[adapter], names)]
    if adapter in NEED_HOROVOD:
        without = [name for name in names if name not in NEED_HOROVOD[adapter]]
        pairs.insert(0, (("horovod", *OTHERS[adapter]), without))
    return int(not imports(pairs))


def imports(pairs: Sequence[tuple[Sequence[str], Sequence[str]]]) -> bool:
    """Return whether these modules import where others are absent, and say so."""
    argv = [sys.executable, "-c", PROGRAM, *(",".join(part) for pair in pairs for part in pair)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        print(done.stderr.strip())
    else:
        for others, names in pairs:
            print(f"{len(names)} modules import without {', '.join(others)}")
    return not done.returncode


if __name__ == "__main__":
    sys.exit(main())

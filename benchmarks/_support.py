"""The ranks of the project's tests, for benchmarks: several hosts, and ranks with their imports done."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "tests"))

from support.namespaces import Hosts, hosts_available
from support.preload import Preloaded

__all__ = ["Hosts", "Preloaded", "hosts_available"]

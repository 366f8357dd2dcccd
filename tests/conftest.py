"""What all tests share: a heap that the garbage collector has been through before the first of them."""

from __future__ import annotations

import gc


def pytest_configure() -> None:
    gc.disable()  # nothing dies while modules are imported, and looking for it takes a tenth of the time


def pytest_collection_finish() -> None:
    """Leave what was imported out of all collections: with PyTorch, each would take a quarter of a second."""
    gc.enable()
    gc.collect()
    gc.freeze()

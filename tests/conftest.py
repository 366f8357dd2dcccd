"""What all tests share: a heap that the garbage collector has been through, and how many examples hypothesis draws."""

from __future__ import annotations

import gc
import sys

from hypothesis import settings

settings.register_profile("quick", derandomize=True, deadline=None, max_examples=25)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=300)
settings.load_profile("quick")  # pytest --hypothesis-profile=thorough has the last word

MANY = 100  # modules; torch._dynamo, which comes with the first optimizer, brings 900
imported = [0]  # modules, when the heap was last gone through


def pytest_configure() -> None:
    gc.disable()  # nothing dies while modules are imported, and looking for it takes a tenth of the time


def pytest_collection_finish() -> None:
    """Leave what was imported out of all collections: with PyTorch, each would take a quarter of a second."""
    gc.enable()
    gc.collect()
    gc.freeze()
    imported[0] = len(sys.modules)


def pytest_runtest_logfinish() -> None:
    """Leave out what a test has imported, too."""
    if len(sys.modules) > imported[0] + MANY:
        pytest_collection_finish()

"""Scripts that are no part of the package, as modules."""

import importlib
from pathlib import Path

import pytest


def load(name, *folders):
    """The module ``name``, with the project's ``folders`` on the path while it is imported."""
    with pytest.MonkeyPatch.context() as patched:
        for folder in folders:
            patched.syspath_prepend(str(Path(__file__).parents[2] / folder))
        return importlib.import_module(name)

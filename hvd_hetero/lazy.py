"""Names of a package that are imported when they are first used (PEP 562).

A training needs one policy, one predictor and one solver of many. With this, it loads no other: importing
``torch_hooks`` loads neither NARX nor MATCHA, and no SciPy.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazily"]


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``package``. ``homes`` has the module of each name, relative to the package.

    The package imports the same names under ``TYPE_CHECKING``, for type checkers and for the pages of the interface.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)  # the next access does not come here
        return value

    module = vars(sys.modules[package])
    module["__dir__"] = lambda: sorted({*module, *homes})  # for completion in a session
    return load

"""Names of a package that are imported when they are first used (PEP 562).

A training needs one policy, one predictor and one solver of many. With this, it loads no other: importing
``torch_hooks`` loads neither NARX nor MATCHA, and no SciPy.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def lazily(package: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``package``, which imports what stands under its ``if TYPE_CHECKING``.

    Type checkers and the pages of the interface read these imports; so does this, and each name stands once.
    """
    module = sys.modules[package]
    under = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.If)]
    imports = [node for block in under for node in block.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=module)
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, value)  # the next access does not come here
        return value

    vars(module)["__dir__"] = lambda: sorted({*vars(module), *homes})  # for completion in a session
    return load

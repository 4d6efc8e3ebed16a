"""Loads one module of the Python package by its file, without the package around it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load(root: Path, name: str) -> ModuleType:
    """A module beside the package's folders that imports nothing of the package.

    Args:
        root: Of the repository.
        name: Of the module, as "options".
    """
    file = root / "adapters" / "python" / "gradd" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"gradd_{name}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

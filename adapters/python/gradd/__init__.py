"""gradd: forward and backward of PyTorch trainers in a C daemon over shared memory.

    from gradd import ORTModule
    model = ORTModule(model)      # the loop, the optimizer and everything else stay as they are

Public names are imported at first use, so that `import gradd` alone loads neither torch nor a
daemon.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradd import errors, optim
    from gradd.debug import DebugOptions, LogLevel
    from gradd.estimating import estimate
    from gradd.keeping import forget, keep, reattach
    from gradd.memory.waiting import wait_for_memory
    from gradd.module import ORTModule
    from gradd.shared import load, share
    from gradd.tracing import trace

__version__ = "0.1.0"
__all__ = [
    "DebugOptions",
    "LogLevel",
    "ORTModule",
    "__version__",
    "errors",
    "estimate",
    "forget",
    "keep",
    "load",
    "optim",
    "reattach",
    "share",
    "trace",
    "wait_for_memory",
]

_HOMES = {
    "ORTModule": "gradd.module",
    "DebugOptions": "gradd.debug",
    "LogLevel": "gradd.debug",
    "estimate": "gradd.estimating",
    "forget": "gradd.keeping",
    "keep": "gradd.keeping",
    "load": "gradd.shared",
    "reattach": "gradd.keeping",
    "share": "gradd.shared",
    "trace": "gradd.tracing",
    "wait_for_memory": "gradd.memory.waiting",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in ("errors", "optim"):
        return importlib.import_module(f"gradd.{name}")
    raise AttributeError(f"module 'gradd' has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext gradd`: the magic `%gradd` (notebook.py)."""
    from gradd import notebook

    notebook.load(shell)

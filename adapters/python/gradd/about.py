"""What a process says of itself to its daemon, for `gradd ps`, `gradd show` and `gradd web`.

A name, the classes of its wrapped models with their parameters, and how many reasons sent a part of
them to PyTorch. Each client says it to a new daemon, and again when it has changed.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import torch

_NAME_BYTES = 64
_MODEL_BYTES = 100
_lock = threading.Lock()
_models: WeakKeyDictionary[torch.nn.Module, tuple[str, int]] = WeakKeyDictionary()
_fallbacks = 0
version = 0  # rises with every change


def name() -> str:
    """The notebook's name, else the script's."""
    notebook = os.environ.get("JPY_SESSION_NAME", "")
    script = sys.argv[0] if sys.argv else ""
    return (os.path.basename(notebook) or os.path.basename(script) or "python")[:_NAME_BYTES]


def note_model(module: torch.nn.Module) -> None:
    """A module has been wrapped."""
    global version
    # One that is not initialised yet has no shape, hence no numbers.
    count = sum(p.numel() for p in module.parameters() if not hasattr(p, "cls_to_become"))
    with _lock:
        _models[module] = (type(module).__name__, count)
        version += 1


def note_fallback() -> None:
    """A module has a new reason for computing in PyTorch."""
    global version, _fallbacks
    with _lock:
        _fallbacks += 1
        version += 1


def fields() -> dict[str, Any]:
    """Those of the request `about`."""
    with _lock:
        found = list(_models.values())
        names = ", ".join(dict.fromkeys(text for text, _ in found))
        if len(names) > _MODEL_BYTES:
            names = names[: _MODEL_BYTES - 3] + "..."
        return {
            "model": names,
            "parameters": sum(count for _, count in found),
            "fallbacks": _fallbacks,
        }

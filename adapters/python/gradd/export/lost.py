"""What the caller of a graph would miss in the result: attributes that forward() wrote to it.

Tensors come out of the daemon, and containers are built anew by their classes (results.py), so
both have the attributes that torch and those classes give them. An attribute that forward() set
beside would be gone without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradd.export.guards import images
from gradd.export.guards.taken import own_dict
from gradd.export.results import Result
from gradd.spec import CaptureError

_PLAIN = (*images.PLAIN, float, complex)


def refusal(
    returned: Any, result: Result, leaves: list, is_made: Callable[[torch.Tensor], bool]
) -> CaptureError | None:
    """What is said if something of the result would be lost.

    Args:
        returned: What forward() returned.
        result: Has learnt its structure.
        leaves: Its tensors.
        is_made: True for tensors of forward() itself; others stay what they are.
    """
    for leaf in leaves:
        if is_made(leaf) and leaf.__dict__:
            return _error(f".{min(map(str, leaf.__dict__))} to a tensor")
    try:
        built = result.unflatten(leaves)
    except Exception as error:  # whatever the user's class raises
        return CaptureError(
            "unsupported_output_type",
            f"forward() returns an object that cannot be built from its elements alone: {error}",
        )
    text = _missing(returned, built)
    return _error(text) if text is not None else None


def _error(what: str) -> CaptureError:
    return CaptureError(
        "attribute_written",
        f"forward() writes {what} that it returns, which a graph would lose: return the value "
        "itself, or set it outside of forward()",
    )


def _missing(a: Any, b: Any) -> str | None:
    """Where the container `b` is not what `a` is."""
    if isinstance(a, Mapping):
        pairs = [(a[key], b[key]) for key in a]
    elif isinstance(a, (list, tuple)):
        pairs = list(zip(a, b, strict=True))
    else:
        return None
    kind = type(a).__qualname__
    old, new = own_dict(a) or {}, own_dict(b) or {}
    for name, value in old.items():
        plain = isinstance(value, _PLAIN)
        if name not in new or plain and not images.alike(value, new[name]):
            return f".{name} to a {kind}"
    if getattr(a, "default_factory", None) is not getattr(b, "default_factory", None):
        return f"a default_factory to a {kind}"
    return next((text for pair in pairs if (text := _missing(*pair)) is not None), None)

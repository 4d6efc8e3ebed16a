"""Buffers that forward() replaces: `self.mean = 0.9 * self.mean + ...` in a submodule.

The tracer notices that for buffers of the root module only. kept() makes it a write to the old
buffer, at the end of the forward, which becomes a result of the graph like any other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradd.spec import CaptureError

Place = tuple[str, dict, str, torch.Tensor]


def kept(module: torch.nn.Module) -> Callable[[], None]:
    """Notes the buffers of all submodules.

    Args:
        module: The module that is being traced; its own buffers are left to the tracer.

    Returns:
        What to call when forward() is done: it writes new values into the old buffers and puts
        those back.

    Raises (the function that is returned):
        CaptureError: "attribute_written" for a buffer that has another form now, or none.
    """
    places = [
        (f"{path}.{key}", sub._buffers, key, tensor)
        for path, sub in module.named_modules()
        if sub._buffers is not module._buffers
        for key, tensor in sub._buffers.items()
        if tensor is not None
    ]

    def write_back() -> None:
        replaced = [place for place in places if place[1].get(place[2]) is not place[3]]
        with torch.no_grad():  # copies first: two buffers may have changed places
            values = [_value(*place).clone() for place in replaced]
            for (_, table, key, old), value in zip(replaced, values, strict=True):
                old.copy_(value)
                table[key] = old

    return write_back


def _value(name: str, table: dict, key: str, old: torch.Tensor) -> torch.Tensor:
    new = table.get(key)
    if new is None or new.shape != old.shape or new.dtype != old.dtype:
        raise CaptureError(
            "attribute_written",
            f"forward() gives the buffer {name!r} another size or type; keep it as it is",
        )
    return new

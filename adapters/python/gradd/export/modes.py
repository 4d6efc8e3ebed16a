"""Modes of the process that forward() may leave other than it found them.

recorder.py refuses the functions that set one where user code calls them. What is switched in
another way (`torch.set_grad_enabled(False)` as a statement, a context that is entered and never
left) shows only when the forward is done: a graph would leave the mode as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradd.spec import CaptureError

_CPU = "cpu"
# Where torch keeps them; its older functions fail where these were set one by one.
_PRECISIONS = (
    *(("generic", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
    *(("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
)
# Name -> read, write.
_MODES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the recording of gradients": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "autocast": (
        lambda: torch.is_autocast_enabled(_CPU),
        lambda on: torch.set_autocast_enabled(_CPU, on),
    ),
    "the type of autocast": (
        lambda: torch.get_autocast_dtype(_CPU),
        lambda kind: torch.set_autocast_dtype(_CPU, kind),
    ),
    "autocast's cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the detection of anomalies": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "determinism": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "the precision of products": (
        lambda: [torch._C._get_fp32_precision_getter(*at) for at in _PRECISIONS],
        lambda values: [
            torch._C._set_fp32_precision_setter(*at, value)
            for at, value in zip(_PRECISIONS, values, strict=True)
        ],
    ),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "a mode of torch's functions": (
        torch._C._len_torch_function_stack,
        lambda depth: _pop_to(depth),
    ),
}


def _pop_to(depth: int) -> None:
    while torch._C._len_torch_function_stack() > depth:
        torch._C._pop_torch_function_stack()


class Modes:
    """All modes as they are at construction."""

    def __init__(self) -> None:
        self._before = {name: read() for name, (read, _) in _MODES.items()}

    def put_back(self) -> CaptureError | None:
        """Puts back what is another one now; returns the refusal if there was any."""
        changed = None
        for name, (read, write) in _MODES.items():
            if read() != self._before[name]:
                changed = changed or name
                write(self._before[name])
        if changed is None:
            return None
        return CaptureError(
            "outside_written",
            f"forward() changes {changed} and leaves it so, which a graph would not do: use a with "
            "statement, or change it outside of forward()",
        )

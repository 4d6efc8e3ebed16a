"""Refuses calls that torch transforms or records: they depend on more than values.

Under vmap, grad, jvp and the like the tensors of a call stand for others (a batch of them, a tensor
with its tangent); torch.jit.trace, torch.export and make_fx record the operators that run. A run in
the daemon has no such meaning: it would fail inside torch, or leave constants in the record.
check() refuses those calls by name, before any code looks at their tensors. batched.py handles
transforms of a backward.

The same holds if the calling thread flushes subnormal numbers to zero (set_flush_denormal, or a
library built with -ffast-math): the daemon's threads do not, and a capture would hold such zeros.
"""

from __future__ import annotations

from typing import Any

import torch

from gradd import private
from gradd.spec import CaptureError

SMALLEST = 2.0**-1022  # normal number of 64 bits


def check(mode: Any) -> None:
    """Refuses a call that happens under a transform of torch's, or while one records.

    Args:
        mode: The dispatch mode that is on; None = there is none.

    Raises:
        CaptureError: "func_transform", "forward_ad", "being_traced" or "flush_denormal".
    """
    if levels := private.transforms():
        kind = levels[-1].key().name.lower()
        raise CaptureError(
            "func_transform",
            f"the call is under a transform of torch.func ({kind}), whose tensors only PyTorch "
            "can compute with",
        )
    if private.dual_level() >= 0:
        raise CaptureError(
            "forward_ad", "forward-mode derivatives (dual_level) are not available in the daemon"
        )
    if torch.jit.is_tracing():
        raise CaptureError("being_traced", "torch.jit records the operators of this call")
    if not SMALLEST * 0.5:
        raise CaptureError(
            "flush_denormal",
            "this thread takes numbers below 1.2e-38 for zero, as torch.set_flush_denormal(True) "
            "or a library built with -ffast-math asks for, and the daemon computes with them: "
            "torch.set_flush_denormal(False) before the call lets it run there",
        )
    if mode is not None:
        kind = f"{type(mode).__module__}.{type(mode).__qualname__}"
        raise CaptureError(
            "being_traced",
            f"the dispatch mode {kind} sees every operator, as a tracer (torch.export, make_fx) "
            "has to, and the daemon shows none",
        )

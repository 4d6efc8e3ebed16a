"""Calls that torch transforms or records: what they compute is no matter of values alone.

Under vmap, grad, jvp and their like the tensors of a call stand for others (a batch of them, a
tensor with its tangent), and under torch.jit.trace, torch.export or make_fx the operators that run
are written down. A run in the daemon has no such meaning: it would fail inside torch, or leave
constants in the record. check() refuses those calls by name, before anything looks at their
tensors. What a transform does to a backward is in batched.py.

The same holds where the calling thread takes subnormal numbers for zero (set_flush_denormal, or a
library built with -ffast-math): the daemon's threads do not, and a capture would hold such zeros.
"""

from __future__ import annotations

import torch

from gradd import private
from gradd.spec import CaptureError

SMALLEST = 2.0**-1022  # normal number of 64 bits


def check() -> None:
    """Refuses a call that happens under a transform of torch's, or while one records.

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
    mode = private.dispatch_mode()
    if mode is not None:
        kind = f"{type(mode).__module__}.{type(mode).__qualname__}"
        raise CaptureError(
            "being_traced",
            f"the dispatch mode {kind} sees every operator, as a tracer (torch.export, make_fx) "
            "has to, and the daemon shows none",
        )

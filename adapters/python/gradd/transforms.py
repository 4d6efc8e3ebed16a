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
from torch.autograd import forward_ad

from gradd.spec import CaptureError

_level = torch._C._functorch.maybe_current_level
_recording = torch._C._get_tracing_state
_n_modes = torch._C._len_torch_dispatch_stack
_MODES = ("FAKE", "PROXY", "FUNCTIONAL")
SMALLEST = 2.0**-1022  # normal number of 64 bits


def check() -> None:
    """Refuses a call that happens under a transform of torch's, or while one records.

    Raises:
        CaptureError: "func_transform", "forward_ad", "being_traced" or "flush_denormal".
    """
    if _level() is not None:
        kind = torch._C._functorch.peek_interpreter_stack().key().name.lower()
        raise CaptureError(
            "func_transform",
            f"the call is under a transform of torch.func ({kind}), whose tensors only PyTorch "
            "can compute with",
        )
    if forward_ad._current_level >= 0:
        raise CaptureError(
            "forward_ad", "forward-mode derivatives (dual_level) are not available in the daemon"
        )
    if _recording() is not None:
        raise CaptureError("being_traced", "torch.jit records the operators of this call")
    if not SMALLEST * 0.5:
        raise CaptureError(
            "flush_denormal",
            "this thread takes numbers below 1.2e-38 for zero, as torch.set_flush_denormal(True) "
            "or a library built with -ffast-math asks for, and the daemon computes with them: "
            "torch.set_flush_denormal(False) before the call lets it run there",
        )
    if not _n_modes():
        return
    for name in _MODES:
        if torch._C._get_dispatch_mode(getattr(torch._C._TorchDispatchModeKey, name)) is not None:
            raise CaptureError(
                "being_traced",
                f"the operators of this call are recorded by a tracer ({name.lower()} mode), as "
                "torch.export or make_fx does",
            )
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    mode = type(_get_current_dispatch_mode())
    raise CaptureError(
        "being_traced",
        f"the dispatch mode {mode.__module__}.{mode.__qualname__} watches every operator, which "
        "the daemon does not show",
    )

"""Calls that torch transforms or records: what they compute is no matter of values alone.

Under vmap, grad, jvp and their like the tensors of a call stand for others (a batch of them, a
tensor with its tangent), and under torch.jit.trace, torch.export or make_fx the operators that run
are written down. A run in the daemon has no such meaning: it would fail inside torch, or leave
constants in the record. check() refuses those calls by name, before anything looks at their
tensors; it costs less than a microsecond. What a transform does to a backward is in batched.py.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

_level = torch._C._functorch.maybe_current_level
_recording = torch._C._get_tracing_state
_n_modes = torch._C._len_torch_dispatch_stack
_MODES = ("FAKE", "PROXY", "FUNCTIONAL")


def check() -> None:
    """Refuses a call that happens under a transform of torch's, or while one records.

    Raises:
        CaptureError: "func_transform", "forward_ad" or "being_traced".
    """
    if (
        _level() is None
        and forward_ad._current_level < 0
        and _recording() is None
        and not _n_modes()
    ):
        return
    _refuse()


def _refuse() -> None:
    from gradd.export import CaptureError

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
    for name in _MODES:
        if torch._C._get_dispatch_mode(getattr(torch._C._TorchDispatchModeKey, name)) is not None:
            raise CaptureError(
                "being_traced",
                f"the operators of this call are recorded by a tracer ({name.lower()} mode), as "
                "torch.export or make_fx does",
            )

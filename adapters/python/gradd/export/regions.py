"""Ways out of autograd that the tracer does not record by itself: Tensor.data, inference_mode.

Inside followed(), Tensor.data is a detach() and inference_mode is no_grad, which the tracer knows.
Both leave marks, for writes.py must know the difference: a write through .data or in inference mode
also escapes torch's check for values that a backward needs. Assigning to .data exchanges memory,
which no graph can hold.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode

from gradd.export.nodes import DATA, INFERENCE
from gradd.spec import CaptureError

_READ = torch.Tensor.data.__get__
_ASSIGN = torch.Tensor.data.__set__
_patch_lock = threading.RLock()


class _Data(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func == _READ:  # a new wrapper each time, equal but not the same
            result = args[0].detach()
            _mark(result)
            return result
        if func == _ASSIGN:
            raise CaptureError(
                "attribute_written",
                "forward() assigns to the .data of a tensor; use copy_() under torch.no_grad()",
            )
        return func(*args, **(kwargs or {}))


def _mark(tensor: torch.Tensor) -> None:
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return
    known = proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
    if known is not None:
        known.proxy.node.meta[DATA] = True


def _nodes() -> list[torch.fx.Node]:
    """The nodes that were traced so far."""
    mode = proxy_tensor.get_proxy_mode()
    return [] if mode is None else list(mode.tracer.graph.nodes)


@contextlib.contextmanager
def _inference_is_no_grad() -> Iterator[None]:
    """inference_mode(flag) of this thread does what set_grad_enabled(not flag) does."""
    kind = torch.inference_mode
    enter, leave = kind.__enter__, kind.__exit__
    me = threading.get_ident()
    over = False

    def enter_here(self: Any) -> None:
        if over or threading.get_ident() != me:
            return enter(self)
        self._gradd_region = torch.set_grad_enabled(not self.mode), len(_nodes())
        return None

    def leave_here(self: Any, *exc: Any) -> Any:
        region = self.__dict__.pop("_gradd_region", None)
        if region is None:
            return leave(self, *exc)
        grad, start = region
        torch._C._set_grad_enabled(grad.prev)
        for node in _nodes()[start:] if self.mode else ():
            node.meta[INFERENCE] = True
        return None

    with _patch_lock:
        kind.__enter__, kind.__exit__ = enter_here, leave_here
        try:
            yield
        finally:
            kind.__enter__, kind.__exit__ = enter, leave
            over = True


@contextlib.contextmanager
def slices_hold_parameters(module: torch.nn.Module) -> Iterator[None]:
    """A slice of a ParameterList makes Parameters of what stands for the module's own.

    Those would be new ones, of which nobody knows; so the slice takes what it was given.
    """
    kind = torch.nn.ParameterList
    own = kind.__setitem__
    me = threading.get_ident()
    standing = {id(p) for p in module.parameters()}

    def setitem(self: Any, index: int, value: Any) -> None:
        if id(value) in standing and threading.get_ident() == me:
            setattr(self, str(self._get_abs_string_index(index)), value)
        else:
            own(self, index, value)

    with _patch_lock:
        kind.__setitem__ = setitem
        try:
            yield
        finally:
            kind.__setitem__ = own


@contextlib.contextmanager
def followed(module: torch.nn.Module) -> Iterator[None]:
    """Context of the traced call of a module. See the top of this file."""
    with _inference_is_no_grad(), slices_hold_parameters(module), _Data():
        yield

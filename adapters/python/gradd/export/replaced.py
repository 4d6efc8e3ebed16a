"""Functions of torch that a user has replaced, while torch traces what calls them.

A function of torch hands itself to the modes that trace it, by its own name: where `F.relu` is
`lambda x: original(x) * 3`, what the original hands over is the replacement, which is then applied
once per mode. own_functions() hands over the function that runs. Methods of tensors that are
written in C are looked up by name out of reach of Python, and torch's tracers call such methods
themselves: where one of those is replaced, nothing is captured.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch

from gradd.export.guards import frames, policy
from gradd.spec import CaptureError

# Methods that decide no number: texts, copies in files, starts of a backward, other devices.
_HARMLESS = frozenset(
    {
        *("__repr__", "__str__", "__format__", "__dir__", "__doc__", "__module__", "__class__"),
        *("__reduce__", "__reduce_ex__", "__setstate__", "__deepcopy__", "backward", "cuda"),
        *("pin_memory", "share_memory_", "__init_subclass__", "__subclasshook__", "__weakref__"),
    }
)


def check_methods() -> None:
    """Refuses replaced methods of torch.Tensor, and of torch.nn.Module those that a trace replaces.

    Raises:
        CaptureError: "outside_state".
    """
    for name in ("__call__", "__getattr__"):
        found = torch.nn.Module.__dict__[name]
        if not _is_of_torch(found):
            raise CaptureError(
                "outside_state",
                f"torch.nn.Module.{name} is replaced by {_described(found)}, which torch would "
                "leave out while it captures; put its work into forward(), or into hooks",
            )
    for name, value in list(torch.Tensor.__dict__.items()):
        if name in _TORCHS and name not in _HARMLESS and not _is_of_torch(value):
            raise CaptureError(
                "outside_state",
                f"torch.Tensor.{name} is replaced by {_described(value)}, which torch would call "
                "for its own purposes while it captures; write a function, or a method of another "
                "name",
            )


def _code_of(value: Any) -> types.CodeType | None:
    value = getattr(value, "__func__", value)
    value = value.fget if isinstance(value, property) else value
    return value.__code__ if isinstance(value, types.FunctionType) else None


def _is_of_torch(value: Any) -> bool:
    code = _code_of(value)
    if code is not None:
        return policy.is_torch_file(code.co_filename)
    if type(value).__module__.partition(".")[0] == "torch":  # torch.cond and its like
        return True
    return not callable(value) or type(value) in (
        *(types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType),
        *(types.BuiltinFunctionType, types.ClassMethodDescriptorType, types.MethodWrapperType),
    )


_TORCHS = frozenset(torch._C.TensorBase.__dict__) | {
    name for name, value in torch.Tensor.__dict__.items() if _is_of_torch(value)
}


def _described(value: Any) -> str:
    code = _code_of(value)
    if code is None:
        return f"a {type(value).__qualname__}"
    return f"{code.co_name}() @ {code.co_filename}:{code.co_firstlineno}"


class _Watched:
    """Owner of the code that stands in for handle_torch_function while a trace runs."""

    @staticmethod
    def handle(public_api, relevant_args, *args, **kwargs):
        # Runs with the globals of torch's own function, hence the import.
        from gradd.export import replaced

        return replaced._handled(public_api, relevant_args, args, kwargs)


_HANDLE = torch.overrides.handle_torch_function
_PLAIN = types.FunctionType(
    _HANDLE.__code__, _HANDLE.__globals__, "handle_torch_function", _HANDLE.__defaults__
)
_tracing: dict[int, int] = {}  # thread that traces -> how many traces run in it
_lock = threading.RLock()


def _handled(public_api: Any, relevant: Any, args: tuple, kwargs: dict) -> Any:
    """A call of handle_torch_function, while some thread traces."""
    if threading.get_ident() in _tracing:
        public_api = _running(public_api, sys._getframe(2))
    return _PLAIN(public_api, relevant, *args, **kwargs)


def _running(public_api: Any, frame: types.FrameType) -> Any:
    """What the frame of a function of torch runs, where another one has its name."""
    code = frame.f_code
    if _code_of(public_api) is code or not policy.is_torch_file(code.co_filename):
        return public_api
    name = code.co_name
    if public_api is not frame.f_globals.get(name) and public_api is not getattr(
        torch.Tensor, name, None
    ):
        if _is_of_torch(public_api):  # the public face of a private function
            return public_api
    elif frames.supported():
        return frames.function(frame)
    raise CaptureError(
        "outside_state",
        f"{code.co_name}() of torch is replaced by {_described(public_api)}, which torch would "
        "call several times while it captures",
    )


@contextlib.contextmanager
def own_functions() -> Iterator[None]:
    """Inside, functions of torch that this thread runs hand over themselves."""
    me = threading.get_ident()
    with _lock:
        _tracing[me] = _tracing.get(me, 0) + 1
        _HANDLE.__code__ = _Watched.handle.__code__
        try:
            yield
        finally:
            _tracing[me] -= 1
            if not _tracing[me]:
                del _tracing[me]
                _HANDLE.__code__ = _PLAIN.__code__

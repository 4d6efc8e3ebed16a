"""The `forward` of an ORTModule: a call through the daemon, under the module's signature.

Other code replaces `model.forward` (TRL, accelerate, users' own patches). The replacement becomes
the forward of the wrapped module. If it calls the `forward` that it replaced, it gets the wrapped
module's earlier forward, which is part of the same graph.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from gradd.module_tables import BEFORE_FORWARD, HOOKS_OF_ALL

CALL = torch.nn.Module.__call__


class _Here(threading.local):
    """The present calls of this thread."""

    module: torch.nn.Module | None = None  # the wrapped one whose call runs, or is traced


here = _Here()


def _made(module: torch.nn.Module, inner: Callable[..., Any]) -> types.FunctionType:
    """The `forward` of a wrapper whose module has this one."""

    @torch.compiler.assume_constant_result
    def is_traced() -> bool:
        return here.module is module

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if is_traced():  # its replacement calls it
                return inner(*args, **kwargs)
            return _run_apart(self, inner, args, kwargs)
        return _run(self, inner, args, kwargs)

    forward.__doc__ = inner.__doc__
    with contextlib.suppress(TypeError, ValueError):
        # The wrapped forward's: trainers choose columns of a data set by it.
        signature = inspect.signature(inner)
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])
    return forward


def _run(
    wrapper: Any, inner: Callable[..., Any] | None, args: tuple, kwargs: dict[str, Any]
) -> Any:
    compiled = wrapper._gradd_compiled
    own = inner is None or inner == compiled.module.forward
    return (compiled if own else inner)(*args, **kwargs)  # type: ignore[misc]


class Attribute:
    """`forward` among the attributes of ORTModule.

    Of the class it is a function, whose signature people ask for. Assigned to a wrapper it is the
    wrapped module's.
    """

    def __get__(self, wrapper: Any, owner: type) -> Callable[..., Any]:
        if wrapper is None:
            return _of_class
        table = wrapper.__dict__
        module = table["_gradd_module"]
        inner = module.forward
        known = table.get("_gradd_forward")
        if known is None or known[0] != inner:
            known = table["_gradd_forward"] = (inner, _made(module, inner))
        return types.MethodType(known[1], wrapper)

    def __set__(self, wrapper: Any, value: Callable[..., Any]) -> None:
        module = wrapper._gradd_module
        # A method of the wrapper becomes one of the module.
        mine = isinstance(value, types.MethodType) and value.__self__ is wrapper
        module.forward = types.MethodType(value.__func__, module) if mine else value

    def __delete__(self, wrapper: Any) -> None:
        """The class's forward again."""
        del wrapper._gradd_module.forward


def _of_class(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the result of the wrapped module's forward."""
    # No mark on this function: functools.wraps(type(model).forward) would copy it.
    return _run_apart(self, None, args, kwargs)


def call_wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the result of the wrapped module."""
    table = self.__dict__
    # What torch's __call__ comes to where there are no hooks, and no subclass has a forward.
    if (
        type(type(self).__dict__.get("forward")) is Attribute
        and not any(map(table.get, BEFORE_FORWARD))
        and not any(HOOKS_OF_ALL)
    ):
        return table["_gradd_compiled"](*args, **kwargs)
    # A replacement of Module.__call__ applies to the module only.
    return CALL(self, *args, **kwargs)


def call_part(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the result of a child: its hooks run in its own call, and a part has none."""
    return self.forward(*args, **kwargs)


# torch.compile around a wrapped module cuts its graphs here.
_apart = functools.partial(torch.compiler.disable, reason="an ORTModule runs in the daemon")
_run_apart, call_wrapper, call_part = _apart(_run), _apart(call_wrapper), _apart(call_part)
Attribute.__get__ = _apart(Attribute.__get__)  # type: ignore[method-assign]

"""What `forward` is of an ORTModule: a call through the daemon, under the module's signature.

People replace `model.forward` (TRL, accelerate, patches of their own). What they put there either
calls the `forward` that they took before, around which it runs in PyTorch, or is another forward,
which then becomes that of the wrapped module. A `forward` that was taken before a replacement goes
on to mean what it meant.

What holds on to the one before need not call it: TRL's computes the loss from the layers by itself.
Such a call never comes to the daemon, and says so.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradd.compiled import left_alone

CALL = torch.nn.Module._wrapped_call_impl
_DEPTH = 8  # functions around functions
# Not by a mark: functools.wraps copies marks.
_ours: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()


def _made(inner: Callable[..., Any]) -> types.FunctionType:
    """The `forward` of a wrapper whose module has this one."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        bridge = self._gradd_bridge
        return (bridge if inner == bridge.module.forward else inner)(*args, **kwargs)

    forward.__doc__ = inner.__doc__
    _ours.add(forward)
    with contextlib.suppress(TypeError, ValueError):
        # The wrapped forward's: trainers choose columns of a data set by it.
        signature = inspect.signature(inner)
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])
    left_alone(forward, "an ORTModule runs in the daemon")
    return forward


class Attribute:
    """`forward` among the attributes of ORTModule.

    Of the class it is a function, whose signature people ask for. Assigned to a wrapper it stays
    there if it calls the forward before it, and is the wrapped module's else.
    """

    def __get__(self, wrapper: Any, owner: type) -> Callable[..., Any]:
        if wrapper is None:
            return _of_class
        table = wrapper.__dict__
        if "forward" in table:
            return table["forward"]
        inner = table["_gradd_bridge"].module.forward
        known = table.get("_gradd_forward")
        if known is None or known[0] != inner:
            known = table["_gradd_forward"] = (inner, _made(inner))
        return types.MethodType(known[1], wrapper)

    def __set__(self, wrapper: Any, value: Callable[..., Any]) -> None:
        wrapper.__dict__.pop("forward", None)
        if leads_back(value):
            wrapper.__dict__["forward"] = value
            return
        module = wrapper._gradd_module
        # A method of the wrapper becomes one of the module.
        mine = isinstance(value, types.MethodType) and value.__self__ is wrapper
        module.forward = types.MethodType(value.__func__, module) if mine else value

    def __delete__(self, wrapper: Any) -> None:
        """The class's forward again, as of any module: what was put there is one attribute."""
        around = wrapper.__dict__.pop("forward", None)
        if around is None or "forward" in wrapper._gradd_module.__dict__:
            del wrapper._gradd_module.forward


def _of_class(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What the wrapped module's forward returns."""
    return self._gradd_bridge(*args, **kwargs)


def call_wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What the wrapped module returns."""
    # What somebody puts into the place of Module.__call__ is applied to the module only.
    if "forward" not in self.__dict__:
        return CALL(self, *args, **kwargs)
    bridge = self._gradd_bridge
    before, start = bridge.calls, time.perf_counter()
    result = CALL(self, *args, **kwargs)
    if bridge.calls == before and not bridge.is_disabled():
        bridge.bypassed(time.perf_counter() - start)
    return result


def leads_back(value: Any) -> bool:
    """Whether a replacement for `forward` holds on to the one that it replaces, as it calls it."""
    found, seen = [(value, 0)], set()
    while found:
        one, depth = found.pop()
        if isinstance(one, torch.nn.Module):
            continue
        if isinstance(one, types.FunctionType) and one in _ours:
            return True
        if id(one) in seen or depth > _DEPTH:
            continue
        seen.add(id(one))
        found += [(part, depth + 1) for part in _parts(one)]
    return False


def _parts(value: Any) -> Iterator[Any]:
    """What a callable calls, as far as it can be seen from outside."""
    if isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.FunctionType):
        yield from map(_content, value.__closure__ or ())
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
    elif callable(value) and isinstance(getattr(value, "__dict__", None), dict):
        yield from vars(value).values()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


for _function in (_of_class, Attribute.__get__, call_wrapper):
    left_alone(_function, "an ORTModule runs in the daemon")

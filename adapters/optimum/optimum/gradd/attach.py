"""Runs a model's `forward` through the daemon by replacing it on the instance.

The module keeps its identity, so everything around it (saving, label smoothing, PEFT, DDP,
autocast, generate, callbacks) sees the model that the user made. A wrapper module would not do:
accelerate does not unwrap it, configuration files go missing and label smoothing silently computes
another loss.

The replaced `forward` is a bound method that finds what runs calls by the module it is bound to. A
copy of the model (`copy.deepcopy`, pickle) is another module without that: it runs in plain PyTorch
and touches nothing of the original.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class _Earlier:
    """The forward that stood on an instance before ours."""

    function: Callable[..., Any] | None  # None: that of the class
    bound: bool  # to the module, as accelerate's are: a copy of the module has it bound to itself

    @classmethod
    def of(cls, module: nn.Module) -> _Earlier:
        forward = module.__dict__.get("forward")
        bound = isinstance(forward, types.MethodType) and forward.__self__ is module
        return cls(forward.__func__ if bound else forward, bound)

    def on(self, module: nn.Module) -> Callable[..., Any]:
        """The same on the module itself or on a copy."""
        if self.function is None:
            return types.MethodType(type(module).forward, module)
        return types.MethodType(self.function, module) if self.bound else self.function


# Module -> the callable that takes its calls now. No entry: the original forward runs.
_routes: weakref.WeakKeyDictionary[nn.Module, Callable[..., Any]] = weakref.WeakKeyDictionary()
# Function that we made -> what stood on the instance before. A mark on the function would not do:
# functools.wraps copies marks to the wrapping function.
_made: weakref.WeakKeyDictionary[Callable[..., Any], _Earlier] = weakref.WeakKeyDictionary()
# Module -> what was made for its class's forward: trained again, it has the same one again.
_known: weakref.WeakKeyDictionary[nn.Module, Callable[..., Any]] = weakref.WeakKeyDictionary()
# .modules: those whose call this thread has handed to a route, and the forwards that it replaces
_calls = threading.local()
_WRAPPERS = 16  # how many of other people's wrappers are looked through


def attach(module: nn.Module, route: Callable[..., Any]) -> None:
    """Sends calls of `module` to `route` until `detach`. A second call only changes the route."""
    _routes[module] = route
    if not is_replaced(module):
        module.forward = types.MethodType(_make_forward(module), module)


def detach(module: nn.Module) -> None:
    """Gives the module its own forward back; does nothing to a module that is not attached."""
    _routes.pop(module, None)
    forward = module.__dict__.get("forward")
    # Another library (accelerate's autocast) may have wrapped ours since: ours then stays inside
    # and, without a route, passes calls on to the original.
    if forward is not None and _is_ours(forward):
        earlier = _made[forward.__func__]
        if earlier.function is None:
            del module.__dict__["forward"]
        else:
            module.forward = earlier.on(module)


def is_attached(module: nn.Module) -> bool:
    """True while calls of the module are routed."""
    return module in _routes


def is_replaced(module: nn.Module) -> bool:
    """True if our forward is installed on the module, bare or under accelerate's wrappers."""
    return _installed(module) is not None


def original_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that the module had before `attach`, bound to the module.

    Accelerate's wrappers stay on a model after training, with ours inside: what is asked for lies
    under ours, not on the surface. (The wrappers are around every call of the module anyway.) In a
    call it lies under the function that was called, which another one may have in it since.
    """
    for called, forward in reversed(_calls.__dict__.get("modules", ())):
        if called is module:
            return forward
    ours = _installed(module)
    return (_made[ours] if ours is not None else _Earlier.of(module)).on(module)


def _installed(module: nn.Module) -> Callable[..., Any] | None:
    """Our function on the module, bare or wrapped by others since."""
    forward = module.__dict__.get("forward")
    for _ in range(_WRAPPERS):
        if forward is None:
            return None
        function = getattr(forward, "__func__", forward)
        if function in _made:
            return function
        forward = getattr(forward, "__wrapped__", None)
    return None


def _is_ours(forward: Any) -> bool:
    return getattr(forward, "__func__", forward) in _made


def _make_forward(module: nn.Module) -> Callable[..., Any]:
    """Builds the function to bind. It must not close over `module`: copies would share it."""
    earlier = _Earlier.of(module)
    pattern = earlier.function if earlier.function is not None else type(module).forward
    known = _known.get(module)
    if earlier.function is None and known is not None and known.__wrapped__ is pattern:
        return known

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        route = _routes.get(self)
        active = _calls.__dict__.setdefault("modules", [])
        # A call from inside the route means the module itself: a model that calls itself, or a
        # wrapper around ours that does not tell what it wraps.
        if route is not None and not any(module is self for module, _ in active):
            active.append((self, earlier.on(self)))
            try:
                return route(*args, **kwargs)
            finally:
                active.pop()
        return earlier.on(self)(*args, **kwargs)

    functools.update_wrapper(forward, pattern)
    # pickle stores a bound method by its name: the loaded copy then finds its class's own forward.
    forward.__name__ = "forward"
    if earlier.function is not None:
        forward.__signature__ = _with_self(inspect.signature(earlier.on(module)))
    else:
        _known[module] = forward
    _made[forward] = earlier
    return forward


def _with_self(signature: inspect.Signature) -> inspect.Signature:
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = [p for p in signature.parameters.values() if p.name != "self"]
    return signature.replace(parameters=[own, *rest])

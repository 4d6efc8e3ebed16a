"""Parts of a trainer's model that its loss calls by themselves, as `model.encoder(x)`.

Within compute_loss() a child of the model has a forward that runs in the daemon, compiled at its
first call. It has its own one in a call of the model, of which it is a part, and everywhere else: a
backward that computes a checkpoint again must not come here.

What lies deeper, as `model.base.encoder`, has one as well in the losses 1, 2, 4, 8, ..., and from
its first such call on in all of them: to replace the forwards of hundreds of modules in each loss
takes milliseconds, and makes Dynamo compare its guards one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from . import attach


class Parts:
    """The children of one model, and what runs calls of them."""

    def __init__(self, model: nn.Module, compiled: Callable[[nn.Module], Any]) -> None:
        """Args:
        model: The model.
        compiled: Makes what runs calls of a child; asked at the first call.
        """
        self._model, self._compiled = model, compiled
        self._made: dict[nn.Module, Any] = {}
        self._forwards: dict[nn.Module, Callable[..., Any]] = {}  # what those are made of
        self._losses = 0
        self._on: list[nn.Module] = []  # those with our forward

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Around what may call children by themselves."""
        self._losses += 1
        deep = self._losses & (self._losses - 1) == 0
        found = dict.fromkeys(_callable(self._model, deep))
        self._attach(list(found | dict.fromkeys(self._made)))
        try:
            yield
        finally:
            self._detach()

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Around a call of the model, or of a child."""
        found = self._on
        self._detach()
        try:
            yield
        finally:
            self._attach(found)

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """What runs calls of the model, in which no child is called by itself."""

        def route(*args: Any, **kwargs: Any) -> Any:
            with self.off():
                return compiled(*args, **kwargs)

        return route

    def _attach(self, children: list[nn.Module]) -> None:
        for child in children:
            attach.attach(child, self._route(child))
        self._on = children

    def _detach(self) -> None:
        for child in self._on:
            attach.detach(child)
        self._on = []

    def _route(self, child: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # A script may have replaced its forward since the last call.
            forward = attach.original_forward(child)
            if child not in self._made or self._forwards[child] != forward:
                self._made[child] = self._compiled(child)
                self._forwards[child] = forward
            return self._made[child](*args, **kwargs)

        return self.around(call)

    def close(self) -> None:
        """Gives up what the daemon holds of them."""
        for made in self._made.values():
            made.close()
        self._made.clear()
        self._forwards.clear()


def _callable(model: nn.Module, deep: bool) -> Iterator[nn.Module]:
    """Children that a script can call, with those in lists; deep: and what they are made of.

    What has one child alone, as PEFT's wrappers, is looked through in any case.
    """
    children = list(model.children())
    for child in children:
        if type(child).forward is nn.Module.forward:  # a list, or a dict
            yield from _callable(child, deep)
            continue
        if _runs_in_daemon(child):
            continue
        yield child
        if deep or len(children) == 1:
            yield from _callable(child, deep)


def _runs_in_daemon(child: nn.Module) -> bool:
    from gradd import ORTModule

    return isinstance(child, ORTModule)

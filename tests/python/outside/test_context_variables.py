"""Context variables that forward() sets: a capture leaves no trace, every call sets them."""

from __future__ import annotations

import contextvars
import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")
X = torch.ones(2, 3)
Var = contextvars.ContextVar


class Takes(nn.Module):
    """A layer whose result is scaled with what a function takes from a variable."""

    def __init__(self, take: Callable[[Any, torch.Tensor], Any], state: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, bias=False)
        nn.init.ones_(self.layer.weight)
        self.take, self.state = (take,), (state,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y * self.take[0](self.state[0], y)


def _set(value: Callable[[Any], Any]) -> Callable:
    def take(variable: Var, y: torch.Tensor) -> float:
        variable.set(value(variable))
        return 2.0

    return take


def _kept(variable: Var, y: torch.Tensor) -> float:
    variable.set(y.detach())
    return 1.0


def _twice(variable: Var, y: torch.Tensor) -> float:
    variable.reset(variable.set(7.0))
    variable.set(variable.get(1.0) + 1)
    return variable.get()


def _middle(variable: Var, y: torch.Tensor) -> float:
    variable.set(5.0)
    variable.reset(variable.set(7.0))
    return variable.get()


def _in_object(variable: Var, y: torch.Tensor) -> float:
    class Scope:
        def __enter__(self) -> None:
            variable.set(variable.get(1.0) * 2)

        def __exit__(self, *error: object) -> None:
            pass

    with Scope():
        return variable.get()


def _mapped(variable: Var, y: torch.Tensor) -> float:
    list(map(variable.set, [3.0, variable.get(0.0) + 1]))
    return variable.get()


WRITES = {
    "a number": _set(lambda v: v.get(0.0) + 1),
    "an activation": _kept,
    "after a reset": _twice,
    "before a reset": _middle,
    "in a context of its own": _in_object,
    "out of sight": _mapped,
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_a_variable_that_is_set_is_set_in_every_call(name: str, given: bool) -> None:
    def run(wrap: Callable) -> tuple[list, Any]:
        variable: Var = Var("v")
        if given:
            variable.set(4.0)
        module, found = wrap(Takes(WRITES[name], variable)), []
        for step in range(4):
            out = module(X * step)
            out.sum().backward()
            value = variable.get()
            found += [out.detach().tolist(), value.tolist() if torch.is_tensor(value) else value]
        return found, module

    ours, module = run(ORTModule)
    assert ours == contextvars.copy_context().run(run, lambda m: m)[0]
    assert set(module.gradd_stats()["fallbacks"]) == {"outside_written"}


def _reset(variable: Var, y: torch.Tensor) -> float:
    token = variable.set(variable.get(1.0) * 3)
    try:
        return variable.get()
    finally:
        variable.reset(token)


def _nested(variable: Var, y: torch.Tensor) -> float:
    first = variable.set(2.0)
    second = variable.set(3.0)
    variable.reset(second)
    variable.reset(first)
    return 1.5


def _numpy(variable: Var, y: torch.Tensor) -> float:
    with np.errstate(divide="ignore"):
        return 2.5


READS = {"reset": _reset, "nested": _nested, "numpy": _numpy}


@pytest.mark.parametrize("name", READS)
def test_a_variable_that_is_reset_is_captured(name: str) -> None:
    variable: Var = Var("v")
    eager = Takes(READS[name], variable)
    ours = ORTModule(copy.copy(eager), strict=True)
    for value in (1.0, 2.0):
        variable.set(value)
        torch.testing.assert_close(ours(X), eager(X))
        assert variable.get() == value


def test_a_set_to_the_present_value_is_no_set_to_another() -> None:
    variable: Var = Var("v", default=0.0)
    variable.set(5.0)
    ours = ORTModule(Takes(_set(lambda _: 5.0), variable))
    ours(X)
    assert ours.gradd_stats()["fallbacks"] == {}
    for value in (3.0, 4.0):
        variable.set(value)
        ours(X)
        assert variable.get() == 5.0
    assert ours.gradd_stats()["fallbacks"] == {"outside_written": 2}


def test_the_message_names_the_variable() -> None:
    variable: Var = Var("step")
    with pytest.raises(Exception, match="sets the context variable 'step'"):
        ORTModule(Takes(_kept, variable), strict=True)(X)
    assert variable.get(None) is None


def test_a_lock_that_the_trial_has_taken_is_free_again() -> None:
    def take(lock: Any, y: torch.Tensor) -> float:
        if lock.locked():
            lock.release()
        else:
            lock.acquire()
        return 1.0 + lock.locked()

    found = []
    for wrap in (ORTModule, lambda module: module):
        module = wrap(Takes(take, threading.Lock()))
        found.append([module(X).tolist() for _ in range(4)])
    assert found[0] == found[1]


def test_a_token_of_outside_is_not_used_up_by_a_capture() -> None:
    def take(state: tuple, y: torch.Tensor) -> float:
        variable, tokens = state
        value = variable.get()
        if tokens:
            variable.reset(tokens.pop())
        return value

    def run(wrap: Callable) -> list:
        variable: Var = Var("v", default=1.0)
        module = wrap(Takes(take, (variable, [variable.set(3.0)])))
        return [module(X).tolist() for _ in range(3)]

    assert run(ORTModule) == run(lambda module: module)

"""Training scripts change state between steps: each step has the numbers of PyTorch."""

from __future__ import annotations

import collections
import contextvars
import copy
import dataclasses
import enum
import os
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from gradd import ORTModule

X = torch.linspace(-1, 1, 12).reshape(3, 4)
_VARIABLE = "GRADD_SCALE_OF_A_TEST"
SCALE = 1.0


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch, shared_daemon: Any) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    monkeypatch.setenv(_VARIABLE, "1")


class Low(nn.Module):
    """A layer with an adapter that can be switched, merged and taken back."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.on, self.merged = nn.Linear(4, 4), True, False
        self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        return result + self.b(self.a(x)) if self.on and not self.merged else result

    def merge(self, sign: int) -> None:
        """Adds the adapter to the weights, or takes it out of them."""
        self.base.weight.data += sign * self.b.weight.data @ self.a.weight.data
        self.merged = sign > 0


class Net(nn.Module):
    """Some layers, and a factor that a script looks up somewhere."""

    def __init__(self, scale: Callable[[Any], Any] = lambda net: 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.low, self.drop = nn.Linear(4, 4), Low(), nn.Dropout(0.0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.last, self.scale = nn.Linear(4, 4, bias=False), scale
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.tanh(self.low(self.first(x))))
        for layer in self.layers:
            x = layer(x)
        return self.last(x) * self.mean * self.scale(self)


Change = Callable[[Any, int], Any]


def _steps(net: Net, called: Callable, change: Change, n: int) -> list[Any]:
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    found = []
    for step in range(n):
        change(net, step)
        optimizer.param_groups[0]["params"] = list(net.parameters())
        optimizer.zero_grad()
        result = called(X)
        result.square().mean().backward()
        gradients = {n: p.grad for n, p in net.named_parameters()}
        found.append(copy.deepcopy((result.detach(), gradients)))
        optimizer.step()
    return [*found, dict(net.state_dict())]


def _compare(make: Callable[[], Net], change: Change, n: int = 6) -> Any:
    theirs = make()
    expected = _steps(theirs, theirs, change, n)
    net = make()
    ours = ORTModule(net)
    torch.testing.assert_close(_steps(net, ours, change, n), expected, rtol=1e-4, atol=1e-5)
    stats = ours.gradd_stats()
    assert stats["forwards"] > 0
    return stats


# ---- a factor, and where scripts keep it ----


@dataclasses.dataclass
class Config:
    scale: float = 1.0


class Mode(enum.Enum):
    LOW = 0.5
    HIGH = 2.0


class Schedule:
    step = 0

    @property
    def scale(self) -> float:
        """Falls with each step."""
        return 0.9**self.step

    @classmethod
    def get(cls) -> float:
        """From the class."""
        return 1.0 / (1 + cls.step)


def _put(net: Net, value: Any) -> None:
    net.held = value


def _in_closure() -> tuple[Callable, Change]:
    value = 1.0

    def change(net: Net, step: int) -> None:
        nonlocal value
        value = 0.9**step

    return lambda net: value, change


def _in(
    make: Callable[[], Any], read: Callable[[Any], Any], write: Callable[[Any, int], Any]
) -> Callable[[], tuple[Callable, Change]]:
    """An object that is held outside of the module."""

    def pair() -> tuple[Callable, Change]:
        held = make()
        return lambda net: read(held), lambda net, step: write(held, step)

    return pair


def _set_mode(held: list, step: int) -> None:
    held[0] = Mode.HIGH if step % 2 else Mode.LOW


def _in_a_variable() -> tuple[Callable, Change]:
    variable = contextvars.ContextVar("scale", default=1.0)
    return lambda net: variable.get(), lambda net, step: variable.set(0.9**step)


def _global(net: Net) -> float:
    return SCALE


def _late_field(held: Any) -> float:
    return getattr(held, "scale", 1.0)


def _of_class(net: Net, step: int) -> None:
    Schedule.step = step


PLACES: dict[str, Callable[[], tuple[Callable, Change]]] = {
    "closure": _in_closure,
    "global": lambda: (_global, lambda net, step: globals().update(SCALE=0.9**step)),
    "attribute": lambda: (
        lambda net: net.held,
        lambda net, step: _put(net, 0.9**step),
    ),
    "dataclass": _in(Config, lambda h: h.scale, lambda h, i: setattr(h, "scale", 0.9**i)),
    "namespace": _in(
        lambda: types.SimpleNamespace(scale=1.0),
        lambda h: h.scale,
        lambda h, i: setattr(h, "scale", 0.9**i),
    ),
    "late field": _in(
        types.SimpleNamespace, _late_field, lambda h, i: i > 2 and setattr(h, "scale", 0.5)
    ),
    "dict": _in(lambda: {"a": 1.0}, lambda h: h["a"], lambda h, i: h.update(a=0.9**i)),
    "late key": _in(dict, lambda h: h.get("a", 1.0), lambda h, i: i > 2 and h.update(a=0.5)),
    "nested": _in(
        lambda: {"loss": [Config()]},
        lambda h: h["loss"][0].scale,
        lambda h, i: setattr(h["loss"][0], "scale", 0.9**i),
    ),
    "list": _in(lambda: [1.0], lambda h: h[0], lambda h, i: h.__setitem__(0, 0.9**i)),
    "growing list": _in(lambda: [1.0], lambda h: sum(h) / len(h), lambda h, i: h.append(i)),
    "deque": _in(
        lambda: collections.deque([1.0], maxlen=3),
        lambda h: sum(h) / len(h),
        lambda h, i: h.append(float(i)),
    ),
    "scalar of numpy": _in(
        lambda: [np.float32(1)], lambda h: h[0], lambda h, i: h.__setitem__(0, np.float32(0.9**i))
    ),
    "array": _in(lambda: np.ones(2), lambda h: float(h[1]), lambda h, i: h.fill(0.9**i)),
    "array that is used": _in(
        lambda: np.ones(4, np.float32), torch.from_numpy, lambda h, i: h.fill(0.9**i)
    ),
    "tensor": _in(lambda: torch.ones(()), lambda h: h, lambda h, i: h.fill_(0.9**i)),
    "number of a tensor": _in(
        lambda: torch.ones(()), lambda h: h.item(), lambda h, i: h.fill_(0.9**i)
    ),
    "tensor behind its back": _in(
        lambda: torch.ones(4), lambda h: h, lambda h, i: h.numpy().fill(0.9**i)
    ),
    "enum": _in(lambda: [Mode.LOW], lambda h: h[0].value, _set_mode),
    "property": _in(Schedule, lambda h: h.scale, lambda h, i: setattr(h, "step", i)),
    "class": lambda: (lambda net: Schedule.get(), _of_class),
    "context": _in_a_variable,
    "environment": lambda: (
        lambda net: float(os.environ[_VARIABLE]),
        lambda net, step: os.environ.update({_VARIABLE: str(0.9 ** (step // 2))}),
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_schedule(name: str) -> None:
    changes: list[Change] = []

    def make() -> Net:
        Schedule.step = 0
        globals().update(SCALE=1.0)
        read, change = PLACES[name]()
        changes[:] = [change]
        net = Net(read)
        net.held = 1.0
        return net

    try:
        _compare(make, lambda net, step: changes[0](net, step), 7)
    finally:
        Schedule.step = 0
        globals().update(SCALE=1.0)


# ---- the model itself ----


class Doubled(nn.Linear):
    """Another class for a layer that there is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def _layer(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 4)


def _at(**deeds: Callable[[Net], Any]) -> Change:
    """What is done before some steps: `s2` before the third."""

    def change(net: Net, step: int) -> None:
        deed = deeds.get(f"s{step}")
        if deed is not None:
            deed(net)

    return change


def _patched(net: Net) -> None:
    plain = net.first.forward
    net.first.forward = lambda x: plain(x) + 1.0


def _hooked(net: Net) -> None:
    net.hook = net.first.register_forward_hook(lambda module, given, result: result * 2)


def _hooked_before(net: Net) -> None:
    net.hook = net.low.register_forward_pre_hook(lambda module, given: (given[0] * 2,))


def _hooked_gradient(net: Net) -> None:
    net.hook = net.first.weight.register_hook(lambda gradient: gradient * 3)


def _unhook(net: Net) -> None:
    net.hook.remove()


def _tie(net: Net) -> None:
    net.last.weight = net.first.weight


def _untie(net: Net) -> None:
    net.last.weight = nn.Parameter(net.first.weight.detach().clone())


def _averaged(net: Net, step: int) -> None:
    """Weights of an average for every third step."""
    average = getattr(net, "average", None) or {}
    own = {n: p.detach().clone() for n, p in net.named_parameters()}
    net.average = {n: 0.9 * average.get(n, p) + 0.1 * p for n, p in own.items()}
    if step % 3 == 2:
        for n, p in net.named_parameters():
            p.data.copy_(net.average[n])


def _moved(net: Net, step: int) -> None:
    for p in net.parameters():
        if step % 2:
            p.data = p.data * 0.9
        else:
            p.data.mul_(1.1)


def _resized(net: Net, step: int) -> None:
    net.drop.p = 1.0 if step % 2 else 0.0


def _written_behind(net: Net, step: int) -> None:
    net.last.weight.detach().view(-1)[step].fill_(0.3)
    net.first.bias.data[step % 4 :].zero_()
    net.mean.numpy()[step % 4] = 2.0
    if step == 3:
        net.layers[0].weight.data.set_(_layer(9).weight.data)
    if step == 4:
        net.layers[1].weight.set_(torch.eye(4))


def _grown(net: Net, step: int) -> None:
    """A buffer that grows in its own memory, and a storage that is given back and comes again."""
    with torch.no_grad():
        if step == 2:
            net.mean.resize_(12).fill_(0.5).resize_(3, 4)
        if step == 4:
            net.mean.untyped_storage().resize_(0)
            net.mean.untyped_storage().resize_(48)
            net.mean.fill_(2.0)


SURGERY: dict[str, Change] = {
    "a layer replaced": _at(s2=lambda net: setattr(net, "first", _layer(5))),
    "a layer replaced in a list": _at(s2=lambda net: net.layers.__setitem__(0, _layer(5))),
    "a layer added": _at(s2=lambda net: net.layers.append(_layer(5))),
    "a layer removed": _at(s2=lambda net: net.layers.__delitem__(0)),
    "layers in another order": _at(
        s2=lambda net: setattr(net, "layers", nn.ModuleList(reversed(net.layers)))
    ),
    "a layer for identity": _at(s2=lambda net: setattr(net, "low", nn.Identity())),
    "another class of a layer": _at(
        s2=lambda net: setattr(net.first, "__class__", Doubled),
        s4=lambda net: setattr(net.first, "__class__", nn.Linear),
    ),
    "a forward of an instance": _at(s2=_patched, s4=lambda net: net.first.__dict__.pop("forward")),
    "frozen": _at(
        s2=lambda net: net.low.requires_grad_(False), s4=lambda net: net.low.requires_grad_(True)
    ),
    "dropout": _resized,
    "evaluation": _at(s2=lambda net: net.eval(), s4=lambda net: net.train()),
    "tied": _at(s2=_tie, s4=_untie),
    "an adapter switched": lambda net, step: setattr(net.low, "on", step % 2 == 0),
    "an adapter merged": _at(s2=lambda net: net.low.merge(1), s4=lambda net: net.low.merge(-1)),
    "a hook": _at(s2=_hooked, s4=_unhook),
    "a hook before": _at(s2=_hooked_before, s4=_unhook),
    "a hook of a gradient": _at(s2=_hooked_gradient, s4=_unhook),
    "parametrized": _at(
        s2=lambda net: parametrizations.weight_norm(net.last),
        s4=lambda net: parametrize.remove_parametrizations(net.last, "weight"),
    ),
    "averaged": _averaged,
    "a state loaded": _at(s3=lambda net: net.load_state_dict(Net().state_dict())),
    "a state assigned": _at(s3=lambda net: net.load_state_dict(Net().state_dict(), assign=True)),
    "a buffer replaced": _at(s2=lambda net: setattr(net, "mean", torch.full((4,), 3.0))),
    "a buffer registered again": _at(s2=lambda net: net.register_buffer("mean", torch.ones(3, 1))),
    "memory exchanged": _moved,
    "a buffer resized": _grown,
    "memory written": torch.no_grad()(_written_behind),
}


@pytest.mark.parametrize("name", SURGERY)
def test_a_change_of_the_model(name: str) -> None:
    _compare(Net, SURGERY[name])

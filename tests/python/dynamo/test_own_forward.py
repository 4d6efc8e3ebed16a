"""Self-checks run forward() with stand-ins: the module gets its own parameters back."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")


class Twice(nn.Module):
    """A child under two names and in a list, a tied weight, a buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.layers = nn.ModuleList([self.first, nn.Linear(4, 4), self.first])
        self.layers[1].weight = self.first.weight
        self.register_buffer("scale", torch.full((4,), 0.5))
        self.register_buffer("again", self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Every one of them."""
        x = self.second(self.first(x).tanh()) * self.scale
        for layer in self.layers:
            x = layer(x).tanh() + self.again
        return x


def named(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by all their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


@pytest.mark.quick
@pytest.mark.parametrize("grad", [True, False])
def test_parameters_are_the_same_objects(grad: bool) -> None:
    module = Twice()
    before = {name: id(t) for name, t in named(module).items()}
    model = ORTModule(module, strict=True)
    with torch.set_grad_enabled(grad):
        model(torch.randn(2, 4))
    assert model.gradd_stats()["self_checks"] == 1
    assert {name: id(t) for name, t in named(module).items()} == before


def test_training_goes_on() -> None:
    torch.manual_seed(2)
    theirs = Twice()
    ours = copy.deepcopy(theirs)
    model = ORTModule(ours, strict=True)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (ours, theirs)]
    for rows in (3, 1, 3, 5, 2):
        x = torch.randn(rows, 4)
        for called, optimizer in zip((model, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            called(x).square().sum().backward()
            optimizer.step()
    for (name, p), q in zip(named(ours).items(), named(theirs).values(), strict=True):
        torch.testing.assert_close(p, q, msg=name)


ONE = [2.0]


class Asks(nn.Module):
    """Does what it does by the types and identities of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, q: object, k: object, scale: object = None) -> torch.Tensor:
        """Twice for itself, three times for a size, five times for the list that it knows."""
        x = q[0] if isinstance(q, list | tuple) else q
        factor = 2.0 if k is q else 1.0
        factor *= 3.0 if isinstance(k, torch.Size) else 1.0
        return self.fc(x) * factor * (5.0 if scale is ONE else 1.0)


@pytest.mark.quick
@pytest.mark.parametrize("form", ["one list", "two lists", "a size", "sizes", "a known list"])
def test_arguments_are_what_they_were(form: str) -> None:
    if form == "two lists" and torch.__version__ < "2.13":
        pytest.skip("before torch 2.13, TorchDynamo cannot tell whether two lists are one")
    x = torch.randn(3, 4)
    one = [x]
    args = {
        "one list": (one, one),
        "two lists": (one, [x]),
        "a size": (x, x.shape),
        "sizes": ((x, x.shape), x.shape),
        "a known list": (x, x, ONE),
    }[form]
    module = Asks()
    expected = module(*args)
    model = ORTModule(module, strict=True)
    torch.testing.assert_close(model(*args), expected)
    assert model.gradd_stats()["self_checks"] == 1


# ---- forwards that ask which tensors they are given ----


class Known(nn.Module):
    """Keeps what it has been given; its results depend on how much that is."""

    def __init__(self, ask: Callable[[Known, torch.Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.ask = nn.Linear(4, 4), ask
        self.table: dict[Any, float] = {}
        self.kept: list[Any] = []
        self.numbers: set[int] = set()
        self.last: Any = None
        self.weak = weakref.WeakValueDictionary()  # type: ignore[var-annotated]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scaled by what `ask` finds, and by how much there is."""
        return self.fc(x) * self.ask(self, x) * (1.0 + len(self.table) + 3 * len(self.kept))

    def state(self) -> Any:
        """What a call may have changed, without the identities."""
        return list(self.table.values()), len(self.kept), len(self.numbers), len(self.weak)


def _of_key(key: Callable[[Known, torch.Tensor], Any]) -> Callable[[Known, torch.Tensor], float]:
    def ask(s: Known, x: torch.Tensor) -> float:
        if key(s, x) not in s.table:
            s.table[key(s, x)] = len(s.table) + 1.0
        return s.table[key(s, x)]

    return ask


def _with_get(s: Known, x: torch.Tensor) -> float:
    found = s.table.get(x)
    if found is None:
        found = s.table[x] = len(s.table) + 1.0
    return found


def _with_error(s: Known, x: torch.Tensor) -> float:
    try:
        return s.table[id(x)]
    except KeyError:
        s.table[id(x)] = found = len(s.table) + 1.0
        return found


def _in_a_list(s: Known, x: torch.Tensor) -> float:
    if not any(x is y for y in s.kept):
        s.kept.append(x)
    return 1.0


def _in_a_set(s: Known, x: torch.Tensor) -> float:
    if id(x) not in s.numbers:
        s.numbers.add(id(x))
    return 1.0 + len(s.numbers)


def _the_last(s: Known, x: torch.Tensor) -> float:
    if x is not s.last:
        s.last = x
        s.kept.append(0)
    return 1.0


def _the_last_one(s: Known, x: torch.Tensor) -> float:
    if s.last is None or s.last() is not x:
        s.last = weakref.ref(x)
        s.kept.append(0)
    return 1.0


def _weakly(s: Known, x: torch.Tensor) -> float:
    if id(x) not in s.weak:
        s.weak[id(x)] = x
    return 1.0 + len(s.weak)


def _with_a_tag(s: Known, x: torch.Tensor) -> float:
    if not hasattr(x, "tag"):
        x.tag = 2.0  # type: ignore[attr-defined]
        s.kept.append(0)
    return x.tag  # type: ignore[attr-defined]


def _with_a_history(s: Known, x: torch.Tensor) -> float:
    if x.is_leaf:
        s.kept.append(0)
    return 1.0


ASKS: dict[str, Callable[[Known, torch.Tensor], Any]] = {
    "id": _of_key(lambda s, x: id(x)),
    "id and size": _of_key(lambda s, x: (id(x), len(x))),
    "the tensor": _of_key(lambda s, x: x),
    "a tuple with it": _of_key(lambda s, x: (x, 1)),
    "id of a parameter": _of_key(lambda s, x: id(s.fc.weight)),
    "a parameter": _of_key(lambda s, x: s.fc.weight),
    "setdefault": lambda s, x: s.table.setdefault(x, len(s.table) + 1.0),
    "get": _with_get,
    "KeyError": _with_error,
    "a list": _in_a_list,
    "a set": _in_a_set,
    "the last": _the_last,
    "a reference": _the_last_one,
    "weak values": _weakly,
    "an attribute": _with_a_tag,
    "is_leaf": _with_a_history,
}


@pytest.mark.parametrize("name", ASKS)
def test_what_forward_keeps_is_what_it_was_given(name: str) -> None:
    torch.manual_seed(1)
    eager = Known(ASKS[name])
    model = ORTModule(copy.deepcopy(eager))
    values = [torch.randn(3, 4) for _ in range(3)]
    tensors = {m: [x.clone() for x in values] for m in (eager, model)}
    if name == "is_leaf":
        tensors = {m: [x.requires_grad_().mul(1) for x in own] for m, own in tensors.items()}
    for i in (0, 0, 1, 1, 0, 2, 1):
        theirs, ours = (m(own[i]) for m, own in tensors.items())
        torch.testing.assert_close(ours, theirs)
        ours.sum().backward(retain_graph=True)
        assert model.module.state() == eager.state()
    assert model.gradd_stats()["in_torch"] == {}


@pytest.mark.skipif(torch.__version__ < "2.13", reason="this torch does not guard the identity")
def test_what_another_graph_computes_is_no_reference() -> None:
    """With copies `forward()` does what it does with other tensors, for which there is a graph."""
    eager = Known(lambda s, x: 2.0 if x is s.last else 3.0)
    model = ORTModule(copy.deepcopy(eager), strict=True)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for module in (eager, model.module):
        module.last = x
    for given in (y, x, x, y):
        torch.testing.assert_close(model(given), eager(given))
    assert model.gradd_stats()["in_torch"] == {}

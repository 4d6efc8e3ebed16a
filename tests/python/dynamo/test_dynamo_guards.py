"""What is compared before a call beside Dynamo's guards: imports, tensors' class, what counts."""

from __future__ import annotations

import builtins
import contextvars
import copy
import gc
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gradd import ORTModule
from gradd.dynamo.guards import Supplement
from gradd.memory import watch
from helpers import sessions

X = torch.ones(2, 3)
_NAMES = ("gradd_pack", "gradd_pack.part", "gradd_plain")


@pytest.fixture(autouse=True)
def _without_leftovers(monkeypatch: pytest.MonkeyPatch, shared_daemon: Any) -> Iterator[None]:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    monkeypatch.setattr(builtins, "__import__", builtins.__import__)
    for name in _NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in _NAMES:
        sys.modules.pop(name, None)


class Scaled(nn.Module):
    """A layer whose result is multiplied by what a function gives."""

    def __init__(self, take: Callable[[], Any]) -> None:
        super().__init__()
        self.layer, self.take = nn.Linear(3, 2, bias=False), take
        nn.init.ones_(self.layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.take()


def _follow(take: Callable[[], Any], changes: list[Callable[[], Any]]) -> ORTModule:
    """Two calls behind each change, as in PyTorch."""
    ours, eager = ORTModule(Scaled(take)), Scaled(take)
    for change in changes:
        change()
        for _ in range(2):
            assert ours(X).tolist() == eager(X).tolist()
    return ours


# ---- modules that forward() imports ----


def _put(name: str, **values: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(values)
    sys.modules[name] = module
    return module


def _world(value: float) -> None:
    package = _put("gradd_pack", k=value, __path__=[])
    package.part = _put("gradd_pack.part", k=value * 2)
    _put("gradd_plain", k=value * 3)


def _statement() -> float:
    import gradd_plain

    return gradd_plain.k


def _dotted() -> float:
    import gradd_pack.part

    return gradd_pack.part.k


def _submodule() -> float:
    from gradd_pack import part

    return part.k


def _optional() -> float:
    try:
        import gradd_plain
    except ImportError:
        return 1.0
    return gradd_plain.k


IMPORTS: dict[str, Callable[[], float]] = {
    "import": _statement,
    "import with dots": _dotted,
    "from import": _submodule,
    "import that may fail": _optional,
    "import_module": lambda: importlib.import_module("gradd_plain").k,
    "import_module, relative": lambda: importlib.import_module(".part", "gradd_pack").k,
    "__import__": lambda: __import__("gradd_plain").k,
    "sys.modules": lambda: 1.0 + ("gradd_plain" in sys.modules),
}


@pytest.mark.parametrize("name", IMPORTS)
def test_another_module_under_the_same_name_is_seen(name: str) -> None:
    _follow(IMPORTS[name], [lambda v=v: _world(v) for v in (1.0, 2.0, 5.0)])


def test_a_module_that_appears_and_goes() -> None:
    _follow(_optional, [lambda: None, lambda: _world(2.0), lambda: sys.modules.pop("gradd_plain")])


def test_an_import_of_the_users_own() -> None:
    plain = builtins.__import__

    def replaced(name: str, *args: Any, **kwargs: Any) -> Any:
        other = types.SimpleNamespace(k=7.0)
        return other if name == "gradd_plain" else plain(name, *args, **kwargs)

    def replace(function: Callable) -> Callable[[], None]:
        return lambda: setattr(builtins, "__import__", function)

    _follow(_statement, [lambda: _world(1.0), replace(replaced), replace(plain)])


# ---- what is, and what is no, change ----


class Counted:
    count, value = 0, 2.0

    def give(self) -> float:
        return self.value


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def _state() -> tuple[Counted, Supplement, type]:
    kind = type("Kind", (Counted,), {"other": lambda self: 1.0})
    found = kind()
    return found, Supplement([Scaled(lambda: found.give() + torch.ones(1).gradd_late)]), kind


@pytest.fixture
def watched() -> Iterator[None]:
    """Attributes of torch.Tensor stay watched: the last model of other tests may go at any time."""
    watch.add(1, 1)
    yield
    watch.remove(1)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("times", [1, 3])
def test_data_and_strangers_are_no_change(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, state, kind = _state()
    for step in range(times):
        kind.count = step
        kind.unread = step
        monkeypatch.setitem(sys.modules, f"gradd_stranger{step}", types.ModuleType("m"))
        monkeypatch.setattr(torch, "gradd_unread", step, raising=False)
        assert state.holds()


@pytest.mark.parametrize("name", ["give", "value", "__getattr__", "other"])
def test_a_function_or_a_name_that_is_read_is_a_change(name: str) -> None:
    _, state, kind = _state()
    setattr(kind, name, lambda *_: 7.0)
    assert not state.holds()
    assert not state.holds()
    assert state.changed() == f"{kind.__qualname__}.{name}"


@pytest.mark.usefixtures("watched")
def test_other_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, value in (
        (torch.Tensor, "gradd_late", 3.0),
        (nn.functional, "relu", lambda x: x),
        (torch, "relu", lambda x: x),
        (nn.Module, "__call__", lambda *_: 1),
    ):
        _, state, _ = _state()
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value, raising=False)
            assert not state.holds(), name
        if name != "gradd_late":
            assert state.holds(), name
    _, state, _ = _state()
    monkeypatch.setitem(os.environ, "GRADD_UNREAD", "1")
    assert not state.holds()
    assert state.changed() == "the environment variable GRADD_UNREAD"


def test_data_of_the_class_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "gradd_late", 2.0, raising=False)
    seven = _set(torch.Tensor, "gradd_late", 7.0)
    _follow(lambda: torch.ones(1).gradd_late, [lambda: None, seven])


def test_a_proxy_is_not_asked_for_its_class() -> None:
    class Proxy:
        asked = 0

        @property
        def __class__(self) -> type:
            Proxy.asked += 1
            return type(self)

    held = Proxy()
    Supplement([Scaled(lambda: held)])
    assert Proxy.asked == 0


# ---- graphs of views alone, and numbers of tensors ----


def test_a_graph_of_nothing_but_a_view() -> None:
    kept: contextvars.ContextVar = contextvars.ContextVar("kept")

    def keep(y: torch.Tensor) -> float:
        kept.set(y.detach())
        return 1.0

    class Keeps(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return y * self.take(y)

    eager = Keeps(keep)
    ours = ORTModule(copy.copy(eager))
    for step in range(3):
        expected = eager(X * step)
        torch.testing.assert_close(ours(X * step), expected)
        assert type(kept.get()) is torch.Tensor
        torch.testing.assert_close(kept.get(), expected.detach())
        kept.set(None)


class Versions(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (2.0 if self.layer.weight._version > self.take() else 3.0)


def test_the_version_of_a_parameter() -> None:
    ours = ORTModule(Versions(lambda: 2))
    assert ours(X).tolist() == [[9.0, 9.0], [9.0, 9.0]]
    with torch.no_grad():
        ours.layer.weight.add_(1.0).sub_(1.0)
    assert ours(X).tolist() == [[6.0, 6.0], [6.0, 6.0]]
    assert not ours.gradd_stats()["fallbacks"]  # the comparison runs in PyTorch


# ---- code that no module holds ----

_CODE = """
from torch import nn
K = [2.0]
def scale(): return K[0]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 2)
    def forward(self, x):
        return self.lin(x) * scale()
"""


def test_a_network_of_code_that_was_executed() -> None:
    names: dict[str, Any] = {"__name__": __name__}
    exec(_CODE, names)
    eager = names["Net"]()
    ours = ORTModule(copy.deepcopy(eager), strict=True)
    for value in (2.0, 5.0):
        names["K"][0] = value
        ours(X).sum().backward()
        torch.testing.assert_close(ours(X), eager(X))
    assert ours.gradd_stats()["graphs"] <= 2
    before = len(sessions.session().unreleased_runs())
    result = ours(X)
    del ours, eager, names, result
    gc.collect()
    sessions.session().flush()
    assert len(sessions.session().unreleased_runs()) <= before


# ---- the environment ----


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * float(os.environ.get("FACTOR_OF_A_TEST", "1"))


def test_a_variable_that_a_script_sets_in_every_step(monkeypatch: Any) -> None:
    model = ORTModule(Reads(), strict=True)
    for step in range(12):
        monkeypatch.setenv("STEP_OF_A_TEST", str(step))
        model(X)
    assert len(model._gradd_compiled._versions) <= 5
    one = model(X)
    for factor in (2.0, 3.0, 4.0, 5.0, 6.0):
        monkeypatch.setenv("FACTOR_OF_A_TEST", str(factor))
        torch.testing.assert_close(model(X), factor * one)

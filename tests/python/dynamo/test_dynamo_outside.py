"""What a forward reads outside of its arguments: as in PyTorch, or stale as under torch.compile."""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradd import ORTModule

X = torch.linspace(-1, 1, 8).reshape(2, 4)
Pair = tuple[Callable[[], Any], Callable[[], Any]]


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch, shared_daemon: Any) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")


class Scaled(nn.Module):
    """A layer whose result is multiplied by what it asks for."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__()
        self.lin, self.ask = nn.Linear(4, 3), ask
        nn.init.ones_(self.lin.weight)
        nn.init.ones_(self.lin.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.ask()


def _kind(*bases: type, meta: type = type, **names: Any) -> Any:
    return meta("Kind", bases, names)


def _sets(owner: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: setattr(owner, name, value)


def _special(name: str, ask: Callable, before: Any, after: Any) -> Callable[[], Pair]:
    def make() -> Pair:
        kind = _kind(**{name: lambda *_: before})
        found = kind()
        return lambda: ask(found), _sets(kind, name, lambda *_: after)

    return make


def _method_of_base() -> Pair:
    base = _kind(value=lambda _: 2.0)
    found = _kind(base)()
    return lambda: found.value(), _sets(base, "value", lambda _: 7.0)


def _method_between() -> Pair:
    class Top:
        def value(self) -> float:
            return 2.0

    class Middle(Top):
        pass

    class Bottom(Middle):
        def value(self) -> float:
            return super().value()

    found = Bottom()
    return lambda: found.value(), _sets(Middle, "value", lambda _: 7.0)


def _instance_check() -> Pair:
    meta = _kind(type)
    kind = _kind(meta=meta)
    return lambda: 1.0 + isinstance(3, kind), _sets(meta, "__instancecheck__", lambda *_: True)


def _bases() -> Pair:
    first, second = _kind(_kind(), value=lambda _: 2.0), _kind(_kind(), value=lambda _: 7.0)
    kind = _kind(first)
    found = kind()
    return lambda: found.value(), _sets(kind, "__bases__", (second,))


def _in_a_list() -> Pair:
    kind = _kind(value=lambda _: 2.0)
    held = [{"a": kind()}]
    return lambda: held[0]["a"].value(), _sets(kind, "value", lambda _: 7.0)


def _property() -> Pair:
    kind = _kind(value=property(lambda _: 2.0))
    found = kind()
    return lambda: found.value, _sets(kind, "value", property(lambda _: 7.0))


def _class_of_a_module() -> Pair:
    kind = _kind(nn.Module)
    found = kind()
    found.value = 2.0
    return lambda: found.value, _sets(kind, "value", property(lambda _: 7.0))


def _type_of_autocast() -> Pair:
    def ask() -> float:
        return 2.0 if torch.get_autocast_dtype("cpu") is torch.bfloat16 else 7.0

    return ask, lambda: torch.set_autocast_dtype("cpu", torch.float16)


def _metaclass() -> Pair:
    meta = _kind(type)
    kind = _kind(meta=meta, value=2.0)
    return lambda: kind.value, _sets(meta, "__getattribute__", lambda *_: 7.0)


def _closure() -> Pair:
    value = 2.0

    def change() -> None:
        nonlocal value
        value = 7.0

    return lambda: value, change


SEEN: dict[str, Callable[[], Pair]] = {
    "a method of a base": _method_of_base,
    "a method between": _method_between,
    "other bases": _bases,
    "a method of what a list holds": _in_a_list,
    "a property": _property,
    "a property of a module": _class_of_a_module,
    "a closure": _closure,
    "behind a metaclass": _metaclass,
    "__len__": _special("__len__", lambda o: float(len(o)), 2, 7),
    "__float__": _special("__float__", float, 2.0, 7.0),
    "__bool__": _special("__bool__", lambda o: 2.0 if o else 7.0, True, False),
    "__getitem__": _special("__getitem__", lambda o: o[0], 2.0, 7.0),
    "__contains__": _special("__contains__", lambda o: 1.0 + (1 in o), False, True),
    "the type of autocast": _type_of_autocast,
}


def _values(wrap: Callable[[nn.Module], Any], make: Callable[[], Pair]) -> list[list]:
    """Results and gradients of two calls before a change and two after it."""
    ask, change = make()
    net = Scaled(ask)
    ours, found = wrap(net), []
    before = torch.get_autocast_dtype("cpu")
    try:
        for step in range(4):
            if step == 2:
                change()
            net.zero_grad()
            result = ours(X)
            result.square().sum().backward()
            found.append([result.tolist(), net.lin.weight.grad.tolist()])
    finally:
        torch.set_autocast_dtype("cpu", before)
    return found


def _close(a: list, b: list) -> bool:
    return all(
        torch.allclose(torch.tensor(x), torch.tensor(y), rtol=1e-4)
        for mine, right in zip(a, b, strict=True)
        for x, y in zip(mine, right, strict=True)
    )


@pytest.mark.parametrize("name", SEEN)
def test_a_change_is_seen(name: str) -> None:
    expected = _values(lambda net: net, SEEN[name])
    assert not _close(expected[1:2], expected[2:3])
    assert _close(_values(ORTModule, SEEN[name]), expected)


@pytest.mark.parametrize("early", [True, False])
def test_hooks_of_all_modules(early: bool) -> None:
    eager = Scaled(lambda: 1.0)
    ours = ORTModule(copy.deepcopy(eager))
    if not early:
        torch.testing.assert_close(ours(X), eager(X))
    register = nn.modules.module.register_module_forward_hook
    hook = register(lambda module, _, out: out * 3 if isinstance(module, nn.Linear) else out)
    try:
        torch.testing.assert_close(ours(X), eager(X))
    finally:
        hook.remove()
    torch.testing.assert_close(ours(X), eager(X))


# ---- what stays as it was, as under torch.compile ----


def _sign_of_zero() -> Pair:
    kept = [0.0]
    return (
        lambda: 2.0 if str(kept[0]).startswith("-") else 3.0,
        lambda: kept.__setitem__(0, -0.0),
    )


def _order() -> Pair:
    kept = collections.OrderedDict(a=2.0, b=7.0)
    return lambda: next(iter(kept.values())), lambda: kept.move_to_end("a")


def _behind_getattr() -> Pair:
    found = _kind(__getattr__=lambda _, name: 2.0)()
    return lambda: found.value, _sets(found, "value", 7.0)


def _absent_key() -> Pair:
    held = nn.Module()
    return lambda: held.__dict__.get("value", 2.0), _sets(held, "value", 7.0)


def _kept_by_a_cache() -> Pair:
    @functools.lru_cache
    def cached() -> torch.Tensor:
        return torch.full((1,), 2.0)

    return cached, lambda: cached().mul_(3)


KNOWN: dict[str, Callable[[], Pair]] = {
    "a metaclass that answers isinstance()": _instance_check,
    "the sign of zero": _sign_of_zero,
    "the order of an OrderedDict": _order,
    "an attribute that __getattr__ gave before": _behind_getattr,
    "a key that the dictionary of a module had not": _absent_key,
    "what a function under lru_cache has kept": _kept_by_a_cache,
}


@pytest.mark.parametrize("name", KNOWN)
def test_torch_compile_does_not_see_it_either(name: str) -> None:
    expected = _values(lambda net: net, KNOWN[name])
    torch.compiler.reset()
    compiled = _values(lambda net: torch.compile(net, backend="eager"), KNOWN[name])
    assert not _close(compiled, expected)
    assert _close(_values(ORTModule, KNOWN[name]), compiled)

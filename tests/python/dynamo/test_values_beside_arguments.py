"""Values that a forward reads beside its arguments: as in PyTorch, or stale as in torch.compile."""

from __future__ import annotations

import abc
import collections
import copy
import dataclasses
import functools
import operator
import random
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gradd import ORTModule
from helpers import ROOT
from helpers.nets import assert_close

X = torch.linspace(-1, 1, 8).reshape(2, 4)
Pair = tuple[Callable[[], Any], Callable[[], Any]]


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch, shared_daemon: Any) -> Iterator[None]:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    yield
    globals().pop("abs", None)


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


def _late(make: Callable[[], Any], ask: Callable[[Any], Any], put: Callable) -> Callable[[], Pair]:
    """What is asked for is not there at first."""

    def pair() -> Pair:
        held = make()
        return lambda: ask(held), lambda: put(held, "value", 7.0)

    return pair


def _late_attribute(held: Any) -> float:
    try:
        return held.value
    except AttributeError:
        return 2.0


def _late_key(held: Any) -> float:
    try:
        return held["value"]
    except KeyError:
        return 2.0


def _kept_in_dictionary(held: Any) -> float:
    if "value" not in held.__dict__:
        held.value = 2.0
    return held.value


def _over_a_builtin() -> Pair:
    names = globals()
    names.pop("abs", None)
    return lambda: float(abs(-2.0)), lambda: names.update(abs=lambda _: 7.0)


def _another_class() -> Pair:
    held = _kind(value=lambda _: 2.0)()
    return lambda: held.value(), _sets(held, "__class__", _kind(value=lambda _: 7.0))


def _random_of_the_users() -> Pair:
    drawn = random.Random(3)
    return lambda: drawn.random(), lambda: drawn.seed(9)


_put_key = operator.setitem
LATE: dict[str, Callable[[], Pair]] = {
    "an attribute of an object": _late(types.SimpleNamespace, _late_attribute, setattr),
    "an attribute of a module": _late(nn.Module, _late_attribute, setattr),
    "a buffer": _late(
        nn.Module,
        _late_attribute,
        lambda held, name, value: held.register_buffer(name, torch.tensor(value)),
    ),
    "a key": _late(dict, _late_key, _put_key),
    "a key of a ChainMap": _late(
        lambda: collections.ChainMap({}, {"value": 2.0}), operator.itemgetter("value"), _put_key
    ),
    "a name in __dict__": _late(nn.Module, lambda held: held.__dict__.get("value", 2.0), setattr),
    "a name in vars()": _late(
        types.SimpleNamespace, lambda held: vars(held).get("value", 2.0), setattr
    ),
    "what is kept in __dict__": _late(types.SimpleNamespace, _kept_in_dictionary, setattr),
}
SEEN: dict[str, Callable[[], Pair]] = {
    "a method of a base": _method_of_base,
    "a method between": _method_between,
    "other bases": _bases,
    "a method of what a list holds": _in_a_list,
    "a property": _property,
    "a property of a module": _class_of_a_module,
    "a closure": _closure,
    "behind a metaclass": _metaclass,
    "a global over a builtin": _over_a_builtin,
    "another class of an object": _another_class,
    "a generator of random numbers": _random_of_the_users,
    **LATE,
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


def _identity() -> Pair:
    kept = ["".join("ab")]
    one = kept[0]
    return lambda: 2.0 if kept[0] is one else 7.0, lambda: kept.__setitem__(0, "".join("ab"))


def _registered() -> Pair:
    base, kind = _kind(meta=abc.ABCMeta), _kind()
    found = kind()
    return lambda: 7.0 if isinstance(found, base) else 2.0, lambda: base.register(kind)


def _order() -> Pair:
    kept = collections.OrderedDict(a=2.0, b=7.0)
    return lambda: next(iter(kept.values())), lambda: kept.move_to_end("a")


def _behind_getattr() -> Pair:
    found = _kind(__getattr__=lambda _, name: 2.0)()
    return lambda: found.value, _sets(found, "value", 7.0)


def _kept_by_a_cache() -> Pair:
    @functools.lru_cache
    def cached() -> torch.Tensor:
        return torch.full((1,), 2.0)

    return cached, lambda: cached().mul_(3)


def _called_back() -> Pair:
    kept = [2.0]

    def replaced(match: re.Match) -> str:
        return str(kept[0])

    return lambda: float(re.sub("a", replaced, "a")), lambda: kept.__setitem__(0, 7.0)


def _as_text() -> Pair:
    held = types.SimpleNamespace(value=2.0)
    return lambda: 2.0 if "2.0" in str(held) else 7.0, _sets(held, "value", 7.0)


def _dataclass_as_text() -> Pair:
    kind = dataclasses.make_dataclass("Kind", [("value", float)])
    held = kind(2.0)
    return lambda: 2.0 if "2.0" in str(held) else 7.0, _sets(held, "value", 7.0)


def _bytes() -> Pair:
    kept, other = bytearray(b"a"), bytearray(b"a")
    return lambda: 2.0 if kept == other else 7.0, lambda: kept.extend(b"x")


def _view_of_bytes() -> Pair:
    kept = bytearray(b"a")
    seen = memoryview(kept)
    return lambda: 2.0 if seen == b"a" else 7.0, lambda: kept.__setitem__(0, 7)


def _object_in_a_set() -> Pair:
    one, other = object(), object()
    kept, held = {one}, [other]
    return lambda: 7.0 if held[0] in kept else 2.0, lambda: held.__setitem__(0, one)


def _equal_in_a_set() -> Pair:
    kind = _kind(__hash__=lambda _: 1, __eq__=lambda a, b: a.value == b.value)
    one, held, other = kind(), kind(), kind()
    one.value, held.value, other.value = 1, 2, 2
    kept = {one}
    return lambda: 7.0 if held in kept else 2.0, lambda: kept.add(other)


def _keeps_its_gradient() -> Pair:
    kept = torch.ones(1, requires_grad=True) * 2
    return lambda: 7.0 if kept.retains_grad else 2.0, kept.retain_grad


def _hook_of_a_tensor() -> Pair:
    kept = torch.ones(1, requires_grad=True)
    return (
        lambda: 7.0 if kept._backward_hooks else 2.0,
        lambda: kept.register_hook(lambda gradient: gradient),
    )


def _window() -> Pair:
    kept: collections.deque = collections.deque([1.0], maxlen=2)

    def ask() -> float:
        kept.append(kept[-1] + 1.0)
        return sum(kept)

    return ask, lambda: kept.append(7.0)


def _full_window() -> Pair:
    kept = collections.deque([2.0], maxlen=2)
    return lambda: 7.0 if len(kept) == kept.maxlen else 2.0, lambda: kept.append(3.0)


def _size_that_is_drawn() -> Pair:
    drawn = random.Random(3)
    return lambda: torch.ones(drawn.randint(2, 9)).sum(), lambda: drawn.seed(9)


# Kinds, and programs of each.
KNOWN: dict[str, list[Callable[[], Pair]]] = {
    "the result of isinstance()": [_instance_check, _registered],
    "a difference between equal values": [_sign_of_zero, _identity],
    "the order of an OrderedDict": [_order],
    "an attribute that __getattr__ supplied before": [_behind_getattr],
    "values that a function under lru_cache keeps": [_kept_by_a_cache],
    "state that a C function reads": [
        *(_called_back, _as_text, _dataclass_as_text, _bytes, _view_of_bytes)
    ],
    "the members of a set": [_object_in_a_set, _equal_in_a_set],
    "hooks and retains_grad of a tensor": [_keeps_its_gradient, _hook_of_a_tensor],
    "a deque with maxlen": [_window, _full_window],
    "sizes drawn from a generator of the user's": [_size_that_is_drawn],
}
ALL_KNOWN = [(kind, make) for kind, programs in KNOWN.items() for make in programs]


@pytest.mark.parametrize(
    ("kind", "make"), ALL_KNOWN, ids=[f"{k}{m.__name__}" for k, m in ALL_KNOWN]
)
def test_torch_compile_does_not_see_it_either(kind: str, make: Callable[[], Pair]) -> None:
    expected = _values(lambda net: net, make)
    torch.compiler.reset()
    compiled = _values(lambda net: torch.compile(net, backend="eager"), make)
    assert torch.__version__[:4] != "2.13" or not _close(compiled, expected)
    assert _close(_values(ORTModule, make), compiled)


def test_the_kinds_are_in_the_documentation() -> None:
    text = (ROOT / "docs/dynamo.md").read_text()
    assert len(KNOWN) <= 10
    assert [kind for kind in KNOWN if f"* {kind}" not in text] == []


# Numbers of a list that change, which `in` compares.
Y = torch.linspace(-1, 1, 12).reshape(3, 4)


class Layers(nn.Module):
    """Runs chosen layers, and counts calls: a self-check cannot run this forward again."""

    def __init__(self, ask: Callable[[int, Any], bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, 2)
        self.ask, self.calls, self.held = ask, 0, [0]

    def forward(self, x: torch.Tensor, chosen: Any) -> torch.Tensor:
        self.calls += 1
        for i, layer in enumerate(self.layers):
            if self.ask(i, self.held if chosen is None else chosen):
                x = layer(x)
        return self.last(x)


def _agrees(ask: Callable[[int, Any], bool], calls: list[Any], x: torch.Tensor = Y) -> ORTModule:
    plain, net = Layers(ask), ORTModule(Layers(ask))
    for chosen in calls:
        expected, found = plain(x, chosen), net(x, chosen)
        assert_close(found, expected)
        found.sum().backward()
        expected.sum().backward()
        for one, other in zip(net.parameters(), plain.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                assert_close(one.grad, other.grad)
        plain.zero_grad()
        net.zero_grad()
    assert net.gradd_stats()["in_torch"] == {}
    return net


@pytest.mark.slow
def test_layers_chosen_by_a_list() -> None:
    _agrees(lambda i, chosen: i in chosen, [[2], [0, 2], [1, 2], [0, 1]])


def _pairs(i: int, chosen: Any) -> bool:
    return (i, 1) in [(k, 1) for k in chosen]


@pytest.mark.parametrize(
    ("ask", "kind"),
    [
        (lambda i, chosen: i not in chosen, tuple),
        (lambda i, chosen: i in chosen, collections.deque),
        (lambda i, chosen: i / 2 in chosen, list),
        (lambda i, chosen: bool(i) in (chosen[0], 7), list),
        (_pairs, list),
    ],
)
def test_other_ways_to_ask(ask: Callable[[int, Any], bool], kind: Callable) -> None:
    _agrees(ask, [kind(k) for k in ([2], [1], [0], [0, 1], [2, 1])])


def test_a_list_that_the_module_holds() -> None:
    plain = Layers(lambda i, chosen: i in chosen)
    net = ORTModule(copy.deepcopy(plain))
    for held in (2, 1, 0, 2):
        plain.held[0] = net.module.held[0] = held
        assert_close(net(X, None), plain(X, None))


def test_floats_and_sizes() -> None:
    _agrees(lambda i, chosen: i + 0.5 in chosen, [[2.5], [0.5], [1.5]])
    _agrees(
        lambda i, chosen: i + 3 in chosen.shape, [Y, Y[:2], Y.repeat(2, 1)[:5], torch.cat([Y, Y])]
    )


def test_numbers_that_are_not_asked_for_cost_no_capture() -> None:
    def ask(i: int, chosen: Any) -> bool:
        return "a" in chosen or i in chosen[:1]

    net = _agrees(ask, [[1, n] for n in (3, 4, 5, 6)] + [[n, 3] for n in (5, 6, 7, 8)])
    # One for each answer, one as the number begins to change.
    assert net.gradd_stats()["captures"] <= 4


class Doubled(nn.Module):
    """Asks by a function."""

    def __init__(self, contains: Callable[[Any, int], bool]) -> None:
        super().__init__()
        self.layer, self.contains = nn.Linear(4, 4), contains

    def forward(self, x: torch.Tensor, chosen: Any) -> torch.Tensor:
        return self.layer(x) * (2 if self.contains(chosen, 5) else 3)


@pytest.mark.parametrize("contains", [operator.contains, lambda chosen, i: chosen.__contains__(i)])
def test_calls_of_contains_are_as_in_torch_compile(contains: Callable) -> None:
    torch.compiler.reset()
    plain = Doubled(contains)
    compiled, net = (f(copy.deepcopy(plain)) for f in (_compiled, ORTModule))
    for chosen in ([2], [3]):
        for m in (compiled, net):
            assert_close(m(X, chosen), plain(X, chosen))
    if torch.__version__ < "2.14":
        assert not torch.allclose(compiled(X, [5]), plain(X, [5]))
    assert_close(net(X, [5]), compiled(X, [5]))
    assert "`operator.contains()`" in (ROOT / "docs/dynamo.md").read_text()


def _compiled(net: nn.Module) -> Any:
    return torch.compile(net, backend="eager")

"""State that nobody can put back, written or used up in forward(): as in PyTorch, and by name.

A capture tries the forward once. An iterator, a generator of random numbers or a file must not
notice; whatever refuses the capture has to do it before it happens.
"""

from __future__ import annotations

import array
import collections
import copy
import functools
import io
import itertools
import queue
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")


class Case(nn.Module):
    """A layer whose result is scaled with what comes out of a hidden state."""

    def __init__(self, make: Callable[[], Any], take: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.layer.weight)
        self.state, self.take = make(), take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.take(self.state)


class Holder:
    """An object of a user's class that holds such a state."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _loop(it: Any) -> int:
    for value in it:
        return value
    return 0


def _squares() -> Any:
    for i in itertools.count(1):
        yield i * i


def _echo() -> Any:
    got = 0
    while True:
        got = 1 + (yield got)


def _then(first: Callable, second: Callable) -> Callable:
    def take(state: Any) -> Any:
        first(state)
        return second(state)

    return take


def _add(view: Callable) -> Callable:
    """Writes through an array over a tensor's memory."""

    def take(tensor: torch.Tensor) -> Any:
        view(tensor).__iadd__(1)
        return tensor[0]

    return take


def _started(generator: Any) -> Any:
    next(generator)
    return generator


def _seeded(draw: Callable) -> Callable:
    def take(_: Any) -> Any:
        torch.manual_seed(4)
        return draw()

    return take


def _forked(_: Any) -> torch.Tensor:
    with torch.random.fork_rng():
        return torch.rand(1) * 0 + torch.rand(1)


def _replayed(_: Any) -> torch.Tensor:
    state = torch.get_rng_state()
    first = torch.rand(1)
    torch.set_rng_state(state)
    return 1 + first - torch.rand(1)


ITERATORS = {
    "count": (lambda: itertools.count(1), next),
    "cycle": (lambda: itertools.cycle([1, 2, 3]), next),
    "chain": (lambda: itertools.chain(range(1, 9), range(9)), next),
    "a list's": (lambda: iter([1.0, 2.0, 3.0, 4.0, 5.0]), next),
    "reversed range": (lambda: reversed(range(9)), next),
    "looped range": (lambda: iter(range(1, 9)), _loop),
    "reversed": (lambda: reversed([1.0, 2.0, 3.0, 4.0, 5.0]), next),
    "zip": (lambda: zip([1, 2, 3, 4, 5], [5, 4, 3, 2, 1], strict=True), lambda s: next(s)[1]),
    "map": (lambda: map(float, range(9)), next),
    "filter": (lambda: filter(None, range(9)), next),
    "enumerate": (lambda: enumerate("abcdefgh"), lambda s: next(s)[0]),
    "generator": (_squares, next),
    "sent to": (lambda: _started(_echo()), lambda s: s.send(3)),
    "generator expression": (lambda: (i * 2 for i in range(1, 9)), next),
    "in a loop": (_squares, _loop),
    "unpacked": (
        lambda: iter([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        lambda s: [*itertools.islice(s, 2)][1],
    ),
    "its method": (lambda: itertools.count(1), lambda s: s.__next__()),
    "in an object": (lambda: Holder(itertools.count(1)), lambda s: next(s.value)),
    "in a dict": (lambda: {"a": [itertools.count(1)]}, lambda s: next(s["a"][0])),
    "of a function": (lambda: iter(itertools.count(1).__next__, 7), next),
    "lines": (lambda: io.StringIO("1\n2\n3\n4\n5\n6\n7"), lambda s: float(s.readline())),
}
RANDOM = {
    "torch generator": (
        lambda: torch.Generator().manual_seed(3),
        lambda s: torch.rand(1, generator=s),
    ),
    "torch generator in place": (
        lambda: torch.Generator().manual_seed(3),
        lambda s: torch.empty(1).normal_(generator=s),
    ),
    "torch generator's value": (
        lambda: torch.Generator().manual_seed(3),
        lambda s: torch.rand((), generator=s).item(),
    ),
    "random.Random": (lambda: Holder(random.Random(0)), lambda s: s.value.random()),
    "random.Random, uniform": (lambda: [random.Random(0)], lambda s: s[0].uniform(1, 2)),
    "numpy generator": (lambda: {"r": np.random.default_rng(0)}, lambda s: s["r"].random()),
    "numpy RandomState": (lambda: Holder(np.random.RandomState(0)), lambda s: s.value.rand()),
    "manual_seed": (lambda: None, _seeded(lambda: torch.rand(1))),
    "seeded dropout": (
        lambda: None,
        _seeded(lambda: nn.functional.dropout(torch.ones(8), 0.5).sum()),
    ),
    "fork_rng": (lambda: None, _forked),
    "replayed": (lambda: None, _replayed),
}
CONTAINERS = {
    "list.reverse": (lambda: [1, 2], _then(list.reverse, lambda s: s[0])),
    "list rotated": (lambda: [1, 2, 3], _then(lambda s: s.insert(0, s.pop()), lambda s: s[0])),
    "deque.rotate": (
        lambda: collections.deque([1, 2, 3, 4]),
        _then(lambda s: s.rotate(1), lambda s: s[0]),
    ),
    "set.pop": (lambda: {1, 2, 3, 4, 5, 6, 7}, lambda s: s.pop()),
    "Counter.update": (collections.Counter, _then(lambda s: s.update("a"), lambda s: s["a"])),
    "dict.update": (lambda: {"n": 1}, _then(lambda s: s.update(n=s["n"] + 1), lambda s: s["n"])),
    "OrderedDict": (
        lambda: collections.OrderedDict(a=1, b=2, c=3),
        _then(lambda s: s.move_to_end(next(iter(s))), lambda s: next(iter(s.values()))),
    ),
    "bytearray": (lambda: bytearray([1]), _then(lambda s: s.append(2), len)),
    "bytearray, one element": (
        lambda: bytearray([1]),
        _then(lambda s: s.__setitem__(0, s[0] + 1), lambda s: s[0]),
    ),
    "array": (lambda: array.array("i", [1]), _then(lambda s: s.append(2), len)),
    "queue": (
        lambda: [q := queue.Queue(), [q.put(i) for i in range(9)]][0],
        lambda s: s.get() + 1,
    ),
    "SimpleQueue": (
        lambda: [q := queue.SimpleQueue(), [q.put(i) for i in range(9)]][0],
        lambda s: s.get() + 1,
    ),
    "file": (io.StringIO, _then(lambda s: s.write("a"), lambda s: len(s.getvalue()))),
    "print to a file": (
        io.StringIO,
        _then(lambda s: print("a", file=s), lambda s: len(s.getvalue())),
    ),
    "numpy view": (lambda: torch.zeros(3), _add(lambda t: t.numpy())),
    "numpy view of a parameter": (
        lambda: nn.Parameter(torch.zeros(3)),
        _add(lambda t: t.detach().numpy()),
    ),
    "data assigned": (
        lambda: nn.Parameter(torch.ones(1), requires_grad=False),
        _then(lambda t: setattr(t, "data", t.data * 0.5), lambda t: t),
    ),
}


def outputs(module: nn.Module, draw: Callable[[], Any]) -> list[float]:
    """Training, evaluation and training again; another shape in between."""
    x, found = torch.tensor([[0.5, 0.5]]), []
    torch.manual_seed(0)
    for training, rows in ((True, 1), (True, 1), (False, 1), (True, 2), (True, 1)):
        module.train(training)
        with torch.set_grad_enabled(training):
            found.append(float(module(x.repeat(rows, 1)).detach().sum() / rows))
        found.append(draw())
    return found


@pytest.mark.parametrize("case", (ITERATORS | RANDOM | CONTAINERS).values(),
                         ids=ITERATORS | RANDOM | CONTAINERS)  # fmt: skip
def test_a_capture_that_is_refused_leaves_no_trace(case: tuple) -> None:
    draws = "rng" in str(case) or case in RANDOM.values()
    draw = (lambda: float(torch.rand(1))) if draws else float
    wrapped = ORTModule(Case(*case))
    assert outputs(wrapped, draw) == outputs(Case(*case), draw)
    assert sum(wrapped.gradd_stats()["fallbacks"].values()) == 5


# ---- what a forward makes for itself is no state of outside ----

LOCAL = {
    "iterator": lambda _: next(iter([2, 3])),
    "generator": lambda _: sum(i for i in range(3)),
    "zip": lambda _: sum(a * b for a, b in zip([1, 2], [3, 4], strict=True)),
    "set.pop": lambda _: {5}.pop(),
    "list.reverse": lambda _: (v := [1, 2], v.reverse(), v[0])[-1],
    "parameters": lambda s: next(p for p in s.parameters()).sum(),
}


@pytest.mark.parametrize("take", LOCAL.values(), ids=LOCAL)
def test_what_the_call_makes_may_be_used_up(take: Callable) -> None:
    case = (lambda: nn.Linear(2, 1), take)
    torch.manual_seed(0)
    plain = Case(*case)
    torch.manual_seed(0)
    wrapped = ORTModule(Case(*case), strict=True)
    assert outputs(wrapped, float) == pytest.approx(outputs(plain, float))


# ---- memos ----


def _memo_module(memo: dict) -> nn.Module:
    class Memo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if "w" not in memo:
                memo["w"] = self.layer.weight.tril()
            return x @ memo["w"]

    torch.manual_seed(0)
    return Memo()


@pytest.mark.parametrize("check", ["0", "first"])
def test_a_memo_of_a_weight_keeps_its_gradient(monkeypatch, check: str) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", check)
    memos: list[dict] = [{}, {}]
    plain, wrapped = _memo_module(memos[0]), ORTModule(_memo_module(memos[1]))
    for step in range(3):
        for memo, module in zip(memos, (plain, wrapped), strict=True):
            memo.clear()
            module.zero_grad()
            x = torch.full((2, 3), 1.0 + step)
            (module(x) + module(x * 2)).square().sum().backward()
        torch.testing.assert_close(wrapped.layer.weight.grad, plain.layer.weight.grad)


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


@pytest.mark.parametrize("check", ["0", "first"])
def test_cached_parametrizations_keep_their_gradient(monkeypatch, check: str) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", check)
    grads = []
    for wrap in (lambda m: m, ORTModule):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3))
        parametrize.register_parametrization(net[0], "weight", Symmetric())
        module, x = wrap(net), torch.ones(2, 3)
        with parametrize.cached():
            (module(x) + module(x * 2)).square().sum().backward()
        grads.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(grads[1], grads[0])


_factor = 1.0


@functools.lru_cache
def _scale(a: int = 1, *, b: int = 1) -> float:
    return _factor * a * b


@functools.lru_cache
def _mask(n: int) -> torch.Tensor:
    return torch.full((n,), _factor)


CACHED = {
    "plain": lambda _: _scale(),
    "keywords": lambda _: _scale(1, b=2),
    "spread": lambda _: _scale(*(2,), **{"b": 3}),
    "a tensor": lambda _: _mask(1),
}


@pytest.mark.parametrize("take", CACHED.values(), ids=CACHED)
def test_a_cache_that_is_cleared_is_seen(take: Callable) -> None:
    def run(module: nn.Module) -> list[float]:
        global _factor
        found = []
        for _factor in (1.0, 5.0, 6.0):
            _scale.cache_clear()
            _mask.cache_clear()
            found += outputs(module, float)
        return found

    case = (lambda: None, take)
    assert run(ORTModule(Case(*case), strict=True)) == run(Case(*case))


@functools.lru_cache
def _pair(n: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return torch.full((n,), _factor), {"a": torch.full((n,), 2 * _factor)}


@functools.lru_cache(0)
def _never(n: int) -> torch.Tensor:
    return torch.full((n,), _factor)


COLD: dict[str, tuple[Callable, Callable]] = {
    "a tensor": (_mask, lambda: _mask(2)),
    "the first of two": (_pair, lambda: _pair(2)[0]),
    "in a dictionary": (_pair, lambda: _pair(2)[1]["a"]),
}


@pytest.mark.parametrize("kind", COLD)
def test_what_a_cache_keeps_from_the_captured_call_is_watched(kind: str) -> None:
    """The cache is empty at the first call, which is captured; later its tensor is written."""
    cache, take = COLD[kind]

    def run(module: nn.Module) -> list[float]:
        cache.cache_clear()
        found = outputs(module, float)
        for factor in (2.0, 3.0):
            take().mul_(factor)
            found += outputs(module, float)
        return found

    case = (lambda: None, lambda _: take())
    assert run(ORTModule(Case(*case), strict=True)) == run(Case(*case))


def test_a_cache_that_keeps_nothing_runs_in_pytorch() -> None:
    case = (lambda: None, lambda _: _never(2))
    module = ORTModule(Case(*case))
    assert outputs(module, float) == outputs(Case(*case), float)
    assert module.gradd_stats()["captures"] == 0


def test_lazy_modules_run_in_torch_until_they_have_a_size() -> None:
    module = ORTModule(nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(3)))
    for _ in range(3):
        module(torch.ones(2, 3)).sum().backward()
    assert module.gradd_stats()["fallbacks"] == {"unsupported_parameter": 1}
    assert module.gradd_stats()["captures"] == 1


REVERSED = {
    "range": lambda x: sum(x[:, i] * i for i in reversed(range(2))),
    "list": lambda x: sum(x[:, i] * i for i in reversed([0, 1])),
    "nested": lambda x: sum(x[:, i] * j for i in reversed(range(2)) for j in reversed(range(3))),
}


class Loops(nn.Module):
    """A layer whose result is scaled with what a loop gives."""

    def __init__(self, loop: Callable) -> None:
        super().__init__()
        self.layer, self.loop = nn.Linear(2, 1), loop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.loop(x).sum()


@pytest.mark.parametrize("name", REVERSED)
def test_iterators_of_the_call_itself_are_free(name: str) -> None:
    eager = Loops(REVERSED[name])
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    ours = ORTModule(copy.deepcopy(eager), strict=True)(x)
    torch.testing.assert_close(ours, eager(x))

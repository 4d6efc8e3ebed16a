"""Memory that forward() writes and reads under another name: an array, a view, a buffer of C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")
X = torch.ones(2, 3)


class Aliased(nn.Module):
    """A layer with a buffer, and something over memory that forward() may write."""

    def __init__(self, make: Callable[[Any], Any], take: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, bias=False)
        nn.init.ones_(self.layer.weight)
        self.register_buffer("count", torch.zeros(4))
        self.alias, self.take = (make(self),), (take,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.take[0](self, self.alias[0])


def _adding(read: Callable[[Any], Any]) -> Callable:
    def take(net: Any, alias: Any) -> Any:
        net.count.add_(1)
        return read(alias)

    return take


def _replacing(net: Any, alias: Any) -> float:
    net.count = net.count + 1
    return float(alias[0]) + 1


def _before(net: Any, alias: Any) -> float:
    value = float(alias[1])
    net.count[1] += 1
    return value + 1


BUFFER: dict[str, tuple[Callable, Callable]] = {
    "array": (lambda n: n.count.numpy(), _adding(lambda a: float(a[0]))),
    "part of an array": (lambda n: n.count.numpy()[2:], _adding(lambda a: float(a[1]))),
    "memoryview": (lambda n: memoryview(n.count.numpy()), _adding(lambda m: m[0])),
    "DLPack": (lambda n: torch.from_dlpack(n.count), _adding(lambda t: t[0])),
    "DLPack of numpy": (lambda n: np.from_dlpack(n.count), _adding(lambda a: float(a.sum()))),
    "a view": (lambda n: n.count[1:], _adding(lambda t: t.sum())),
    "a tensor over the array": (
        lambda n: n.count.numpy(),
        _adding(lambda a: torch.from_numpy(a).sum()),
    ),
    "read before": (lambda n: n.count.numpy(), _before),
    "replaced": (lambda n: n.count.numpy(), _replacing),
}


def _outside(make: Callable[[np.ndarray], Any], write: Callable, read: Callable) -> tuple:
    def both(_: Any) -> tuple:
        tensor = torch.zeros(4)
        return (make(tensor.numpy()), tensor)

    def take(_: Any, alias: tuple) -> Any:
        write(alias[1])
        return read(alias[0])

    return both, take


def _add(tensor: torch.Tensor) -> None:
    tensor.add_(1)


OUTSIDE: dict[str, tuple[Callable, Callable]] = {
    "array": _outside(lambda a: a, _add, lambda a: float(a[0])),
    "memoryview": _outside(memoryview, _add, lambda m: m[3]),
    "whole array": _outside(lambda a: a[1:], lambda t: t[2:].mul_(2).add_(1), np.sum),
    "tensor over an array": (
        lambda _: (a := np.zeros(4, np.float32), torch.from_numpy(a)),
        lambda _, both: (both[1].copy_(both[1] + 2), float(both[0][1]))[1],
    ),
    "another view": (
        lambda _: (t := torch.zeros(4), t[:2], t[2:])[1:],
        lambda _, both: (both[0].sum(), both[1].add_(1), float(both[1][0]))[2],
    ),
    "the whole of a view": (
        lambda _: (t := torch.zeros(4), t[:2]),
        lambda _, both: (both[1].sum(), both[0][2:].add_(1), float(both[0][3]))[2],
    ),
    "array first": (
        lambda _: (t := torch.zeros(4), t.numpy()),
        lambda _, both: (both[1].__iadd__(1), both[0].add_(1), float(both[1][0]))[2],
    ),
    "bytearray": (
        lambda _: bytearray(16),
        lambda _, b: (torch.frombuffer(b, dtype=torch.float32).add_(1), float(b[3]))[1],
    ),
}


@pytest.mark.parametrize("case", (BUFFER | OUTSIDE).values(), ids=BUFFER | OUTSIDE)
def test_what_forward_writes_it_reads_under_every_name(case: tuple) -> None:
    found = []
    for wrap in (ORTModule, lambda module: module):
        module = wrap(net := Aliased(*case))
        values = []
        for _ in range(4):
            out = module(X)
            out.sum().backward()
            values += [out.tolist(), net.count.tolist()]
        found.append(values)
    assert found[0] == found[1]


def test_an_array_over_a_buffer_that_is_only_read_is_watched() -> None:
    found = []
    for wrap in (lambda module: ORTModule(module, strict=True), lambda module: module):
        net = Aliased(lambda n: n.count.numpy(), lambda n, a: float(a[0]) + n.count.sum() + 1)
        module, values = wrap(net), []
        for step in range(3):
            net.count.fill_(step)
            values.append(module(X).tolist())
        found.append(values)
    assert found[0] == found[1]


@pytest.mark.parametrize("export", [torch.from_dlpack, np.from_dlpack])
def test_memory_that_dlpack_has_given_away_stays_where_it_is(export: Callable) -> None:
    net = Aliased(lambda n: None, lambda n, a: 1.0)
    net.count.fill_(3.0)
    alias, module = export(net.count), ORTModule(net, strict=True)
    address = net.count.data_ptr()
    for _ in range(2):
        module(X)
    net.count.add_(1)
    assert net.count.data_ptr() == address
    assert alias.tolist() == [4.0] * 4


def _local(net: Any, alias: Any) -> float:
    local = np.zeros(3, np.float32)
    torch.from_numpy(local).add_(1)
    return float(local[0]) + float(alias[0])


def _apart(net: Any, alias: Any) -> float:
    net.count.add_(1)
    return float(np.ones(3, np.float32)[0]) + float(alias[0]) + torch.zeros(3).add_(1).sum()


@pytest.mark.parametrize("take", [_local, _apart])
def test_arrays_of_the_call_itself(take: Callable) -> None:
    eager = Aliased(lambda _: np.ones(4, np.float32), take)
    ours = ORTModule(Aliased(lambda _: np.ones(4, np.float32), take))
    for _ in range(2):
        assert ours(X).tolist() == eager(X).tolist()

"""Results that share memory with each other or with the caller's tensors, as in PyTorch.

A later write to one of them reaches the others, and gradients follow as PyTorch's do.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from gradd import ORTModule
from gradd.calls.lazy import LazyTensor
from helpers.nets import assert_close, assert_same_grads

pytestmark = pytest.mark.usefixtures("shared_daemon")


class Net(nn.Module):
    """Calls a function with itself, y = linear(x), and x."""

    def __init__(self, returns: Callable[..., Any]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.l, self.p = nn.Linear(6, 6), nn.Parameter(torch.randn(6))
            self.r = nn.GRU(6, 6)
        self.register_buffer("count", torch.ones(6))
        self.const, self.array = torch.ones(6), numpy.ones(6, dtype=numpy.float32)
        self.returns = returns

    def forward(self, x: torch.Tensor) -> Any:
        return self.returns(self, self.l(x), x)


def _no_grad_view(_: Net, y: torch.Tensor, x: torch.Tensor) -> tuple:
    with torch.no_grad():
        part = y[:, 1:3]
    return y, part


def _written(_: Net, y: torch.Tensor, x: torch.Tensor) -> tuple:
    part = y[:, 0]
    y.mul_(2)
    return part, y


def _in_region(_: Net, y: torch.Tensor, x: torch.Tensor) -> tuple:
    with torch.no_grad():
        z = y.exp()
        part = z.t()
    return y, z, part


# Of the network, y and x: what share memory among themselves.
RESULTS: dict[str, Callable[[Net, torch.Tensor, torch.Tensor], Any]] = {
    "twice": lambda s, y, x: (y, y),
    "in a dict": lambda s, y, x: {"a": y, "b": {"c": y, "d": [y, None, 3]}},
    "column": lambda s, y, x: (y, y[:, 0]),
    "column first": lambda s, y, x: (y[:, 0], y),
    "flat": lambda s, y, x: (y, y.view(-1)),
    "flat first": lambda s, y, x: (y.view(-1), y, y.view(-1)),
    "transposed": lambda s, y, x: (y, y[:2], y.t()),
    "detached": lambda s, y, x: (y, y.detach()),
    "detached first": lambda s, y, x: (y.detach(), y, y.detach()[1:]),
    "only detached": lambda s, y, x: ((y * 2).sum(), y.detach(), y.detach()[0]),
    "data": lambda s, y, x: (y, y.data, y.data[:, :2]),
    "in a region": _in_region,
    "same view twice": lambda s, y, x: (lambda v: (v, y, v))(y[1:]),
    "view of a view": lambda s, y, x: (lambda v: (v, v[0], v.view(-1)))(y.view(-1, 3)),
    "reshaped": lambda s, y, x: (y, y.reshape(-1, 2), y.flatten(), y.t().reshape(-1)),
    "expanded": lambda s, y, x: (y, y[0].expand(3, 6)),
    "diagonal": lambda s, y, x: (y, y.diagonal(), y[1:, 1:].diagonal()),
    "no work": lambda s, y, x: (y, y.contiguous(), y.float(), nn.functional.dropout(y, 0.5, False)),
    "dropout off": lambda s, y, x: (y, nn.functional.dropout(y, 0.5, False)[:, 1:3]),
    "written": _written,
    "not contiguous": lambda s, y, x: (lambda z: (z, z.detach(), z[:]))((y * 2).t()),
    "scalar": lambda s, y, x: (lambda t: {"all": t, "item": t.detach(), "loss": t})(y.sum()),
    "overlapping": lambda s, y, x: (y[:, :3], y[:, 2:]),
    "state": lambda s, y, x: (lambda a: (a[1], a[1].detach(), a[1][0]))(s.r(y[None])),
    "sequence": lambda s, y, x: (lambda a: (a[1][-1], a[0], a[0][0]))(s.r(y[None])),
    "whole numbers": lambda s, y, x: (y, *(lambda i: (i, i, i[:1]))(y.argmax(-1))),
}
# PyTorch forbids writes to some of these while gradients are recorded.
NO_WRITES: dict[str, Callable[[Net, torch.Tensor, torch.Tensor], Any]] = {
    "no_grad": _no_grad_view,
    "of several": lambda s, y, x: (lambda a: (a[0], a[0].detach(), a[1]))(torch.max(y, -1)),
    "parts": lambda s, y, x: (y, *y.chunk(2, -1), *y.split(1)[:1]),
}
# What share memory with an argument, a parameter, a buffer or a tensor attribute.
CALLERS: dict[str, Callable[[Net, torch.Tensor, torch.Tensor], Any]] = {
    "argument": lambda s, y, x: (y, x),
    "argument alone": lambda s, y, x: x,
    "argument's column": lambda s, y, x: (y, x[:, :2]),
    "argument detached": lambda s, y, x: (y, x.detach(), x.view(-1)),
    "argument without work": lambda s, y, x: (y, x.reshape(2, -1), x.contiguous(), x.float()),
    "parameter": lambda s, y, x: (y * s.p, s.p),
    "parameter alone": lambda s, y, x: s.p,
    "unused parameter": lambda s, y, x: (y, s.p, s.p),
    "parameter detached": lambda s, y, x: (y * s.p, s.p.detach()),
    "parameter's data": lambda s, y, x: (y, s.l.weight.data),
    "parameter transposed": lambda s, y, x: (y, s.l.weight.t(), s.l.weight[1:, 2]),
    "buffer": lambda s, y, x: (y * s.count, s.count),
    "part of a buffer": lambda s, y, x: (y, s.count[2:4], s.count[3:5]),
    "updated buffer": lambda s, y, x: (s.count.add_(1), y * s.count, s.count),
    "attribute": lambda s, y, x: (y + s.const, s.const),
    "attribute that is not read": lambda s, y, x: (y, s.const),
    "array": lambda s, y, x: (y, torch.from_numpy(s.array)),
    "array that is read": lambda s, y, x: (
        y + torch.from_numpy(s.array),
        torch.from_numpy(s.array),
    ),
    "part of an attribute": lambda s, y, x: (y + s.const, s.const[1:]),
}
ALL = {**RESULTS, **NO_WRITES, **CALLERS}


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (dict, UserDict)):
        return [t for v in value.values() for t in _flat(v)]
    return [t for v in value for t in _flat(v)] if isinstance(value, (list, tuple)) else []


def _pair(returns: Callable[..., Any], eager: bool = False) -> list[Net]:
    theirs = Net(returns).train(not eager)
    return [ORTModule(copy.deepcopy(theirs), strict=True), theirs]


def _batch(size: int, seed: int, grad: bool = False) -> list[torch.Tensor]:
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
    return [x.clone().requires_grad_(grad) for _ in range(2)]


def _memory(value: Any, x: torch.Tensor, net: nn.Module) -> list[tuple]:
    """Which of the tensors are the same object, and which share memory."""
    known = [*_flat(value), x, *net.parameters(), *net.buffers()]
    storages = [t.untyped_storage().data_ptr() for t in known]
    objects = [id(t) for t in known]
    return [(storages.index(s), objects.index(o)) for s, o in zip(storages, objects, strict=True)]


def _assert_same(values: list, xs: list, nets: list[nn.Module], what: str) -> None:
    ours, theirs = map(_flat, values)
    assert len(ours) == len(theirs)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.dtype is b.dtype and a.requires_grad == b.requires_grad, f"{what}: {number}"
        assert_close(a.double(), b.double(), f"{what}: result {number}")
    assert_close(*xs, f"{what}: argument")
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert_close(a, b, f"{what}: parameter")
    for (name, a), (_, b) in zip(nets[0].named_buffers(), nets[1].named_buffers(), strict=True):
        assert_close(a, b, f"{what}: {name}")


def _write(value: Any, number: int, grad: bool) -> str:
    """Changes one result in place; what PyTorch says against it, if anything."""
    tensor = _flat(value)[number]
    try:
        with torch.set_grad_enabled(grad):
            tensor.mul_(3).add_(number + 1)
    except RuntimeError as error:
        return type(error).__name__
    return ""


def _writes(nets: list[Net], number: int, grad: bool, size: int) -> list[Any]:
    xs = _batch(size, number)
    values = [net(x) for net, x in zip(nets, xs, strict=True)]
    what = f"write to {number} of {size} rows"
    assert _memory(values[0], xs[0], nets[0]) == _memory(values[1], xs[1], nets[1]), what
    assert _write(values[0], number, grad) == _write(values[1], number, grad), what
    _assert_same(values, xs, nets, what)
    return values


def _count(returns: Callable[..., Any]) -> int:
    return len(_flat(Net(returns)(torch.ones(4, 6))))


@pytest.mark.parametrize("name", RESULTS)
def test_a_write_reaches_all_results_and_gradients_follow(name: str) -> None:
    nets = _pair(RESULTS[name])
    for grad in (False, True):
        for number in range(_count(RESULTS[name])):
            for size in (4, 7) if number else (5, 2):
                for net in nets:
                    net.zero_grad()
                for value in _writes(nets, number, grad, size):
                    parts = [t.square().sum() for t in _flat(value) if t.requires_grad]
                    sum(parts).backward()  # type: ignore[union-attr]
                assert_same_grads(*nets)
    assert nets[0].gradd_stats()["fallbacks"] == {}


@pytest.mark.parametrize("name", CALLERS)
def test_a_write_reaches_what_the_caller_has(name: str) -> None:
    nets = _pair(CALLERS[name])
    for number in range(_count(CALLERS[name])):
        for grad in (False, True):
            for size in (4, 6):
                _writes(nets, number, grad, size)
    assert nets[0].gradd_stats()["fallbacks"] == {}


_EVAL = ["in a dict", "detached", "transposed", "parts", "dropout off", "written", "argument"]
_EVAL += ["argument's column", "parameter", "parameter transposed", "updated buffer", "attribute"]


@pytest.mark.parametrize("name", _EVAL)
def test_without_gradients(name: str) -> None:
    returns = ALL[name]
    nets = _pair(returns, eager=True)
    for context in (torch.no_grad, torch.inference_mode):
        for number in range(_count(returns)):
            with context():
                _writes(nets, number, False, 4 + number)


@pytest.mark.parametrize("name", {**NO_WRITES, **CALLERS})
def test_gradients_through_all_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    nets = _pair(ALL[name])
    for size in (4, 8):
        xs = _batch(size, size, grad=True)
        for net, x in zip(nets, xs, strict=True):
            net.zero_grad()
            parts = [t.square().sum() * (i + 1) for i, t in enumerate(_flat(net(x)))]
            sum(p for p in parts if p.requires_grad).backward()  # type: ignore[union-attr]
        if any(p.grad is not None for p in nets[1].parameters()):
            assert_same_grads(*nets)
        assert (xs[0].grad is None) == (xs[1].grad is None)
        if xs[1].grad is not None:
            assert_close(xs[0].grad, xs[1].grad, "gradient of the argument")


def test_versions_are_those_of_pytorch() -> None:
    for name, raises in (("detached", True), ("data", False), ("column", True)):
        for net in _pair(RESULTS[name]):
            value = net(torch.ones(4, 6))
            squares = value[0].square().sum()
            with torch.no_grad():
                value[1].zero_()
            if raises:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    squares.backward()
            else:
                squares.backward()


@pytest.mark.parametrize("order", [(False, True, False, True), (True, False)])
def test_an_argument_that_lies_otherwise_is_another_capture(order: tuple[bool, ...]) -> None:
    nets = _pair(lambda s, y, x: (y, x.contiguous(), x.reshape(-1)))
    for transposed in order:
        xs = [(x.t() if transposed else x) for x in _batch(6, 3)]
        values = [net(x) for net, x in zip(nets, xs, strict=True)]
        assert _memory(values[0], xs[0], nets[0]) == _memory(values[1], xs[1], nets[1])
        for value in values:
            value[1].zero_()
        _assert_same(values, xs, nets, f"transposed: {transposed}")
    assert nets[0].gradd_stats()["captures"] == 2


def _state(s: Net, y: torch.Tensor, x: torch.Tensor) -> tuple:
    s.count = s.count * 0.5 + y.detach().mean(0)
    return y, s.count


def test_a_buffer_that_is_replaced_leaves_old_results_alone() -> None:
    nets = _pair(_state)
    values: list[list] = [[], []]
    for step in range(3):
        for net, x, kept in zip(nets, _batch(4, step), values, strict=True):
            kept.append(net(x))
    _assert_same(values, _batch(4, 0), nets, "states")


def test_parameters_that_are_laid_out_anew() -> None:
    nets = _pair(CALLERS["parameter transposed"])
    for step in range(3):
        xs = _batch(4, step)
        values = [net(x) for net, x in zip(nets, xs, strict=True)]
        _assert_same(values, xs, nets, f"step {step}")
        for net in nets:
            net.l.weight.data = net.l.weight.data.t()


class Model(nn.Module):
    """A loss in the graph, hidden states and a view of one of them."""

    def __init__(self, part: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.part = part

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        h = self.a(x)
        y = self.b(h.tanh())
        out = {"loss": y.square().mean(), "last": y, "hidden": (x, h, y)}
        return {**out, "first": h[:, 0]} if self.part else out


@pytest.mark.parametrize("part", [False, True])
def test_lazy_outputs(part: bool) -> None:
    theirs = Model(part)
    nets = [ORTModule(copy.deepcopy(theirs), strict=True), theirs]
    for size in (4, 4, 5):
        values = []
        for net, x in zip(nets, _batch(size, size), strict=True):
            net.zero_grad()
            values.append(net(x))
            values[-1]["loss"].backward()
        assert_same_grads(*nets)
        ours = values[0]
        assert isinstance(ours["last"], LazyTensor) and ours["hidden"][2] is ours["last"]
    assert nets[0].gradd_stats()["repeated_forwards"] <= part
    for value in values:
        with torch.no_grad():
            value["last"].add_(1)
            value["hidden"][1].mul_(2)
    for a, b in zip(*map(_flat, values), strict=True):
        assert_close(a.detach(), b)
    again = nets[0](torch.ones(4, 6))
    (again["last"].sum() + again["hidden"][2].sum()).backward()


def test_parts_without_a_common_element_are_outputs() -> None:
    nets = _pair(lambda s, y, x: y.chunk(2, -1))
    values = [net(x) for net, x in zip(nets, _batch(4, 1), strict=True)]
    for value in values:
        value[0].data.zero_()
    _assert_same(values, _batch(4, 1), nets, "parts")
    for value in values:
        (value[0] + value[1].square()).sum().backward()
    assert_same_grads(*nets)


def test_a_daemon_that_dies(shared_daemon: Any) -> None:
    nets = _pair(RESULTS["transposed"])
    xs = _batch(4, 1)
    values = [net(x) for net, x in zip(nets, xs, strict=True)]
    shared_daemon.kill()
    for value in values:
        value[2].mul_(2)
        sum(t.square().sum() for t in value).backward()  # type: ignore[union-attr]
    assert_same_grads(*nets)

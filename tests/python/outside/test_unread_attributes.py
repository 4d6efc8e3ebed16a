"""Attributes that change between calls: a capture is only made again for what forward() reads."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import assert_close, step_agrees
from torch import nn

from gradd import ORTModule, export


class Base(nn.Module):
    factor_of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.factor = 1.0
        self.step = 0
        self.history: list[float] = []
        self.table = {"a": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.read()

    def read(self) -> Any:
        return 1.0

    @property
    def doubled(self) -> float:
        return self.factor * 2


UNREAD: dict[str, Callable[[Base, int], Any]] = {
    "number": lambda net, i: setattr(net, "step", i),
    "text": lambda net, i: setattr(net, "factor", f"text {i}"),
    "list": lambda net, i: net.history.append(float(i)),
    "dictionary": lambda net, i: net.table.update({str(i): i}),
    "new": lambda net, i: setattr(net, f"new{i}", i),
    "gone": lambda net, i: net.__dict__.pop("step", None),
    "object": lambda net, i: setattr(net, "helper", object()),
    "tensor": lambda net, i: setattr(net, "last", torch.full((2,), float(i))),
    "of a submodule": lambda net, i: setattr(net.inner, "calls", i),
}


def _follow(net: nn.Module, change: Callable[[Any, int], Any], steps: int = 4) -> dict:
    """Steps of a wrapped module and of a plain one, with a change after each; the statistics."""
    theirs = copy.deepcopy(net)
    ours = ORTModule(net, strict=True)
    for i in range(1, steps + 1):
        step_agrees(ours, theirs, torch.randn(4, 5))
        change(net, i), change(theirs, i)
    return ours.gradd_stats()


@pytest.mark.parametrize("kind", list(UNREAD))
def test_what_forward_does_not_read(kind: str, shared_daemon) -> None:
    stats = _follow(Base(), UNREAD[kind])
    assert stats["captures"] == 1 and stats["fallbacks"] == {}


def test_for_many_steps(shared_daemon) -> None:
    assert _follow(Base(), UNREAD["number"], 80)["captures"] == 1


WAYS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda self: self.factor,
    "getattr": lambda self: getattr(self, "factor"),  # noqa: B009
    "getattr of a made name": lambda self: getattr(self, "".join(["fac", "tor"])),
    "vars": lambda self: vars(self)["factor"],
    "the dictionary": lambda self: self.__dict__.get("factor", 1.0),
    "all of the dictionary": lambda self: dict(self.__dict__)["factor"],
    "values": lambda self: [v for k, v in self.__dict__.items() if k == "factor"][0],
    "hasattr": lambda self: 3.0 if hasattr(self, "flag") else 2.0,
    "property": lambda self: self.doubled,
    "attrgetter": lambda self: operator.attrgetter("factor")(self),
    "getattribute": lambda self: object.__getattribute__(self, "factor"),
    "of a copy": lambda self: copy.copy(self).factor,
    "shadowed": lambda self: self.factor_of_class,
    "in a list": lambda self: self.history[-1] if self.history else 1.0,
    "length": lambda self: len(self.history) + 1,
    "in a dictionary": lambda self: sum(self.table.values()),
    "of a submodule": lambda self: getattr(self.inner, "scale", 1.0),
    "through the tree": lambda self: list(self.modules())[1].__dict__.get("scale", 1.0),
    "by its name": lambda self: self.get_submodule("inner").__dict__.get("scale", 1.0),
}


def _change_all(net: Base, i: int) -> None:
    net.factor = 1.0 + i
    net.flag = True
    net.factor_of_class = 2.0 + i
    net.history.append(1.0 + i)
    net.table["a"] = 2.0 + i
    net.inner.scale = 1.0 + i


@pytest.mark.parametrize("way", list(WAYS))
def test_what_forward_reads(way: str, shared_daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    kind = type("Reading", (Base,), {"read": WAYS[way]})
    _follow(kind(), _change_all)


def test_another_size_may_read_more(shared_daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")

    class Branching(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * (self.factor if x.shape[0] == 1 else 1.0)

    net = Branching()
    theirs = copy.deepcopy(net)
    ours = ORTModule(net, strict=True)
    for factor in (1.0, 2.0, 1.0, 3.0):
        net.factor = theirs.factor = factor
        for rows in (4, 1, 4):
            x = torch.randn(rows, 5)
            assert_close(ours(x), theirs(x))


def test_what_fails_is_not_tried_in_every_step(
    shared_daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.det(self.inner(x)[:3]) * (self.factor if self.step < 90 else 2.0)

    tried: list[int] = []
    real = export.capture

    def counting(*args: Any, **kwargs: Any) -> Any:
        tried.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(export, "capture", counting)
    net = Refused()
    theirs, ours = copy.deepcopy(net), ORTModule(net)
    for step in range(100):
        net.step = theirs.step = step
        x = torch.randn(4, 5)
        assert_close(ours(x), theirs(x))
    assert len(tried) < 16
    (count,) = ours.gradd_stats()["fallbacks"].values()
    assert count == 100


def test_what_failed_often_is_tried_again(shared_daemon) -> None:
    class Sometimes(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.inner(x)
            return torch.linalg.det(h[:3]) if self.step < 12 else h.square().sum()

    net = Sometimes()
    theirs, ours = copy.deepcopy(net), ORTModule(net)
    for step in range(60):
        net.step = theirs.step = min(step, 12)
        x = torch.randn(4, 5)
        assert_close(ours(x), theirs(x))
    assert ours.gradd_stats()["captures"] == 1
    assert sum(ours.gradd_stats()["fallbacks"].values()) < 40


def test_what_is_captured_runs_although_other_attributes_fail(shared_daemon) -> None:
    class Sometimes(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.inner(x)
            return h.square().sum() if self.step == 0 else torch.linalg.det(h[:3]) * self.step

    net = Sometimes()
    theirs, ours = copy.deepcopy(net), ORTModule(net)
    for step in [*range(30), *[0] * 10]:
        net.step = theirs.step = step
        step_agrees(ours, theirs, torch.randn(4, 5))
    assert sum(ours.gradd_stats()["fallbacks"].values()) == 29

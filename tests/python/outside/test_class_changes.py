"""Classes that change under a wrapped module: other methods, another class, a call of its own."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from nets import assert_close, step_agrees
from torch import nn

from gradd import ORTModule
from gradd.export import CaptureError, capture


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Child(Base):
    pass


class Louder(Child):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 10


class Absolute(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).abs()


def _pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    net = Child()
    twin = Child()
    twin.load_state_dict(net.state_dict())
    return ORTModule(net), twin


def _same(ours: nn.Module, theirs: nn.Module) -> None:
    step_agrees(ours, theirs, torch.randn(4, 5))


@pytest.mark.parametrize("owner", [Base, Child])
def test_a_forward_that_is_patched_and_put_back(owner: type, shared_daemon) -> None:
    ours, theirs = _pair()
    own = owner.__dict__.get("forward")
    _same(ours, theirs)
    for factor in (2.0, 3.0):
        with mock.patch.object(owner, "forward", lambda s, x, f=factor: s.inner(x) * f):
            _same(ours, theirs)
            _same(ours, theirs)
        _same(ours, theirs)
    assert owner.__dict__.get("forward") is own
    assert ours.gradd_stats()["fallbacks"] == {}


def test_first_seen_while_it_is_patched(shared_daemon) -> None:
    ours, theirs = _pair()
    with mock.patch.object(Child, "forward", lambda s, x: s.inner(x) * 0):
        _same(ours, theirs)
    _same(ours, theirs)
    assert ours.gradd_stats()["fallbacks"] == {}


@pytest.mark.parametrize("place", ["root", "submodule"])
def test_another_class(place: str, shared_daemon) -> None:
    ours, theirs = _pair()
    kinds: tuple[Any, ...] = (Child, Louder, Base, Child)
    kinds = kinds if place == "root" else (nn.Linear, Absolute, nn.Linear)
    for kind in kinds:
        for net in (ours.module, theirs):
            (net if place == "root" else net.inner).__class__ = kind
        _same(ours, theirs)
    assert ours.gradd_stats()["fallbacks"] == {}


def test_a_call_of_its_own_runs_in_pytorch(shared_daemon) -> None:
    class Doubled(Base):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) * 2

    net, x = Doubled(), torch.ones(4, 5)
    assert_close(ORTModule(net)(x), net.inner(x) * 2)
    with pytest.raises(CaptureError, match="__call__"):
        ORTModule(net, strict=True)(x)
    outer = nn.Sequential(Doubled())
    assert_close(ORTModule(outer, strict=True)(x), outer[0].inner(x) * 2)


_CALLS = {
    "__call__": lambda module, *args: nn.Module._wrapped_call_impl(module, *args) * 3,
    "_call_impl": lambda module, *args: module.forward(*args) * 3,
}


@pytest.mark.parametrize("name", _CALLS)
@pytest.mark.parametrize("owner", [Base, Child])
def test_a_call_of_its_own_that_comes_later(
    owner: type, name: str, shared_daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    ours, theirs = _pair()
    _same(ours, theirs)
    with mock.patch.object(owner, name, _CALLS[name], create=True):
        _same(ours, theirs)
        _same(ours, theirs)
    _same(ours, theirs)
    assert ours.gradd_stats()["fallbacks"] == {"forward_hooks": 2}


def _doubles(kinds: tuple[type, ...]) -> Any:
    before = nn.Module.__call__

    def double(module: nn.Module, *args: Any) -> torch.Tensor:
        out = before(module, *args)
        return out * 2 if isinstance(module, kinds) else out

    return double


@pytest.mark.parametrize("kinds", [(nn.Linear,), (Base,), (nn.Module,)])
def test_the_call_of_all_modules_that_is_replaced(
    kinds: tuple[type, ...], shared_daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is applied as often as in PyTorch, and a trace that would leave it out is refused."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    ours, theirs = _pair()
    _same(ours, theirs)
    with monkeypatch.context() as patched:
        patched.setattr(nn.Module, "__call__", _doubles(kinds))
        _same(ours, theirs)
        fresh = _pair()
        _same(*fresh)
        with pytest.raises(CaptureError, match="torch.nn.Module.__call__ is replaced by double"):
            capture(theirs, (torch.ones(4, 5),), {})
    _same(ours, theirs)
    assert ours.gradd_stats()["fallbacks"] == {"forward_hooks": 1}
    assert ours.gradd_stats()["captures"] == 1
    assert fresh[0].gradd_stats()["captures"] == 0


def test_the_attributes_of_all_modules_that_are_replaced(
    shared_daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    ours, theirs = _pair()
    _same(ours, theirs)
    before = nn.Module.__getattr__

    def negative(module: nn.Module, name: str) -> Any:
        found = before(module, name)
        return -found if name == "bias" else found

    with monkeypatch.context() as patched:
        patched.setattr(nn.Module, "__getattr__", negative)
        _same(ours, theirs)
        with pytest.raises(CaptureError, match="torch.nn.Module.__getattr__ is replaced by"):
            capture(theirs, (torch.ones(4, 5),), {})
    _same(ours, theirs)

"""Dropped memory comes back within a second: without the collector, without another request."""

from __future__ import annotations

import collections
import functools
import gc
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gradd import ORTModule
from gradd.session import client
from helpers.models import families

pytestmark = pytest.mark.one_in(4)

_SECONDS = 10.0  # for a machine that does something else; a second where it does not


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What only the collector would free stays."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def settled(daemon: Any, reached: Callable[[dict], bool]) -> dict:
    """The session as `gradd ps` shows it, as soon as it is as expected."""
    deadline = time.monotonic() + _SECONDS
    while True:
        (session,) = daemon.ps()["sessions"]
        if reached(session) or time.monotonic() > deadline:
            return session
        time.sleep(0.05)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()).square().mean()


def trained() -> tuple[ORTModule, torch.Tensor]:
    model, x = ORTModule(Layers(), strict=True), torch.randn(64, 512)
    for _ in range(3):
        model(x).backward()
    return model, x


def test_a_model_that_is_dropped(daemon: Any) -> None:
    model, x = trained()
    before = daemon.ps()["sessions"][0]
    gc.collect()
    gc.disable()
    try:
        alive = weakref.ref(model.module.first.weight)
        del model, x
        assert alive() is None
        after = settled(daemon, lambda s: not s["plans"] and s["segment_bytes"] < 2 << 20)
    finally:
        gc.enable()
    assert before["plans"] > 0 and before["segment_bytes"] > 2 << 20
    assert (after["plans"], after["runs"], after["arena_bytes"]) == (0, 0, 0)
    assert after["segment_bytes"] < 2 << 20  # of inputs and outputs


def test_a_loss_that_is_dropped(daemon: Any, uncollected: None) -> None:
    model, x = trained()
    loss = model(x)
    (session,) = daemon.ps()["sessions"]
    assert session["runs"] == 1 and session["arena_bytes"] > 0
    del loss
    after = settled(daemon, lambda s: not s["runs"])
    assert after["runs"] == 0 and after["arena_bytes"] == 0


def test_a_step_that_raises(daemon: Any) -> None:
    """As in a notebook: the exception is shown, and with the next one its frames are gone."""
    model, x = trained()

    def step() -> None:
        loss = model(x)
        raise ValueError(f"of {loss.dtype}")

    kept = None
    try:
        step()
    except ValueError as error:
        kept = error
    assert daemon.ps()["sessions"][0]["runs"] == 1
    del kept
    after = settled(daemon, lambda s: not s["runs"])
    assert after["runs"] == 0 and after["arena_bytes"] == 0


@pytest.mark.parametrize("name", ["llama", "bert_mlm"])
def test_a_family_that_is_dropped(daemon: Any, name: str) -> None:
    module, make_batch = families.build(name)
    model = ORTModule(module, strict=True)
    for seed in range(2):
        model(**make_batch(2, 8, seed)).loss.backward()
    gc.collect()
    gc.disable()
    try:
        alive = [weakref.ref(p) for p in module.parameters()]
        del model, module
        assert not any(p() is not None for p in alive)
        after = settled(daemon, lambda s: not s["plans"])
    finally:
        gc.enable()
    assert (after["plans"], after["runs"], after["arena_bytes"]) == (0, 0, 0)


def test_a_training_goes_on_beside_it(daemon: Any) -> None:
    """The thread that sends the remaining requests takes its turn between those of others."""
    kept, x = trained()
    (here,) = client.clients()
    for _ in range(6):
        dropped, _ = trained()
        del dropped
        for _ in range(20):
            kept.zero_grad()
            kept(x).backward()
        time.sleep(0.1)
    expected = kept.module.first.weight.grad.clone()
    kept.zero_grad()
    kept(x).backward()
    assert torch.equal(kept.module.first.weight.grad, expected)
    assert here.recoveries == 0
    own = daemon.ps()["sessions"][0]["plans"]
    assert settled(daemon, lambda s: s["plans"] <= own)["runs"] == 0


# ---- modules that hold something which leads back to them ----


class Helper:
    def __init__(self, thing: Any) -> None:
        self.thing = thing


class Slots:
    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing


def _attribute(make: Callable[[nn.Module], Any]) -> Callable:
    return lambda net: setattr(net, "extra", make(net))


LEADING_BACK: dict[str, Callable[[nn.Module], object]] = {
    "helper": _attribute(Helper),
    "slots": _attribute(Slots),
    "closure": _attribute(lambda net: lambda: net),
    "partial": _attribute(lambda net: functools.partial(print, net)),
    "method": _attribute(lambda net: net.forward),
    "method of a helper": _attribute(lambda net: Helper(net).__init__),
    "list": _attribute(lambda net: [net]),
    "tuple": _attribute(lambda net: (net,)),
    "dict of closures": _attribute(lambda net: {"a": lambda: net}),
    "deque": _attribute(lambda net: collections.deque([net])),
    "iterator": _attribute(lambda net: iter([net])),
    "class": _attribute(lambda net: type("Kind", (), {"thing": net})),
    "configuration": lambda net: setattr(net, "config", types.SimpleNamespace(thing=net)),
    "parent of a child": lambda net: vars(net.first).update(parent=[net]),
    "forward": lambda net: setattr(net, "forward", lambda x: net.second(x).mean()),
    "hook": lambda net: net.register_forward_hook(lambda *_: (net, None)[1]),
}


@pytest.mark.parametrize("story", [*LEADING_BACK, "wrapper", "trainer"])
def test_a_module_that_leads_back_to_itself(daemon: Any, story: str) -> None:
    """The collector frees it; nothing of ours keeps it alive."""
    net, x = Layers(), torch.randn(64, 512)
    LEADING_BACK.get(story, lambda net: None)(net)
    model = ORTModule(net)
    if story == "wrapper":
        net.wrapper = [model]
    if story == "trainer":
        net.trainer = Helper(model)
    for _ in range(2):
        model(x).backward()
    alive = weakref.ref(net)
    del net, model
    gc.collect()
    assert alive() is None
    after = settled(daemon, lambda s: not s["plans"] and s["segment_bytes"] < 2 << 20)
    assert (after["plans"], after["arena_bytes"]) == (0, 0)
    assert after["segment_bytes"] < 2 << 20

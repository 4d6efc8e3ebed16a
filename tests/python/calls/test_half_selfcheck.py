"""The self-check of the first step in bf16 and f16: roundings pass, a wrong gradient does not."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch

from gradd import ORTModule
from gradd.calls import run
from gradd.check import modes
from gradd.check.agreement import GRADIENT
from gradd.check.reference import Reference
from gradd.fallback import SelfCheckError
from helpers.nets import Net, batch

HALVES = (torch.bfloat16, torch.float16)
WAYS = [(way, half) for half in HALVES for way in ("parameters", "autocast")]


def call(way: tuple[str, torch.dtype]) -> Any:
    """A first training step, strictly in the daemon; returns the module."""
    net, (x, y) = Net(), batch()
    kind, dtype = way
    half = kind == "parameters"
    model = ORTModule(net.to(dtype) if half else net, strict=True)
    with contextlib.nullcontext() if half else torch.autocast("cpu", dtype):
        loss, _ = model(x.to(dtype) if half else x, y)
    loss.backward()
    return model


def spoil(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    backward = run.Run.backward

    def changed(self: run.Run, grad_outputs: Any, keep: bool, *more: Any) -> list:
        grads = backward(self, grad_outputs, keep, *more)
        change(grads[self.plan.params.index("second.weight")])
        return grads

    monkeypatch.setattr(run.Run, "backward", changed)


@pytest.mark.parametrize("way", WAYS)
def test_rounding_is_no_error(daemon, way: Any) -> None:
    stats = call(way).gradd_stats()
    assert stats["self_checks"] == 1 and stats["fallbacks"] == {}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "change",
    [lambda g: g.mul_(1.1), lambda g: g[0].zero_(), lambda g: g.fill_(float("nan"))],
    ids=["scaled", "a_row_missing", "nan"],
)
def test_wrong_gradients_are_found_and_named(daemon, monkeypatch, way: Any, change: Any) -> None:
    spoil(monkeypatch, change)
    with pytest.raises(SelfCheckError, match=r"the gradient of second\.weight by"):
        call(way)


@pytest.mark.parametrize("kind", ["parameters", "autocast"])
def test_what_bf16_excuses_is_found_in_f16(daemon, monkeypatch, kind: str) -> None:
    spoil(monkeypatch, lambda g: g.mul_(1.015))
    call((kind, torch.bfloat16))
    with pytest.raises(SelfCheckError, match=r"the gradient of second\.weight by"):
        call((kind, torch.float16))


@pytest.mark.parametrize("way", WAYS)
def test_a_missing_gradient_is_found(daemon, monkeypatch, way: Any) -> None:
    backward = run.Run.backward
    monkeypatch.setattr(
        run.Run,
        "backward",
        lambda self, go, keep, *more: [
            None if name == "second.weight" else g
            for name, g in zip(self.plan.params, backward(self, go, keep, *more), strict=True)
        ],
    )
    with pytest.raises(SelfCheckError, match=r"the daemon has no gradient for second\.weight"):
        call(way)


def test_higher_precision_is_for_what_differs_alone(daemon, monkeypatch) -> None:
    """The memory of a check: gradients in f32 are twice as large as the model's."""
    made: list[tuple[Any, set[str]]] = []
    ran = Reference.run

    def run_noted(self: Reference, data: Any, take: Any) -> None:
        names = set[str]()

        def noted(key: Any, value: Any) -> None:
            if key[0] == GRADIENT:
                names.add(key[1])
            take(key, value)

        ran(self, data, noted)
        made.append((self.precise, names))

    monkeypatch.setattr(Reference, "run", run_noted)
    spoil(monkeypatch, lambda g: g.mul_(1.1))
    with pytest.raises(SelfCheckError, match=r"the gradient of second\.weight by"):
        call(("parameters", torch.bfloat16))
    exact = [names for how, names in made if how is not None]
    assert exact and all(names == {"second.weight"} for names in exact)


def test_higher_precision_takes_one_parameter_at_a_time(daemon, monkeypatch) -> None:
    real = modes.Precise.real
    made: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def counted(self: modes.Precise, value: Any) -> Any:
        nonlocal most
        values = real(self, value)
        if values is not value:
            assert value.untyped_storage().nbytes() == value.element_size()
            made.append(weakref.ref(values))
            most = max(most, sum(m() is not None for m in made))
        return values

    spoil_all = run.Run.backward

    def spoiled(self: run.Run, grad_outputs: Any, keep: bool, *more: Any) -> list:
        return [g.mul_(1.2) for g in spoil_all(self, grad_outputs, keep, *more)]

    monkeypatch.setattr(run.Run, "backward", spoiled)
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(9))).to(torch.bfloat16)
    monkeypatch.setattr(modes.Precise, "real", counted)
    with pytest.raises(SelfCheckError):
        ORTModule(net, strict=True)(torch.randn(4, 8).bfloat16()).sum().backward()
    assert 1 <= most <= 6  # of 18


def test_gradients_of_all_uses_are_summed_in_higher_precision() -> None:
    """In bf16 the sum would be 1: each of the small terms is rounded away."""
    exact = modes.Precise(torch.float32)
    leaf = exact.stand_in(torch.ones(2, dtype=torch.bfloat16), True)
    with exact:
        total = leaf * torch.ones(2)
        for _ in range(4):
            total = total + leaf.view(2) * 2.0**-10
        total.sum().backward()
    assert torch.equal(total, torch.full((2,), 1 + 4 * 2.0**-10))
    assert torch.equal(leaf.grad, torch.full((2,), 1 + 4 * 2.0**-10))


def test_conversions_and_writes_in_higher_precision() -> None:
    exact = modes.Precise(torch.float64)
    leaf, third = exact.stand_in(torch.ones(2), False), torch.tensor(1.0, dtype=torch.float64) / 3
    with exact:
        assert torch.equal(leaf.t().bfloat16() * third, third.expand(2)), "nothing is rounded"
        with pytest.raises(TypeError, match="writes a parameter"):
            leaf.add_(1)

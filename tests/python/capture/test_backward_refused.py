"""Backwards that PyTorch refuses: the call runs there, by name, and raises what PyTorch raises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from captured import Lambda
from selection import every_run
from torch import Tensor, nn
from torch.nn import functional as F

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")

Forward = Callable[[nn.Module, Tensor], Tensor]


def _then(value: Tensor, *writes: Tensor) -> Tensor:
    """The value; the writes have happened before it is read."""
    return value.sum()


def _added(y: Tensor) -> Tensor:
    y += 1.0
    return y.sum()


def _zeroed(y: Tensor) -> Tensor:
    z = y * 2
    y[:] = 0
    return z.sum()


def _index_written(y: Tensor) -> Tensor:
    at = torch.tensor([0, 1])
    chosen = y[at]
    at.zero_()
    return chosen.sum()


def _written_without_gradients(h: Tensor) -> Tensor:
    product = h * h
    with torch.no_grad():
        h.mul_(2)
    return product.sum()


def _parameter_written(self: nn.Module, x: Tensor) -> Tensor:
    y = self.l(x * self.l.weight.sum())
    with torch.no_grad():
        self.l.weight.mul_(1.0)
    return y.sum()


REFUSED: dict[str, Forward] = {
    "result": lambda self, x: _added(self.l(x).relu()),
    "view of a result": lambda self, x: (lambda y: _then(y, y.view(-1).add_(1)))(self.l(x).exp()),
    "detached": lambda self, x: (lambda y: _then(y, y.detach().add_(1)))(self.l(x).exp()),
    "operand": lambda self, x: (lambda y: _then(y.pow(2), y.add_(1)))(self.l(x)),
    "operand, without gradients": lambda self, x: _written_without_gradients(self.l(x)),
    "overwritten": lambda self, x: _zeroed(self.l(x).exp()),
    "buffer": lambda self, x: _then(self.l(x) * self.b, self.b.mul_(2)),
    "index": lambda self, x: _index_written(self.l(x)),
    "parameter": _parameter_written,
    "floor_divide": lambda self, x: (self.l(x) // 2 + self.l(x)).sum(),
}


def _module(forward: Forward) -> nn.Module:
    torch.manual_seed(0)
    module = Lambda(forward, l=nn.Linear(4, 4))
    module.register_buffer("b", torch.ones(4))
    return module


@pytest.mark.parametrize("check", every_run(["0"], ["0", "1"]))
@pytest.mark.parametrize("kind", REFUSED)
def test_raises_what_pytorch_raises(kind: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", check)
    x = torch.randn(2, 4)
    errors = []
    model = ORTModule(_module(REFUSED[kind]))
    for m in (_module(REFUSED[kind]), model):
        with pytest.raises(RuntimeError) as info:
            m(x).backward()
        errors.append(str(info.value)[:60])
    assert errors[0] == errors[1]
    (reason,) = model.gradd_stats()["fallbacks"]
    assert reason in ("backward_refused", "input_mutation")


def _last(y: Tensor, z: Tensor) -> Tensor:
    """z's own backward would be refused, and nobody asks for it."""
    (z * z).add_(1)
    z.add_(1)
    return y.sum()


ALLOWED: dict[str, Forward] = {
    "relu_": lambda self, x: (self.l(x) + 0).relu_().sum(),
    "sigmoid_ and more": lambda self, x: self.l(x).sigmoid_().sum(),
    "add_ and mul_": lambda self, x: self.l(x).add_(1).mul_(2).sum(),
    "product not needed": lambda self, x: _last(self.l(x), self.l(x) + 1),
    "after layer_norm": lambda self, x: F.layer_norm(self.l(x), (4,)).add_(1).square().sum(),
    "transposed": lambda self, x: (lambda y: _then(y.t() @ x, y.add_(1)))(self.l(x)),
    "saved copy": lambda self, x: (lambda y: _then(y.clone().exp(), y.add_(1)))(self.l(x)),
}


@pytest.mark.parametrize("kind", ALLOWED)
def test_what_pytorch_differentiates_runs_in_the_daemon(kind: str) -> None:
    x = torch.randn(2, 4)
    model, eager = ORTModule(_module(ALLOWED[kind]), strict=True), _module(ALLOWED[kind])
    for m in (model, eager):
        m(x).backward()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["result", "floor_divide", "buffer"])
def test_without_gradients_nothing_is_refused(kind: str) -> None:
    model, eager = ORTModule(_module(REFUSED[kind]), strict=True), _module(REFUSED[kind])
    x = torch.randn(2, 4)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(x), eager(x))
    torch.testing.assert_close(model.b, eager.b)

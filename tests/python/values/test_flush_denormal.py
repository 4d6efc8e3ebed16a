"""Threads that flush subnormal numbers to zero: only their calls run in PyTorch, by name.

Each module has values below 1.2e-38 on its way: what is multiplied by 1e30 afterwards shows them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from gradd import ORTModule
from gradd.spec import CaptureError

pytestmark = pytest.mark.usefixtures("daemon")
X = torch.linspace(0.5, 1.5, 12).reshape(3, 4)


class Product(torch.nn.Module):
    """The value in between is 1e-40 or so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), 1e-20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 1e-20 * self.weight) * 1e30


class Constant(torch.nn.Module):
    """A constant of this size is made in forward()."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * (torch.full((4,), 1e-30) * 1e-10) * 1e30


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    assert torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(False)


def _call(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    out = model(X)
    out.sum().backward()
    return out.detach().clone(), next(iter(model.parameters())).grad.clone()


@pytest.mark.parametrize("kind", [Product, Constant])
@pytest.mark.parametrize("before", [False, True], ids=["fresh", "captured"])
def test_each_call_is_what_its_thread_asks_for(kind: type, before: bool) -> None:
    plain, model = kind(), ORTModule(kind())
    modes = [True, False, True, False]
    for number, flush in enumerate([False, *modes] if before else modes):
        torch.set_flush_denormal(flush)
        wanted, found = _call(plain), _call(model)
        assert (wanted[0] == 0).all() == flush
        for a, b in zip(wanted, found, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=0.0)
        asked = modes[: number + (0 if before else 1)]
        assert model.gradd_stats()["fallbacks"].get("flush_denormal", 0) == sum(asked)


def test_another_thread_is_not_concerned() -> None:
    model = ORTModule(Product())
    seen: list[torch.Tensor] = []

    def other() -> None:
        torch.set_flush_denormal(True)
        seen.append(_call(model)[0])

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert (seen[0] == 0).all()
    assert (_call(model)[0] > 0).all()
    assert model.gradd_stats()["fallbacks"] == {"flush_denormal": 1}
    assert model.gradd_stats()["forwards"] > 0


def test_strict_says_what_to_do() -> None:
    model = ORTModule(Product(), strict=True)
    torch.set_flush_denormal(True)
    with pytest.raises(CaptureError, match=r"flush_denormal: .*set_flush_denormal\(False\)"):
        model(X)

"""What forward() asks a tensor beside values, type and sizes: storages, marks, lazy negation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")


class Asks(nn.Module):
    """A layer whose result is scaled with what a tensor answers."""

    def __init__(self, ask: Callable[[torch.Tensor], Any], held: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, bias=False)
        nn.init.ones_(self.layer.weight)
        self.ask, self.held = (ask,), (held,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.ask[0](x if self.held[0] is None else self.held[0]())


def _plain() -> torch.Tensor:
    return torch.ones(2, 3)


def _part() -> torch.Tensor:
    return torch.ones(5, 3)[:2]


def _negative() -> torch.Tensor:
    return torch.ones(2, 3, dtype=torch.complex64).mul(1j).conj().imag


def _marked(cls: Callable, **names: Any) -> Callable[[], torch.Tensor]:
    def make() -> torch.Tensor:
        made = cls(torch.ones(2, 3))
        made.__dict__.update(names)
        return made

    return make


def _matched(x: torch.Tensor) -> float:
    match x:
        case nn.Buffer():
            return 2.0
    return 1.0


def _kept(x: torch.Tensor) -> torch.Tensor:
    return x


_BUFFER = _marked(nn.Buffer)
_FIXED = _marked(lambda t: nn.Parameter(t, requires_grad=False))
ASKED: dict[str, tuple[Callable, list[Callable]]] = {
    "untyped_storage": (lambda x: x.untyped_storage().nbytes() / 24, [_plain, _part]),
    "storage": (lambda x: x.storage().size() / 6, [_plain, _part]),
    "length of the storage": (lambda x: len(x.untyped_storage()) / 24, [_part, _plain]),
    "storage of a view": (lambda x: x[:1].untyped_storage().nbytes() / 24, [_plain, _part]),
    "a view is_neg": (lambda x: 1.0 + x.t().is_neg(), [_plain, _negative]),
    "by getattr": (lambda x: getattr(x, "untyped" + "_storage")().nbytes() / 24, [_plain, _part]),
    "of the class": (lambda x: torch.Tensor.untyped_storage(x).nbytes() / 24, [_plain, _part]),
    "Buffer": (lambda x: 1.0 + isinstance(x, nn.Buffer), [_plain, _BUFFER]),
    "Buffer first": (lambda x: 1.0 + isinstance(x, (int, nn.Buffer)), [_BUFFER, _plain]),
    "Buffer matched": (_matched, [_plain, _BUFFER]),
    "persistent": (lambda x: 1.0 + getattr(x, "persistent", 4.0), [_plain, _BUFFER]),
    "Parameter": (lambda x: 1.0 + isinstance(x, nn.Parameter), [_plain, _FIXED]),
    "is_neg": (lambda x: 1.0 + x.is_neg(), [_plain, _negative]),
    "is_neg first": (lambda x: 1.0 + x.is_neg(), [_negative, _plain]),
    "torch.is_neg": (lambda x: 1.0 + torch.is_neg(x), [_plain, _negative]),
    "Tensor.is_neg": (lambda x: 1.0 + torch.Tensor.is_neg(x), [_plain, _negative]),
    "dim_order": (
        lambda x: 1.0 + x.dim_order()[0],
        [_plain, lambda: torch.ones(3, 2).t()],
    ),
    "the tensor's own stride": (
        lambda x: 1.0 + torch.Tensor.stride(x)[0],
        [_plain, lambda: torch.ones(3, 2).t()],
    ),
}


def _agree(asks: tuple, makers: list[Callable], inputs: list[Callable]) -> Any:
    """Ours and eager side by side, each with arguments of its own."""
    ours, eager = ORTModule(Asks(*asks)), Asks(*asks)
    for make in (*inputs, *inputs, *inputs[::-1]):
        for change in makers:
            change(make)
        assert ours(make()).tolist() == eager(make()).tolist()
    return ours.gradd_stats()


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("name", ASKED)
def test_another_answer_of_an_argument(name: str) -> None:
    ask, inputs = ASKED[name]
    stats = _agree((ask,), [], inputs)
    assert stats["captures"] or stats["fallbacks"]


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("name", ["untyped_storage", "storage", "Buffer"])
def test_another_answer_of_a_tensor_of_outside(name: str) -> None:
    ask, makers = ASKED[name]
    place: dict[str, torch.Tensor] = {}

    def change(make: Callable) -> None:
        place["t"] = make()

    stats = _agree((ask, lambda: place["t"]), [change], [makers[0], makers[1]])
    assert stats["captures"] or stats["fallbacks"]


def test_the_elements_of_a_storage_of_outside() -> None:
    storage = torch.zeros(2, dtype=torch.uint8).untyped_storage()
    ours, eager = (wrap(Asks(lambda s: s[0] + 1.0, lambda: storage)) for wrap in (ORTModule, _kept))
    for step in range(3):
        storage[0] = step
        assert ours(_plain()).tolist() == eager(_plain()).tolist()


def test_marks_of_the_modules_own_tensors_are_no_obstacle() -> None:
    def ask(x: torch.Tensor) -> float:
        return 1.0 + isinstance(ours_layer.weight, nn.Parameter) + isinstance(x, nn.Buffer)

    net = Asks(ask)
    ours_layer = net.layer
    module = ORTModule(net, strict=True)
    assert module(_plain()).tolist() == [[6.0, 6.0], [6.0, 6.0]]
    assert module.gradd_stats()["captures"] == 1

"""The work of a graph's nodes: as PyTorch's own counter has it; no figure if a cost is unknown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from gradd import ORTModule
from gradd.dynamo import work

A = torch.linspace(-1, 1, 48).reshape(6, 8)
B = torch.linspace(-1, 1, 80).reshape(8, 10)
C = torch.linspace(-1, 1, 60).reshape(6, 10)
MANY = torch.linspace(-1, 1, 96).reshape(3, 4, 8)
ENDS = torch.tensor([2, 4, 6], dtype=torch.int32)
PRODUCTS: dict[str, Callable[[], Tensor]] = {
    "matmul": lambda: A @ B,
    "addmm": lambda: torch.addmm(C, A, B),
    "baddbmm": lambda: torch.baddbmm(torch.ones(3, 4, 5), MANY, torch.ones(3, 8, 5)),
    "addbmm": lambda: torch.addbmm(torch.ones(4, 5), MANY, torch.ones(3, 8, 5)),
    "einsum": lambda: torch.einsum("abc, cd -> abd", MANY, B),
    "linear": lambda: F.linear(A, B.T, C[0]),
    "conv1d": lambda: F.conv1d(MANY, torch.ones(5, 4, 3)),
    "attention": lambda: F.scaled_dot_product_attention(*[MANY[:, None]] * 3),
}


def traced(function: Callable, *args: Any) -> work.Amounts:
    """The work of a function's graph, as if PyTorch ran it."""
    found: list[work.Amounts] = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Callable:
        nodes = [n for n in graph.graph.nodes if n.op.startswith("call_")]
        found.append(work.amounts(nodes, False))
        return graph.forward

    torch.compiler.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        torch.compile(function, backend=backend, fullgraph=True)(*args)
    return found[0]


# PyTorch's counter does not know these on the CPU.
UNCOUNTED = {"addbmm": 2 * 3 * 4 * 8 * 5, "attention": 2 * 2 * 3 * 4 * 4 * 8}


def counted(function: Callable, *args: Any) -> int:
    with FlopCounterMode(display=False) as counter, torch.backends.mkldnn.flags(enabled=False):
        function(*args)
    return counter.get_total_flops()


def close(found: work.Amounts, flops: int) -> bool:
    """Operators that are no products come on top."""
    return found.unknown == "" and flops <= found.torch <= 1.3 * flops


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    assert close(traced(PRODUCTS[name]), UNCOUNTED.get(name) or counted(PRODUCTS[name]))


@pytest.mark.parametrize("two", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_layers_with_a_memory(kind: type[nn.Module], first: bool, two: bool) -> None:
    layer = kind(8, 16, num_layers=2, bidirectional=two, batch_first=first)
    x = torch.ones(3, 7, 8)
    assert close(traced(lambda: layer(x)[0]), counted(lambda: layer(x)[0]))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("batch", [2, 16, 64])
def test_cells(kind: type[nn.Module], batch: int) -> None:
    cell = kind(8, 16)
    assert close(traced(cell, torch.ones(batch, 8)), counted(cell, torch.ones(batch, 8)))


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch has no grouped_mm")
def test_grouped_products() -> None:
    x, weights = torch.ones(6, 16).bfloat16(), torch.ones(3, 16, 24).bfloat16()
    by_rows = traced(lambda: F.grouped_mm(x, weights, offs=ENDS))
    assert by_rows.torch == 2 * 6 * 16 * 24
    a, b = torch.ones(16, 8).bfloat16(), torch.ones(8, 24).bfloat16()
    assert traced(lambda: F.grouped_mm(a, b, offs=ENDS)).torch == 2 * 16 * 8 * 24


@torch.library.custom_op("gradd_work::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    return x.flip(0)


@turned.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


turned.register_autograd(lambda ctx, grad: grad.flip(0))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "extension": turned,
    "autograd.Function": lambda x: Doubled.apply(x),
    "svd": lambda x: torch.linalg.svdvals(x),
    "inverse": lambda x: torch.inverse(x @ x.T + torch.eye(4)),
}


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.usefixtures("shared_daemon")
def test_a_cut_of_an_unknown_cost_gives_no_share(name: str, caplog: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return UNKNOWN[name](self.layer(x)).sum() + self.layer(x).sum()

    ORTModule(Net())(torch.randn(4, 8)).backward()
    texts = [r.getMessage() for r in caplog.records if "in PyTorch" in r.getMessage()]
    assert len(texts) == 1 and "the daemon's share, is not known" in texts[0]
    assert "%" not in texts[0]


@pytest.mark.usefixtures("shared_daemon")
def test_the_share_beside_a_product_of_complex_numbers(caplog: Any) -> None:
    """Also: one warning for the graphs of one line, and no "100 %" where a part is missing."""

    class Net(nn.Module):
        def __init__(self, wide: int, hidden: int) -> None:
            super().__init__()
            self.layer, self.tail = nn.Linear(8, wide), nn.Linear(wide, 8)
            self.weight = nn.Parameter(torch.randn(8, hidden))

        def forward(self, x: Tensor) -> Tensor:
            h = self.tail(self.layer(x))
            return (torch.complex(h, h) @ torch.complex(self.weight, self.weight)).real.sum()

    for sizes, said in (((8, 4096), "Less than 1 %"), ((4096, 1), "More than 99 %")):
        caplog.clear()
        model = ORTModule(Net(*sizes))
        model(torch.randn(4, 2, 8)).backward()
        with torch.no_grad():
            model(torch.randn(4, 2, 8))
        assert model.gradd_stats()["graphs"] == 2
        texts = [r.getMessage() for r in caplog.records if "in PyTorch" in r.getMessage()]
        assert len(texts) == 1 and said in texts[0]

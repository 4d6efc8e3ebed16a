"""Numbers beside bf16 and f16: computed with as they are, as in PyTorch, not as the nearest half.

A number that is rounded puts every value, or every gradient, off by one common factor, which no
comparison of single elements shows; so errors here are of whole tensors, against float64, and ours
may not be larger than PyTorch's own. 1/N of a mean is such a number, and vanishes in f16 for a
large N whatever the loss is scaled by.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradd import ORTModule

pytestmark = [pytest.mark.one_in(4), pytest.mark.usefixtures("shared_daemon")]

Form = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
WITH_NUMBERS: dict[str, Form] = {
    "x * 0.1": lambda x, y: x * 0.1,
    "0.1 + x": lambda x, y: 0.1 + x,
    "x - 0.1": lambda x, y: x - 0.1,
    "0.1 - x": lambda x, y: 0.1 - x,
    "x / 0.07": lambda x, y: x / 0.07,
    "x / 301": lambda x, y: x / 301,
    "0.7 / x": lambda x, y: 0.7 / (x * x + 1),
    "x / len(x)": lambda x, y: x / len(x),
    "x / size": lambda x, y: x.sum(0) / x.shape[0],
    "alpha": lambda x, y: torch.add(x, y, alpha=0.1),
    "alpha of 3": lambda x, y: torch.add(x, y, alpha=3),
    "sub alpha": lambda x, y: torch.sub(x, y, alpha=0.1),
    "integer": lambda x, y: x * 1001,
    "in place, one by one": lambda x, y: x.clone().mul_(0.3).div_(301),
    "two": lambda x, y: (x * 0.3 + 1e-3) / 7.7,
    "in place": lambda x, y: (x * y).mul_(0.3).add_(1e-3),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.1),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y * y + 1, value=0.3),
    "baddbmm": lambda x, y: torch.baddbmm(y[None], x[None], y[None, :24], beta=0.3, alpha=0.6),
    "addbmm": lambda x, y: torch.addbmm(y, x[None], y[None, :24], beta=0.3, alpha=0.6),
    "addmv": lambda x, y: torch.addmv(y[:, 0], x, y[0], beta=0.3, alpha=0.6),
    "addr": lambda x, y: torch.addr(y, x[:, 0], x[0], beta=0.3, alpha=0.6),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "rsqrt": lambda x, y: torch.rsqrt(x * x + 0.1),
    "round": lambda x, y: x + torch.round(20 * y, decimals=2),
    "leaky_relu": lambda x, y: F.leaky_relu(x, 0.01),
    "elu": lambda x, y: F.elu(x, 0.7),
    "softplus": lambda x, y: F.softplus(x, 0.7),
    "erf": lambda x, y: torch.erf(x),
    "pow": lambda x, y: (x * x + 1) ** 1.5,
    "gelu": lambda x, y: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "weighted": lambda x, y: 0.9 * x + 0.1 * y,
}
MEANS: dict[str, Form] = {
    "mean": lambda x, y: x.mean(),
    "of squares": lambda x, y: x.pow(2).mean(),
    "dims": lambda x, y: x.mean((0, 1)),
    "of means": lambda x, y: x.mean(1).mean(),
    "sum / n": lambda x, y: x.sum() / x.numel(),
    "l1": lambda x, y: F.l1_loss(x, y),
    "mse": lambda x, y: F.mse_loss(x, y),
    "bce": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "kl": lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "kl mean": lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="mean"),
    "nll": lambda x, y: F.poisson_nll_loss(x, y.sigmoid()),
}
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])


class Net(nn.Module):
    """A form of a linear layer's values and of given ones."""

    def __init__(self, form: Form, width: int = 24) -> None:
        super().__init__()
        self.layer = nn.Linear(8, width)
        self.form = form

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.form(self.layer(x), y)


class Pair(nn.Module):
    """A form of two tensors."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.form(x, y)


def _errors(form: Form, dtype: torch.dtype, rows: int, scale: float) -> list[list[float]]:
    """Of PyTorch and of the daemon: relative errors of the result and of the gradients."""
    torch.manual_seed(5)
    plain = Net(form).to(dtype)
    exact, wrapped = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    model = ORTModule(wrapped)
    x, y = torch.randn(rows, 8).to(dtype), torch.randn(rows, 24).to(dtype)
    wanted = exact(x.double(), y.double())
    weights = torch.randn(wanted.shape) if wanted.dim() else torch.ones(())
    results = [wanted, plain(x, y), model(x, y)]
    for result in results:
        (result * weights.to(result.dtype) * scale).sum().backward()
    assert not model.gradd_stats()["fallbacks"]
    found = []
    for result, net in zip(results[1:], (plain, wrapped), strict=True):
        pairs = [(result, wanted), (net.layer.bias.grad, exact.layer.bias.grad)]
        pairs.append((net.layer.weight.grad, exact.layer.weight.grad))
        found.append([float((a.double() - b).norm() / b.norm()) for a, b in pairs])
    return found


def _check(found: list[list[float]], slack: float) -> None:
    theirs, ours = found
    for own, error in zip(theirs, ours, strict=True):
        assert error <= 1.2 * own + slack, found


@HALVES
@pytest.mark.parametrize("form", WITH_NUMBERS)
def test_a_number_is_not_rounded(form: str, dtype: torch.dtype) -> None:
    step = 2.0**-9 if dtype is torch.bfloat16 else 2.0**-12
    _check(_errors(WITH_NUMBERS[form], dtype, 301, 1.0), step / 2)


@HALVES
@pytest.mark.parametrize("form", MEANS)
def test_means_of_many(form: str, dtype: torch.dtype) -> None:
    """240,000 elements: 1/N is a small part of the least normal f16.

    The gradient of a mean is rounded once for all elements, that of torch's fused losses in each.
    """
    step = 2.0**-9 if dtype is torch.bfloat16 else 2.0**-12
    _check(_errors(MEANS[form], dtype, 10_000, 1024.0), 2 * step)


@HALVES
def test_a_slope_is_no_difference_of_rounded_numbers(dtype: torch.dtype) -> None:
    """exp(x) of a large negative x, where elu itself is -1."""
    results = []
    for module in (Pair(lambda x, y: F.elu(x, 0.7)), ORTModule(Pair(lambda x, y: F.elu(x, 0.7)))):
        x = torch.linspace(-12, 2, 57).to(dtype).requires_grad_()
        module(x, x.detach()).sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(*results, rtol=2.0**-6, atol=0)


BETWEEN: dict[str, tuple[Form, float, float]] = {
    "product": (lambda x, y: torch.addcmul(x, x, y, value=1e-3), 400.0, 300.0),
    "factor of its gradient": (
        lambda x, y: torch.addcmul(x, x, y, value=1e-4) * 1000,
        400.0,
        100.0,
    ),
    "root": (lambda x, y: torch.rsqrt(x) + y, 6e-8, 1.0),
    "decimals": (lambda x, y: x + torch.round(y, decimals=3), 1.0, 300.0),
    "factor of products": (
        lambda x, y: torch.baddbmm(x[None], y[None], y[None], alpha=1e-2),
        1.0,
        200.0,
    ),
    "factor of their sum": (
        lambda x, y: torch.addbmm(x, y[None], y[None], alpha=1e-2),
        1.0,
        200.0,
    ),
    "factor of a vector": (lambda x, y: torch.addmv(x[0], y, y[0], alpha=1e-2), 1.0, 200.0),
    "factor of a sum": (lambda x, y: torch.addr(x, y[:, 0], y[0], alpha=1e-3), 1.0, 600.0),
}


@pytest.mark.parametrize("form", BETWEEN)
def test_nothing_overflows_between_steps(form: str) -> None:
    """A formula that torch computes in f32 and rounds once has no infinite steps in f16."""
    written, *values = BETWEEN[form]
    results = []
    for module in (Pair(written), ORTModule(Pair(written), strict=True)):
        pair = [torch.full((4, 4), v, dtype=torch.float16, requires_grad=True) for v in values]
        out = module(*pair)
        out.sum().backward()
        results.append([out.detach(), *(x.grad for x in pair if x.grad is not None)])
    for theirs, ours in zip(*results, strict=True):
        assert torch.equal(theirs.isfinite(), ours.isfinite()), (theirs, ours)
        finite = theirs.isfinite()
        torch.testing.assert_close(ours[finite], theirs[finite], rtol=4e-3, atol=1e-6)


class Scores(nn.Module):
    """Attention of three dimensions: one head, no axis for it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.kind = kind

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x) for part in self.parts)
        given = mask[:, None] if self.kind == "mask" else None
        return F.scaled_dot_product_attention(q, k, v, given, is_causal=self.kind == "causal")


@HALVES
@pytest.mark.parametrize("kind", ["plain", "causal", "mask"])
def test_attention_without_heads_under_autocast(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    plain = Scores(kind)
    wrapped = copy.deepcopy(plain)
    model = ORTModule(wrapped, strict=True)
    x, mask = torch.randn(4, 6, 16), torch.arange(6)[None] < torch.tensor([6, 5, 4, 3])[:, None]
    for net in (plain, model):
        with torch.autocast("cpu", dtype):
            result = net(x, mask)
        assert result.dtype is dtype
        result.float().pow(2).mean().backward()
    largest = max(float(p.grad.abs().max()) for p in plain.parameters())
    for p, q in zip(plain.parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0.05, atol=2e-2 * largest)


PATTERNS: dict[str, tuple[str, Form]] = {
    "rms norm": (
        "RMSNormalization",
        lambda x, y: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    ),
    "rms by root": (
        "RMSNormalization",
        lambda x, y: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5),
    ),
    "gelu": ("Gelu", WITH_NUMBERS["gelu"]),
    "quick gelu": ("Swish", lambda x, y: x * torch.sigmoid(1.702 * x)),
}


@HALVES
@pytest.mark.parametrize("form", PATTERNS)
def test_patterns_with_numbers_are_recognised(form: str, dtype: torch.dtype) -> None:
    """Between casts, too, that keep a number from being rounded."""
    op, written = PATTERNS[form]
    model = ORTModule(Net(written).to(dtype), strict=True)
    model(torch.randn(9, 8).to(dtype), torch.randn(9, 24).to(dtype)).float().sum().backward()
    counts = model.gradd_explain().counts()
    assert counts.get(op) == 1 and set(counts) <= {op, "Linear", "Cast", "ReduceSum"}, counts

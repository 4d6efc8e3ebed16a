"""TRL's log-probabilities of labels in one graph, of its function by the stand-in below.

tests/python/trainer/test_other_trainers.py has the function itself.
"""

from __future__ import annotations

import copy
import inspect
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from gradd import ORTModule
from gradd.dynamo.tracers import log_probs

pytestmark = pytest.mark.usefixtures("shared_daemon")
ALL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
LAST = (None, 1.0, ALL)  # defaults of the last arguments
NAMES = (  # of the arguments in TRL
    *("ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size"),
    *("final_logit_softcapping", "logit_scale", "outputs"),
)


class ChunkedLogProbFunction(torch.autograd.Function):
    """Makes logits in pieces of a buffer, as TRL's does: a break of Dynamo's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        *given: Any,
    ) -> Any:
        temperature, chunk_size, cap, scale, outputs = (*given, *LAST[len(given) - 2 :])
        ctx.given = (temperature, cap, scale)
        ctx.save_for_backward(hidden, weight, bias, targets)
        buffer = torch.empty(hidden.shape[0], chunk_size)
        pieces = []
        for start in range(0, weight.shape[0], chunk_size):
            rows = weight[start : start + chunk_size]
            tile = buffer[:, : rows.shape[0]]
            torch.mm(hidden, rows.t(), out=tile)
            pieces.append(tile.clone())
        z = torch.cat(pieces, 1) if bias is None else torch.cat(pieces, 1) + bias
        found = _found(_scaled(z, *ctx.given), targets, outputs)
        ctx.mark_non_differentiable(*(x for x in found[2:] if x is not None))
        return found

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_entropy: Any, *rest: Any) -> Any:
        *given, targets = ctx.saved_tensors
        leaves = [x if x is None else x.detach().requires_grad_() for x in given]
        with torch.enable_grad():
            z = _scaled(nn.functional.linear(*leaves), *ctx.given)
            both = _found(z, targets, ALL)[:2]
            known = [x for x in leaves if x is not None]
            pairs = [
                (x, g) for x, g in zip(both, (grad, grad_entropy), strict=True) if g is not None
            ]
            results, gradients = zip(*pairs, strict=True)
            found = torch.autograd.grad(results, known, gradients)
        return *found, *[None] * (9 - len(known))


def _scaled(z: torch.Tensor, temperature: float, cap: float | None, scale: float) -> torch.Tensor:
    z = z * scale
    return (z if cap is None else cap * torch.tanh(z / cap)) / temperature


def _found(z: torch.Tensor, targets: torch.Tensor, outputs: tuple[str, ...]) -> tuple:
    p = z.log_softmax(-1)
    made = {
        "entropy": -(p.exp() * p).sum(-1),
        "log_sum_sq_probs": (2 * p.detach()).exp().sum(-1).log(),
        "mean_logits": z.detach().mean(-1),
        "is_top1": z.detach().argmax(-1) == targets,
    }
    return p.gather(1, targets[:, None])[:, 0], *(made[n] if n in outputs else None for n in ALL)


class Head(nn.Module):
    """A head with its loss behind a layer."""

    def __init__(self, function: Any, bias: bool, *given: Any) -> None:
        super().__init__()
        self.function, self.given = function, given
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 11, bias=bias)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.function.apply(self.body(x), self.head.weight, self.head.bias, y, *self.given)


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in, where the function is looked for."""
    kind = type(ChunkedLogProbFunction.__name__, (ChunkedLogProbFunction,), {})
    for name in ("forward", "backward"):
        own = getattr(ChunkedLogProbFunction, name)
        copied = types.FunctionType(own.__code__, globals(), name)
        copied.__module__ = log_probs.MODULE
        if name == "forward":
            parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in NAMES]
            copied.__signature__ = inspect.Signature(parameters)
        setattr(kind, name, staticmethod(copied))
    module = types.ModuleType(log_probs.MODULE)
    setattr(module, log_probs.NAME, kind)
    monkeypatch.setitem(sys.modules, log_probs.MODULE, module)
    return kind


def _compare(theirs: nn.Module, **options: Any) -> dict[str, Any]:
    """Two calls of different sizes against PyTorch; what gradd counts."""
    ours = ORTModule(copy.deepcopy(theirs), **options)
    for n in (9, 12):
        x, y = torch.randn(n, 6), torch.arange(n) % 11
        results = []
        for net in (theirs, ours):
            first, entropy, *others = net(x, y)
            loss = (first * torch.arange(n)).sum() + (0 if entropy is None else entropy.sin().sum())
            net.zero_grad()
            loss.backward()
            assert not any(t.requires_grad for t in others if t is not None)
            results.append(([first, entropy, *others], [p.grad for p in net.parameters()]))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    return ours.gradd_stats()


GIVEN = {
    "all": (True, 0.7, 4, 3.0, 0.5, ALL),
    "defaults": (False, 1.0, 4),
    "one": (True, 1.0, 100, None, 1.0, ("log_probs",)),
    "some": (False, 2.0, 5, None, 1.0, ("log_probs", "is_top1", "entropy")),
}


@pytest.mark.parametrize("name", GIVEN)
def test_one_graph(name: str, function: Any) -> None:
    torch.manual_seed(0)
    stats = _compare(Head(function, *GIVEN[name]), strict=True)
    assert stats["captures"] == 1 and stats["in_torch"] == {}


def test_another_function_of_that_name_stays(function: Any) -> None:
    """With other arguments, or replaced by a script: PyTorch runs it, with its own results."""

    def forward(ctx: Any, *given: Any) -> Any:
        return tuple(
            None if x is None else x * 2 for x in ChunkedLogProbFunction.forward(ctx, *given)
        )

    function.forward = staticmethod(forward)
    torch.manual_seed(0)
    net = Head(function, *GIVEN["all"])
    x, y = torch.randn(9, 6), torch.arange(9) % 11
    want = net(x, y)
    for module in (__name__, log_probs.MODULE):
        forward.__module__ = module
        torch._dynamo.reset()
        ours = ORTModule(copy.deepcopy(net))
        torch.testing.assert_close(ours(x, y)[0], want[0])
        assert ours.gradd_stats()["in_torch"]

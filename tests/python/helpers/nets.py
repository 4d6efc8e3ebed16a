"""Small networks and comparisons that the adapter's tests share."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from gradd import ORTModule


def determinants(x: torch.Tensor) -> torch.Tensor:
    """x, as determinants of matrices of one number: an operator that the daemon does not have."""
    return torch.linalg.det(x[..., None, None])


class Determinants(nn.Module):
    """determinants() as a layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return determinants(x)


class Net(nn.Module):
    """Two linear layers; the loss is in the graph when targets are given."""

    def __init__(self, width: int = 16, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(8, width)
            self.second = nn.Linear(width, 4)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        hidden = self.dropout(torch.relu(self.first(x)))
        scores = self.second(hidden)
        if y is None:
            return scores
        return nn.functional.cross_entropy(scores, y), scores


class Heads(nn.Module):
    """A loss, outputs that it does not depend on, and buffers that a call in train mode changes."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body, self.head, self.other = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 3)
        self.register_buffer("mean", torch.ones(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        if self.training:
            self.mean.copy_(0.9 * self.mean + 0.1 * hidden.detach().mean(0))
            self.calls.add_(1)
        hidden = hidden - self.mean
        other = self.other(hidden)
        return {"loss": self.head(hidden).square().mean(), "other": other, "best": other.argmax(-1)}


class Relu(nn.Module):
    """One ReLU between two layers, its sums long enough to be rounded differently."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(300, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu(self.inner(x)))


class Words(nn.Module):
    """Embeds tokens and guesses labels; -100 is ignored."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed, self.out = nn.Embedding(13, 8), nn.Linear(8, 13)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        scores = self.out(self.embed(ids))
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores


def batch(size: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and class numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 8, generator=generator)
    return x, torch.randint(0, 4, (size,), generator=generator)


def pair(net: nn.Module | None = None, **options: Any) -> tuple[ORTModule, nn.Module]:
    """A network through the daemon, and the same network in PyTorch."""
    eager = net if net is not None else Net()
    return ORTModule(copy.deepcopy(eager), strict=True, **options), eager


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, what: str = "values") -> None:
    """The bound of the parity tests for one tensor."""
    assert ours.shape == theirs.shape, f"{what}: shape {ours.shape}, expected {theirs.shape}"
    difference = (ours.detach() - theirs.detach()).abs().max().item() if ours.numel() else 0.0
    scale = theirs.detach().abs().max().item() if theirs.numel() else 0.0
    assert difference <= 1e-4 * scale + 1e-7, f"{what} differ by {difference}, scale {scale}"


def assert_same_grads(ours: nn.Module, theirs: nn.Module) -> None:
    """Every parameter has the same gradient on both sides, or none on both."""
    named = dict(theirs.named_parameters())
    seen = 0
    for name, parameter in ours.named_parameters():
        expected = named[name].grad
        if expected is None:
            assert parameter.grad is None, f"{name} has a gradient, PyTorch has none"
            continue
        assert parameter.grad is not None, f"{name} has no gradient"
        assert_close(parameter.grad, expected, f"gradients of {name}")
        seen += 1
    assert seen, "no parameter has a gradient: the comparison would prove nothing"


def loss_of(result: Any) -> torch.Tensor:
    """The loss of a Net's result."""
    return result[0]


class Asserting(nn.Module):
    """As in XLM: a number from data, which a trace does not know, is compared with a size.

    Here, because pytest writes the assertions of test modules anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert (x > 9).long().sum().item() <= x.shape[0]
        return self.lin(x)


def step_agrees(ours: nn.Module, theirs: nn.Module, x: torch.Tensor) -> None:
    """One forward and backward of both: the same result and the same gradients."""
    for model in (ours, theirs):
        model.zero_grad()
    mine, right = ours(x), theirs(x)
    assert_close(mine, right)
    mine.sum().backward(), right.sum().backward()
    assert_same_grads(ours, theirs)

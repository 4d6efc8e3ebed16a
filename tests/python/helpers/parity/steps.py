"""Trains a module through the daemon next to its twin in PyTorch and compares every step.

Both sides start from equal parameters and run freely: own forward, own backward, own SGD step. At
each step the loss agrees to 1e-5 relative and every gradient g of PyTorch to

    |difference| <= 1e-4 * max(largest entry of g, 1e-4 * largest entry of all gradients)

or it is within four times PyTorch's own error, measured against a third twin in double precision
that trains along (made only when it is asked for). A parameter without a gradient has none on both
sides. `Pair.finish` also proves that the daemon did the work: one capture, self-checked, and no
fallback.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradd import ORTModule

Batch = dict[str, Any]
Loss = Callable[[nn.Module, Batch], torch.Tensor]

LOSS_BOUND = 1e-5
GRAD_BOUND = 1e-4
FLOOR = 1e-4
WORSE_THAN_TORCH = 4.0


def loss_in_graph(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that the model returns first, as Hugging Face models do."""
    result = model(**batch)
    return result[0] if isinstance(result, tuple) else result.loss


@dataclass
class Side:
    """One of the twins: a module, its optimizer, its last loss."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: float = 0.0

    @classmethod
    def of(cls, model: nn.Module, rate: float) -> Side:
        trained = [p for p in model.parameters() if p.requires_grad]
        return cls(model, torch.optim.SGD(trained, lr=rate))

    def passes(self, batch: Batch, loss_of: Loss) -> None:
        """Forward and backward; gradients replace those of the last step."""
        self.optimizer.zero_grad()
        loss = loss_of(self.model, batch)
        loss.backward()
        self.loss = float(loss.detach())

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: p.grad for name, p in self.model.named_parameters()}


class Pair:
    """A module in the daemon (`ours`) and its twin in PyTorch (`theirs`).

    Args:
        model: The module; PyTorch trains this one, the daemon a copy.
        loss_of: Loss of a model and a batch.
        rate: Learning rate of both.
    """

    def __init__(self, model: nn.Module, loss_of: Loss = loss_in_graph, rate: float = 0.1) -> None:
        self._loss_of = loss_of
        self._rate = rate
        self._start = copy.deepcopy(model)
        self._history: list[Batch] = []
        self._exact: Side | None = None
        self._exact_steps = 0
        self.first = copy.deepcopy(model.state_dict())
        self.ours = Side.of(ORTModule(copy.deepcopy(model), strict=True), rate)
        self.theirs = Side.of(model, rate)

    @property
    def wrapped(self) -> ORTModule:
        """The module that runs in the daemon."""
        return self.ours.model  # type: ignore[return-value]

    def step(self, batch: Batch) -> None:
        """One compared step of both sides."""
        self._history.append(batch)
        for side in (self.ours, self.theirs):
            side.passes(copy.deepcopy(batch), self._loss_of)
        self._compare(f"step {len(self._history)}")
        for side in (self.ours, self.theirs):
            side.optimizer.step()

    def _compare(self, where: str) -> None:
        ours, theirs = self.ours.loss, self.theirs.loss
        if not abs(ours - theirs) <= LOSS_BOUND * abs(theirs):
            truth = self._truth().loss
            own = abs(theirs - truth)
            assert abs(ours - truth) <= WORSE_THAN_TORCH * own, (
                f"{where}: loss {ours!r}, PyTorch {theirs!r}, in double precision {truth!r}"
            )
        expected, got = self.theirs.gradients(), self.ours.gradients()
        assert got.keys() == expected.keys()
        largest = max(_largest(g) for g in expected.values() if g is not None)
        assert largest > 0.0, f"{where}: all gradients are zero, which proves nothing"
        for name, want in expected.items():
            self._compare_gradient(f"{where}: {name}", name, got[name], want, largest)

    def _compare_gradient(
        self,
        where: str,
        name: str,
        got: torch.Tensor | None,
        want: torch.Tensor | None,
        largest: float,
    ) -> None:
        if want is None or got is None:
            assert got is want, f"{where}: one side has a gradient, the other has none"
            return
        assert got.shape == want.shape and got.dtype == want.dtype, where
        difference = _largest(got - want)
        if difference <= GRAD_BOUND * max(_largest(want), FLOOR * largest):
            return
        truth = self._truth().gradients()[name]
        own = _largest(want.double() - truth)
        assert _largest(got.double() - truth) <= WORSE_THAN_TORCH * own, (
            f"{where}: gradient off by {difference:.3g} (largest entry {_largest(want):.3g}, of "
            f"all {largest:.3g}; PyTorch's own error {own:.3g})"
        )

    def _truth(self) -> Side:
        """The twin in double precision, after the passes of the current step."""
        if self._exact is None:
            self._exact = Side.of(copy.deepcopy(self._start).double(), self._rate)
        while self._exact_steps < len(self._history):
            if self._exact_steps:
                self._exact.optimizer.step()
            batch = {k: _double(v) for k, v in self._history[self._exact_steps].items()}
            self._exact.passes(batch, self._loss_of)
            self._exact_steps += 1
        return self._exact

    def finish(self, captures: int = 1, more: int = 0) -> None:
        """Asserts that the daemon did the work, with so many captures, or a few more, and that
        weights moved.
        """
        stats = self.wrapped.gradd_stats()
        assert stats["fallbacks"] == {}, f"calls ran in PyTorch, by reason: {stats['fallbacks']}"
        found = stats["captures"]
        assert captures <= found <= captures + more, f"{found} captures, not {captures}"
        assert stats["self_checks"] >= captures, f"a capture was not compared with PyTorch: {stats}"
        assert stats["forwards"] >= len(self._history) + captures, (
            f"the daemon ran fewer forwards than {len(self._history)} steps and {captures} checks: "
            f"{stats}"
        )
        for name, parameter in self.wrapped.named_parameters():
            moved = not torch.equal(parameter, self.first[name])
            trained = parameter.requires_grad and parameter.grad is not None
            if trained and _largest(parameter.grad) > 1e-6:
                assert moved, f"{name} has a gradient and did not move"
            if not parameter.requires_grad:
                assert not moved and parameter.grad is None, f"frozen {name} was touched"


def run(
    model: nn.Module,
    batches: list[Batch],
    others: list[Batch] = (),  # type: ignore[assignment]
    *,
    loss_of: Loss = loss_in_graph,
    captures: int = 1,
    constants: int = 0,
    rate: float = 0.1,
) -> Pair:
    """Compared steps on `batches`, then on `others`, whose sizes may not cost a capture.

    Axes of size 1 are the exception: `captures` times the sets of them are expected, and at most
    `constants` more for what Dynamo takes for constant in a first call.

    Returns:
        The pair, for further questions.
    """
    pair = Pair(model, loss_of, rate)
    for batch in batches:
        pair.step(batch)
    expected = captures * len({*map(_ones, batches)})
    assert expected <= pair.wrapped.gradd_stats()["captures"] <= expected + constants
    for batch in others:
        pair.step(batch)
    pair.finish(captures * len({*map(_ones, [*batches, *others])}), constants)
    return pair


def _ones(batch: Batch) -> Hashable:
    """Which axes have size 1: the tracer takes any other size for more than that."""
    tensors = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}
    return tuple((k, tuple(n == 1 for n in t.shape)) for k, t in sorted(tensors.items()))


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _double(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floating else copy.deepcopy(value)

"""Trains a module in bf16 or f16 through the daemon, next to its twins in PyTorch's and in fp32.

Three sides start from equal values and run freely: own forward, own backward, own SGD step. Over
the run the distance of the daemon from fp32 may be at most twice that of PyTorch in the same half,
for the loss and for every gradient. The distance of a gradient at one step is the length of the
difference, divided by the length of the fp32 gradient or by 1e-4 of the longest of all, whichever
is more; that of a run is the root of the mean square over its steps. Below half a step between
numbers of the half (2^-9, 2^-12) a distance is no error: PyTorch's is smaller than that only by
chance, as with losses and with biases of three entries.

Two ways into a half: "parameters" (the module and its float inputs converted) and "autocast"
(float32 parameters, the call inside torch.autocast).
"""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gradd import ORTModule
from helpers.parity.steps import Batch, Loss, Side, loss_in_graph

FLOOR = 1e-4
TWICE = 2.0
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
WAYS = ("parameters", "autocast")


def cast(way: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Context of a call."""
    if way == "autocast":
        return torch.autocast("cpu", dtype)
    return contextlib.nullcontext()


def converted(batch: Batch, dtype: torch.dtype) -> Batch:
    """A copy whose float tensors have this type."""
    return {
        name: value.to(dtype, copy=True)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else copy.deepcopy(value)
        for name, value in batch.items()
    }


def mean(values: list[float]) -> float:
    """Root of the mean square."""
    return math.sqrt(sum(v * v for v in values) / len(values))


@dataclass
class Report:
    """Distances from fp32 by name, per step: of the daemon and of PyTorch."""

    rounding: float = ROUNDING[torch.bfloat16]
    ours: dict[str, list[float]] = field(default_factory=dict)
    theirs: dict[str, list[float]] = field(default_factory=dict)

    def note(self, name: str, ours: float, theirs: float) -> None:
        self.ours.setdefault(name, []).append(ours)
        self.theirs.setdefault(name, []).append(theirs)

    def rows(self) -> list[tuple[float, float, float, str]]:
        """(ratio to the bound's half, distance of the daemon, of PyTorch, name), sorted."""
        pairs = [(mean(self.ours[n]), mean(self.theirs[n]), n) for n in self.ours]
        return sorted((a / max(b, self.rounding), a, b, n) for a, b, n in pairs)

    def check(self) -> None:
        ratio, ours, theirs, name = self.rows()[-1]
        assert ratio <= TWICE, f"{name} is {ours:.3g} from fp32, PyTorch's {theirs:.3g}"

    def __str__(self) -> str:
        rows = self.rows()
        ratio, ours, theirs, name = rows[-1]
        return (
            f"ratio {rows[len(rows) // 2][0]:.2f} in the median, {ratio:.2f} at worst ({name}: "
            f"{ours:.2g}, PyTorch {theirs:.2g})"
        )


class Triple:
    """A module in the daemon, its twin in PyTorch's half, and its twin in fp32.

    Args:
        model: The module in fp32; it is copied.
        way: One of WAYS.
        loss_of: Loss of a model and a batch.
        rate: Learning rate of all.
        half: torch.bfloat16 or torch.float16.
    """

    def __init__(
        self,
        model: nn.Module,
        way: str,
        loss_of: Loss = loss_in_graph,
        rate: float = 0.05,
        half: torch.dtype = torch.bfloat16,
    ) -> None:
        start = copy.deepcopy(model)
        self.way = way
        self.half = half
        self.dtype = torch.float32
        if way == "parameters":
            self.dtype = half
            start = start.to(half)
        self._loss_of = loss_of
        self.report = Report(ROUNDING[half])
        self.steps = 0
        self.ours = Side.of(ORTModule(copy.deepcopy(start), strict=True), rate)
        self.theirs = Side.of(copy.deepcopy(start), rate)
        self.exact = Side.of(copy.deepcopy(start).float(), rate)

    def step(self, batch: Batch) -> None:
        """One compared step of all sides."""
        self.steps += 1
        for side in (self.ours, self.theirs):
            given = converted(batch, self.dtype) if self.way == "parameters" else batch
            with cast(self.way, self.half):
                side.passes(copy.deepcopy(given), self._loss_of)
        given = converted(batch, self.dtype) if self.way == "parameters" else batch
        self.exact.passes(converted(given, torch.float32), self._loss_of)
        self._compare_losses()
        self._compare_gradients()
        for side in (self.ours, self.theirs, self.exact):
            side.optimizer.step()

    def _compare_losses(self) -> None:
        exact = self.exact.loss
        off, own = (abs(s.loss - exact) / abs(exact) for s in (self.ours, self.theirs))
        assert math.isfinite(off), f"step {self.steps}: loss {self.ours.loss!r}"
        self.report.note("loss", off, own)

    def _compare_gradients(self) -> None:
        ours, theirs = self.ours.gradients(), self.theirs.gradients()
        exact = self.exact.gradients()
        assert ours.keys() == theirs.keys() == exact.keys()
        floor = FLOOR * max(float(g.norm()) for g in exact.values() if g is not None)
        assert floor > 0.0, f"step {self.steps}: all gradients are zero, which proves nothing"
        for name, truth in exact.items():
            got, own = ours[name], theirs[name]
            if truth is None or own is None or got is None:
                assert got is own is truth, f"step {self.steps}: {name}: a side has no gradient"
                continue
            assert got.dtype == own.dtype == dict(self.theirs.model.named_parameters())[name].dtype
            scale = max(float(truth.norm()), floor)
            off, bound = (float((g.float() - truth).norm()) / scale for g in (got, own))
            assert math.isfinite(off), f"step {self.steps}: gradient of {name}"
            self.report.note(name, off, bound)

    def finish(self) -> None:
        """Asserts that the daemon did the work, in one capture, and that weights moved."""
        stats = self.ours.model.gradd_stats()
        assert stats["fallbacks"] == {}, f"calls ran in PyTorch, by reason: {stats['fallbacks']}"
        assert stats["captures"] == 1 and stats["self_checks"] >= 1, (
            f"one capture, checked: {stats}"
        )
        assert stats["forwards"] >= self.steps + 1, f"fewer forwards than steps: {stats}"
        moved = [
            not torch.equal(p.detach().float(), q.detach().float())
            for p, q in zip(self.ours.model.parameters(), self.first, strict=True)
        ]
        assert any(moved)

    def train(self, batches: list[Batch]) -> Report:
        """Compared steps on the batches, then `finish`."""
        self.first = [p.detach().clone() for p in self.ours.model.parameters()]
        for batch in batches:
            self.step(batch)
        self.report.check()
        self.finish()
        return self.report

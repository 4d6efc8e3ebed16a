"""Detects writes to a tensor: the values that a run has read must still be there for a repetition.

There are three sources. Version counters record every write through torch except those of fused
optimizers. So the steps of all torch optimizers are counted as well, each for the parameters that
it has. Writes through `.data`, numpy or DLPack leave no trace in either; for them the daemon takes
fingerprints of the parameters with each forward that may run again, and compares them before it
does: fingerprints of drawn lines, which detect writes of all elements, and fingerprints of all
bytes if such an access was noticed (watch.py) since the forward, or if memory was given away before
and is still held.
"""

from __future__ import annotations

import operator
import threading
import types
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradd.memory.tensor_classes import is_dense
from gradd.memory.watch import accesses, untyped_storage


class _Steps:
    """Steps of optimizers in this process."""

    count = 0  # of all optimizers
    gone = 0  # number of the last step of an optimizer that no longer exists


steps = _Steps()
version_of = operator.attrgetter("_version")
_hook_lock = threading.Lock()
_hooked = False


class _Mark:
    """Number of an optimizer's last step."""

    step = 0

    def __del__(self) -> None:
        if steps is not None:  # at the end of the process there are no globals
            steps.gone = max(steps.gone, self.step)


_marks: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Mark] = weakref.WeakKeyDictionary()


def _after_optimizer_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    steps.count += 1
    _marks.setdefault(optimizer, _Mark()).step = steps.count


def watch_optimizers() -> None:
    """From now on the steps of all torch optimizers are counted."""
    global _hooked
    with _hook_lock:
        if not _hooked:
            register_optimizer_step_post_hook(_after_optimizer_step)
            _hooked = True


class Snapshot(types.SimpleNamespace):
    """Some tensors at a moment. A run makes its own from the attributes, others by of().

    Attributes:
        tensors: Those that have versions: no optimizer takes others.
        versions: Of each.
        steps: How many steps of optimizers there had been.
        accesses: The number of accesses, see watch.py.
        aliased: Memory of one of them was given away before, and is still held.
        fingerprint: Of their drawn lines, taken by the daemon with the forward that read them.
        sum: Of all their bytes.
    """

    fingerprint: int | None = None
    sum: int | None = None

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> Snapshot:
        """These tensors as they are now."""
        versioned = [t for t in tensors if not t.is_inference()]
        return Snapshot(
            tensors=versioned,
            versions=list(map(version_of, versioned)),
            steps=steps.count,
            accesses=accesses.count,
            aliased=accesses.settle(tensors),
        )

    def hear(self, reply: dict[str, Any]) -> None:
        """Takes the daemon's answer to a forward that has read them."""
        self.fingerprint, self.sum = reply.get("gen"), reply.get("sum")

    def look(self) -> int:
        """Which fingerprints the daemon is to take: 2 = of all bytes as well."""
        return 2 if accesses.are_expected() or self.aliased else 1

    def expected(self) -> dict[str, Any]:
        """Fields of a repeated forward: the fingerprints that the daemon must find."""
        if self.fingerprint is None:
            return {}
        if self._is_given_away() and self.sum is not None:
            return {"gen": self.fingerprint, "sum": self.sum}
        return {"gen": self.fingerprint}

    def has_changed(self) -> bool:
        """True if one of them has been written since, or may have been without a trace.

        False leaves the daemon's findings, see expected().
        """
        if list(map(version_of, self.tensors)) != self.versions:
            return True
        if self._is_given_away() and self.fingerprint is not None and self.sum is None:
            return True
        return self.steps != steps.count and self._was_stepped()

    def is_stepped_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer has one of them."""
        return not self._storages().isdisjoint(_storages(optimizer))

    def _is_given_away(self) -> bool:
        return self.aliased or self.accesses != accesses.count

    def _was_stepped(self) -> bool:
        if steps.gone > self.steps:
            return True  # whose parameters these were is not known any more
        ours = self._storages()
        return any(
            mark.step > self.steps and not ours.isdisjoint(_storages(optimizer))
            for optimizer, mark in list(_marks.items())
        )

    def _storages(self) -> set[int]:
        return {untyped_storage(t).data_ptr() for t in self.tensors if t.numel()}


def _storages(optimizer: torch.optim.Optimizer) -> Iterable[int]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type != "meta" and is_dense(parameter):
                yield untyped_storage(parameter).data_ptr()

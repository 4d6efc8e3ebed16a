"""Who has written a tensor: what a run has read must still be there when it is run again.

Three witnesses. Version counters tell of every write through torch but one: fused optimizers do
not touch them. So the steps of all torch optimizers are counted as well, each for the parameters
that it has. Writes through `.data`, numpy or DLPack leave no trace in either; for them the daemon
takes fingerprints of the parameters with each forward that may be run again, and compares them
before it does: of drawn lines, which sees writes of all elements; and of all bytes, if such an
access was noticed (watch.py) since the forward, or memory was given away before and is still held.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradd.calls.watch import accesses, untyped_storage

_steps = 0  # of all optimizers of this process
_gone = 0  # number of the last step of an optimizer that no longer exists
_hook_lock = threading.Lock()
_hooked = False


class _Mark:
    """Number of an optimizer's last step."""

    step = 0

    def __del__(self) -> None:
        global _gone
        if _gone is not None:  # at the end of the process there are no globals
            _gone = max(_gone, self.step)


_marks: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Mark] = weakref.WeakKeyDictionary()


def _after_optimizer_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    global _steps
    _steps += 1
    _marks.setdefault(optimizer, _Mark()).step = _steps


def watch_optimizers() -> None:
    """From now on the steps of all torch optimizers are counted."""
    global _hooked
    with _hook_lock:
        if not _hooked:
            register_optimizer_step_post_hook(_after_optimizer_step)
            _hooked = True


class Snapshot:
    """Some tensors at the moment when this is made."""

    __slots__ = ("_accesses", "_aliased", "_generation", "_steps", "_sum", "_versions")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # Tensors of inference mode have no versions; no optimizer takes them.
        self._versions = [(t, t._version) for t in tensors if not t.is_inference()]
        self._steps = _steps
        self._aliased = accesses.settle(tensors)
        self._accesses = accesses.count
        self._generation: int | None = None
        self._sum: int | None = None

    def asked(self) -> dict[str, Any]:
        """Fields of a first forward: which fingerprints the daemon is to take."""
        return {"look": 2 if accesses.are_expected() or self._aliased else 1}

    def take(self, reply: dict[str, Any]) -> None:
        """Keeps the fingerprints of a first forward."""
        self._generation = reply.get("gen")
        self._sum = reply.get("sum")

    def expected(self) -> dict[str, Any]:
        """Fields of a repeated forward: the fingerprints that the daemon must find."""
        if self._generation is None:
            return {}
        if self._is_given_away() and self._sum is not None:
            return {"gen": self._generation, "sum": self._sum}
        return {"gen": self._generation}

    def has_changed(self) -> bool:
        """True if one of them has been written since, or may have been and nobody can tell.

        False leaves what the daemon finds, see expected().
        """
        if any(t._version != version for t, version in self._versions):
            return True
        if self._is_given_away() and self._generation is not None and self._sum is None:
            return True
        return self._steps != _steps and self._was_stepped()

    def is_stepped_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer has one of them."""
        return not self._storages().isdisjoint(_storages(optimizer))

    def _is_given_away(self) -> bool:
        return self._aliased or self._accesses != accesses.count

    def _was_stepped(self) -> bool:
        if _gone > self._steps:
            return True  # whose parameters these were is not known any more
        ours = self._storages()
        return any(
            mark.step > self._steps and not ours.isdisjoint(_storages(optimizer))
            for optimizer, mark in list(_marks.items())
        )

    def _storages(self) -> set[int]:
        return {untyped_storage(t).data_ptr() for t, _ in self._versions if t.numel()}


def _storages(optimizer: torch.optim.Optimizer) -> Iterable[int]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type == "cpu" and parameter.layout is torch.strided:
                yield untyped_storage(parameter).data_ptr()

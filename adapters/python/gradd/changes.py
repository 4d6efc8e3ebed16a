"""Who has written a tensor: what a run has read must still be there when it is run again.

Version counters tell of every write through torch but one: fused optimizers do not touch them. So
the steps of all torch optimizers are counted as well, each for the parameters that it has. Writes
through `.data` or numpy leave no trace.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_steps = 0  # of all optimizers of this process
_gone = 0  # number of the last step of an optimizer that no longer exists
_hook_lock = threading.Lock()
_hooked = False


class _Mark:
    """Number of an optimizer's last step."""

    step = 0

    def __del__(self) -> None:
        global _gone
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

    __slots__ = ("_steps", "_versions")

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        # Tensors of inference mode have no versions; no optimizer takes them.
        self._versions = [(t, t._version) for t in tensors if not t.is_inference()]
        self._steps = _steps

    def has_changed(self) -> bool:
        """True if one of them has been written since."""
        if any(t._version != version for t, version in self._versions):
            return True
        return self._steps != _steps and self._was_stepped()

    def _was_stepped(self) -> bool:
        if _gone > self._steps:
            return True  # whose parameters these were is not known any more
        ours = {t.untyped_storage().data_ptr() for t, _ in self._versions if t.numel()}
        return any(
            mark.step > self._steps and not ours.isdisjoint(_storages(optimizer))
            for optimizer, mark in list(_marks.items())
        )


def _storages(optimizer: torch.optim.Optimizer) -> Iterable[int]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type == "cpu" and parameter.layout is torch.strided:
                yield parameter.untyped_storage().data_ptr()

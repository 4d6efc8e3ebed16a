"""Batch norms whose running statistics are means over all batches (`momentum=None`).

torch's forward of such a norm takes the number of batches out of its counter (`float(counter)`), at
which TorchDynamo stops. While a call is traced and run, the norm has a forward of its own here that
keeps the number in a tensor: the same results, statistics and counter. update_bn() of
torch.optim.swa_utils makes all norms of a model such ones, for as long as it runs.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.nn import functional

_FORWARD = "forward"
_DIMENSIONS = {torch.nn.BatchNorm1d: (2, 3), torch.nn.BatchNorm2d: (4,), torch.nn.BatchNorm3d: (5,)}
_KINDS = tuple(_DIMENSIONS)
_torchs = torch.nn.BatchNorm2d.forward  # all kinds inherit one


class Norms:
    """Context of a call: the cumulative norms of a module have the forward of this file.

    Attributes:
        norms: Those that may be cumulative, with that forward; without any a call needs no context.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        found = [m for m in module.modules() if isinstance(m, _KINDS)]
        # Dynamo compares which function it is: one for each norm, for good.
        self.norms = [(m, types.MethodType(_forward, m)) for m in found if _is_torchs(m)]
        self._changed: list[list[torch.nn.Module]] = []  # by the calls that go on, one in another

    def __enter__(self) -> None:
        changed = []
        for norm, forward in self.norms:
            if norm.momentum is None and norm.training and _is_torchs(norm):
                norm.__dict__[_FORWARD] = forward
                changed.append(norm)
        self._changed.append(changed)

    def __exit__(self, *exc: object) -> None:
        for norm in self._changed.pop():
            norm.__dict__.pop(_FORWARD, None)


def _is_torchs(norm: torch.nn.Module) -> bool:
    """Whether nothing has replaced the forward of a norm."""
    return type(norm).forward is _torchs and _FORWARD not in norm.__dict__


def _forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    """The forward of a batch norm in training, without a momentum."""
    if not any(isinstance(self, k) and input.dim() in d for k, d in _DIMENSIONS.items()):
        return _torchs(self, input)  # raises
    mean, spread = self.running_mean, self.running_var
    counted = self.track_running_stats and self.num_batches_tracked is not None
    if not counted or mean is None:
        kept = (mean, spread) if self.track_running_stats else (None, None)
        return functional.batch_norm(input, *kept, self.weight, self.bias, True, 0.0, self.eps)
    self.num_batches_tracked.add_(1)
    # With a momentum of 1 the statistics become those of the batch. Copies: autograd saves them.
    batch = mean.clone(), spread.clone()
    y = functional.batch_norm(input, *batch, self.weight, self.bias, True, 1.0, self.eps)
    with torch.no_grad():
        new = 1.0 / self.num_batches_tracked.double()
        for old, now in zip((mean, spread), batch, strict=True):
            old.copy_((1.0 - new) * old.double() + new * now)
    return y

"""A backward through the daemon under a transform of torch's.

Gradients that arrive may stand for a batch of them (`autograd.grad(is_grads_batched=True)`,
`jacobian(vectorize=True)`, torch.func.vmap around a backward): the daemon computes those one by
one. They may also carry derivatives of their own, which do not exist there: a named error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from gradd import errors

_Grads = tuple[torch.Tensor | None, ...]
_Run = Callable[[_Grads], list[torch.Tensor | None]]
_level = torch._C._functorch.maybe_current_level
_is_old_batch = torch._C._functorch.is_legacy_batchedtensor


def is_transformed(grads: _Grads) -> bool:
    """True if gradients stand for more than themselves.

    Raises:
        UnsupportedError: One carries a tangent, which the daemon would drop.
    """
    if forward_ad._current_level >= 0:
        for grad in grads:
            if grad is not None and forward_ad.unpack_dual(grad).tangent is not None:
                raise _no_derivatives("in forward mode")
    return _level() is not None or any(g is not None and _is_old_batch(g) for g in grads)


def _no_derivatives(how: str) -> errors.UnsupportedError:
    return errors.UnsupportedError(
        f"derivatives of a backward ({how}) are not available through the daemon; compute that "
        "term with the original module in PyTorch"
    )


class _Calls:
    """What is done per gradient of a batch; no list or tuple, which torch would take apart."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.got: list[bool] = []  # which gradients there are: the same for each of the batch

    def __call__(self, grads: _Grads) -> tuple[torch.Tensor, ...]:
        found = self.run(grads)
        self.got = [g is not None for g in found]
        return tuple(g for g in found if g is not None)


class _OneByOne(torch.autograd.Function):
    """The backward of a run under vmap: once per gradient of the batch, batches of batches too."""

    @staticmethod
    def forward(calls: _Calls, *grads: torch.Tensor | None) -> tuple:
        return calls(grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple, calls: _Calls, *grads: torch.Tensor | None) -> tuple:
        rows = []
        for i in range(info.batch_size):
            pairs = zip(grads, in_dims[1:], strict=True)
            own = [g if d is None else g.select(d, i) for g, d in pairs]
            rows.append(_OneByOne.apply(calls, *own))
        found = tuple(torch.stack(column) for column in zip(*rows, strict=True))
        return found, (0,) * len(found)


def one_by_one(run: _Run, grads: _Grads) -> list[torch.Tensor | None]:
    """Gradients of a run under a transform.

    Args:
        run: From gradients of outputs, None where none arrives, to those of the run; it is called
            once per gradient of the batch.
        grads: What arrived.

    Raises:
        UnsupportedError: The transform is a derivative.
    """
    if _level() is None:
        return _old_batch(run, grads)
    kinds = {level.key().name for level in torch._C._functorch.get_interpreter_stack()}
    if kinds != {"Vmap"}:
        raise _no_derivatives(f"torch.func.{min(kinds - {'Vmap'}).lower()}")
    calls = _Calls(run)
    found = iter(_OneByOne.apply(calls, *grads))
    return [next(found) if g else None for g in calls.got]


def _old_batch(run: _Run, grads: _Grads) -> list[torch.Tensor | None]:
    """The same for the batches of torch.autograd itself, which torch.func does not know."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    if level != 1:
        raise _no_derivatives("batches of batches")
    rows = [
        torch._remove_batch_dim(g, level, 0, 0) if g is not None and _is_old_batch(g) else None
        for g in grads
    ]
    size = next(len(r) for r in rows if r is not None)
    pairs = list(zip(grads, rows, strict=True))
    found = [run(tuple(g if r is None else r[i] for g, r in pairs)) for i in range(size)]
    return [
        None if column[0] is None else torch._add_batch_dim(torch.stack(column), 0, level)
        for column in zip(*found, strict=True)
    ]

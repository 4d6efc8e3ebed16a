"""A backward through the daemon under one of torch's transforms.

An arriving gradient may stand for a batch of gradients (`autograd.grad(is_grads_batched=True)`,
`jacobian(vectorize=True)`, torch.func.vmap around a backward): the daemon computes them one by one.
It may also carry derivatives of its own, which the daemon does not support: this raises a named
error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from gradd import errors, private
from gradd.memory.tensor_classes import is_dense
from gradd.memory.watch import data_ptr

_Grads = tuple[torch.Tensor | None, ...]
_Run = Callable[[_Grads], list[torch.Tensor | None]]
_library = torch.library.Library("gradd", "FRAGMENT")
_library.define("each_of_batch(Tensor x) -> Tensor")
_library.impl("each_of_batch", lambda x: _each.function(x), "CompositeExplicitAutograd")


def is_transformed(grads: _Grads) -> bool:
    """True if gradients represent a batch or carry derivatives.

    Raises:
        UnsupportedError: One carries a tangent, which the daemon would drop.
    """
    if private.dual_level() >= 0:
        for grad in grads:
            if grad is not None and forward_ad.unpack_dual(grad).tangent is not None:
                raise _no_derivatives("in forward mode")
    try:
        for grad in grads:
            if grad is not None:
                data_ptr(grad)
    except RuntimeError:  # it has no memory to be seen: sparse ones have none, either
        if any(g is not None and _is_old_batch(g) for g in grads):
            return True
    return bool(private.transforms())


def _no_derivatives(how: str) -> errors.UnsupportedError:
    return errors.UnsupportedError(
        f"derivatives of a backward ({how}) are not available through the daemon; compute that "
        "term with the original module in PyTorch"
    )


class _Calls:
    """The calls per gradient of a batch; no list or tuple, which torch would take apart."""

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
        grads: The arriving gradients.

    Raises:
        UnsupportedError: The transform is a derivative.
    """
    levels = private.transforms()
    if not levels:
        return _old_batch(run, grads)
    kinds = {level.key().name for level in levels}
    if kinds != {"Vmap"}:
        raise _no_derivatives(f"torch.func.{min(kinds - {'Vmap'}).lower()}")
    calls = _Calls(run)
    found = iter(_OneByOne.apply(calls, *grads))
    return [next(found) if g else None for g in calls.got]


class _Each(threading.local):
    """The function of the operator gradd::each_of_batch in this thread."""

    function: Callable[[torch.Tensor], torch.Tensor]


_each = _Each()


def _is_old_batch(grad: torch.Tensor) -> bool:
    """Whether a tensor is a batch of torch.autograd itself, which has no memory to be seen."""
    if type(grad) is not torch.Tensor or not is_dense(grad):
        return False
    try:
        data_ptr(grad)
    except RuntimeError:
        return True
    return False


def _for_each(grad: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A batch of a function's results for each element of a batch.

    torch calls an operator that knows no batches once for each of them.
    """
    _each.function = function
    try:
        return torch.ops.gradd.each_of_batch(grad)
    finally:
        del _each.function


def _old_batch(run: _Run, grads: _Grads) -> list[torch.Tensor | None]:
    """The same for the batches of torch.autograd itself, which torch.func does not know."""
    batches = [g for g in grads if g is not None and _is_old_batch(g)]
    each: dict[int, list[torch.Tensor]] = {}
    for batch in batches:
        rows = each[id(batch)] = []
        _for_each(batch, lambda row, rows=rows: rows.append(row) or row.clone())
    sizes = set(map(len, each.values()))
    if len(sizes) > 1:
        raise _no_derivatives("batches of batches")
    found = [
        run(tuple(each[id(g)][i] if id(g) in each else g for g in grads))
        for i in range(sizes.pop())
    ]
    return [
        None if column[0] is None else _batch_of(batches[0], column)
        for column in zip(*found, strict=True)
    ]


def _batch_of(like: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """A batch of these, at the level of another one."""
    left = iter(rows)
    return _for_each(like, lambda _: next(left))

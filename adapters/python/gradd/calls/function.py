"""Runs as steps of torch's autograd.

`DaemonFunction` keeps torch's guarantees: parameters are saved so that an in-place change between
forward and backward raises torch's own error; outputs without a path to a parameter are not
differentiable; missing output gradients stay missing; gradients are fresh tensors over shared
memory, which AccumulateGrad takes over without a copy. `retain_graph=True` keeps the daemon's
activations.

Where gradients leave the backward in groups (groups.py) it is the first of a chain of steps: each
takes the parameters of its group, and a token that the next one gives. Autograd accumulates what a
step returns, hooks included, before it goes on to the next. The gradient of the token carries the
backward from step to step, so two backwards through a kept graph do not meet.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradd import errors, private
from gradd.calls import again, batched, sparse
from gradd.calls.groups import Delivery

if TYPE_CHECKING:
    from gradd.calls.run import Run

Grads = Sequence[torch.Tensor | None]


class DaemonFunction(torch.autograd.Function):
    """Forward and backward of one run.

    The run comes first, then the parameters and inputs that need a gradient, in the order of the
    plan's gradients.
    """

    @staticmethod
    def forward(ctx: Any, run: Run, *tensors: torch.Tensor) -> tuple:
        outputs = run.start()
        if not run.call.plain:
            outputs = run.completed(outputs)
        ctx.run = run
        params = len(run.plan.params)
        if params < len(tensors):
            run.keep_track(tensors[params:])
            tensors = tensors[:params]
        run.given = list(map(weakref.ref, outputs))
        ctx.set_materialize_grads(False)
        if not run.call.all_differentiable:
            pairs = zip(outputs, run.call.selection.differentiable, strict=True)
            ctx.mark_non_differentiable(*(tensor for tensor, is_one in pairs if not is_one))
        # The run holds copies of the arguments: a later write to those does not matter.
        ctx.save_for_backward(*tensors)
        return tuple(outputs)

    @staticmethod
    @torch.compiler.disable(reason="a backward of the daemon")  # one within a compiled function
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple:
        found = _backward(ctx, grads)
        return (None,) * len(ctx.needs_input_grad) if found is None else (None, *found)


class FirstGroup(torch.autograd.Function):
    """The same of a run in groups: gives the first group.

    Behind the run come all tensors that need a gradient, the token of the next step, and the
    tensors of the group.
    """

    @staticmethod
    def forward(
        ctx: Any, run: Run, all_of_them: tuple, token: torch.Tensor, *own: torch.Tensor
    ) -> tuple:
        return DaemonFunction.forward(ctx, run, *all_of_them)

    @staticmethod
    @torch.compiler.disable(reason="a backward of the daemon")
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple:
        delivery = Delivery(ctx.run) if ctx.run is not None else None
        found = _backward(ctx, grads, delivery)
        if found is None or delivery is None:
            return (None,) * len(ctx.needs_input_grad)
        delivery.found = found
        return (None, None, _token(delivery), *delivery.take(0))


class LaterGroup(torch.autograd.Function):
    """A later step of the chain: its number, the next one's token (None behind the last), and the
    tensors of its group."""

    @staticmethod
    def forward(
        ctx: Any, group: int, token: torch.Tensor | None, *own: torch.Tensor
    ) -> torch.Tensor:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return torch.empty(0, dtype=torch.float32, device=own[0].device)

    @staticmethod
    @torch.compiler.disable(reason="a backward of the daemon")
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple:
        if grad is None:  # no gradient has arrived at the first step
            return (None,) * len(ctx.needs_input_grad)
        delivery: Delivery = grad.gradd_delivery  # type: ignore[attr-defined]
        last = ctx.group + 1 == len(delivery)
        token = None if last else _token(delivery)
        return (None, token, *delivery.take(ctx.group))


def _token(delivery: Delivery) -> torch.Tensor:
    token = torch.empty(0, dtype=torch.float32, device=delivery.device)
    token.gradd_delivery = delivery  # type: ignore[attr-defined]
    return token


def _backward(
    ctx: Any, grads: Grads, delivery: Delivery | None = None
) -> list[torch.Tensor | None] | None:
    """The gradients, of which a delivery may have to wait for some; None if none arrives."""
    # Raises torch's errors for a second backward and for parameters modified in place.
    ctx.saved_tensors  # noqa: B018
    for grad in grads:
        if grad is not None:
            break
    else:
        return None
    run: Run = ctx.run
    if run.call.watches_readers:
        run.check_readers(grads)
    if private.keeps_graph is None:
        raise errors.UnsupportedError(
            "this torch does not tell whether retain_graph is set; use a supported version"
        )
    keep = bool(private.keeps_graph())
    again_in_torch, transformed = torch.is_grad_enabled(), batched.is_transformed(grads)
    if run.call.averages and (again_in_torch or transformed):
        raise errors.UnsupportedError(
            "process_group: a backward with create_graph=True, under a transform of torch.func, or "
            "a batched one, is not averaged over processes"
        )
    if again_in_torch:  # create_graph=True
        found = again.gradients(run, grads)
        if not keep:
            run.release()
    elif transformed:
        found = batched.one_by_one(lambda own: run.gradients(own, True), grads)
        if not keep:
            run.release()
    elif run.call.plain and not run.call.averages:
        found = run.backward(grads, keep, delivery)
    else:
        found = run.gradients(grads, keep, delivery)
    if run.rows and not torch.is_grad_enabled():
        found = sparse.gradients(run.graph.rows, run.rows, run.plan.params, found)
    if not keep:
        ctx.run = None
    return found


# Torch's own apply() looks for what transforms of torch.func have left behind; a call under one
# never comes here.
apply = super(torch.autograd.Function, DaemonFunction).apply
_apply_first = super(torch.autograd.Function, FirstGroup).apply
_apply_later = super(torch.autograd.Function, LaterGroup).apply


def apply_in_groups(run: Run, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    token = None
    members = run.call.groups.members  # type: ignore[union-attr]
    for group in range(len(members) - 1, 0, -1):
        token = _apply_later(group, token, *[tensors[i] for i in members[group]])
    return _apply_first(run, tensors, token, *[tensors[i] for i in members[0]])

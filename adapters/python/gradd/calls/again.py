"""A backward with create_graph=True: PyTorch computes the run again, with derivatives.

The daemon's gradients have no history. PyTorch runs the same graph, on the parameters and on the
values that the run has copied, and differentiates that: what it returns can be differentiated
itself. Each tensor that has a gradient goes in as a view of its own, so that a path from one of
them to another (an input that was computed from a parameter) is autograd's, and counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from gradd import errors
from gradd.spec import CaptureError

if TYPE_CHECKING:
    from gradd.calls.run import Run

_NAME = "create_graph"


def gradients(run: Run, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Those of Run.gradients(), with a history.

    Args:
        run: A run that has not been released.
        grads: One for each of the user's outputs; None = no gradient arrives.

    Raises:
        UnsupportedError: PyTorch cannot compute the same again.
        CaptureError: Nothing may run in PyTorch.
    """
    compute = run.graph.in_torch
    if run.graph.info.random:
        _refuse("this graph draws random numbers (dropout), and PyTorch would draw others")
    if compute is None or len(run.bound) != len(run.graph.bound):
        _refuse("this graph has numbers that are no inputs of the daemon's")
    fallback = run.graph.owner.fallback
    error = CaptureError(
        _NAME, "the daemon's gradients have no derivatives: the graph is computed again in PyTorch"
    )
    reason = fallback.decide(error)
    inputs = run.inputs_with_gradient()
    if inputs is None:
        _refuse("an input that needs a gradient is gone, or was written to; keep it in a variable")
    bound, free = list(run.bound), run.sent()
    views = [_view(bound, i) for i in run.call.selection.params]
    for i, given in zip(run.call.grad_inputs, inputs, strict=True):
        free[i] = given
        views.append(_view(free, i))
    results = compute(bound, free)
    arrived = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None]
    arrived = [(r, g) for r, g in arrived if r.requires_grad]
    if not arrived:
        return [None] * len(views)
    outputs, given_grads = zip(*arrived, strict=True)
    found = torch.autograd.grad(outputs, views, given_grads, create_graph=True, allow_unused=True)
    run.graph.owner.ran_in_torch(reason)
    if fallback.count(reason):
        fallback.warn(reason, error, 0.0, 0.0, in_part=True)
    return list(found)


def _view(tensors: list[torch.Tensor], i: int) -> torch.Tensor:
    tensors[i] = tensors[i].view_as(tensors[i])
    return tensors[i]


def _refuse(why: str) -> NoReturn:
    raise errors.UnsupportedError(
        f"create_graph=True: second derivatives are not available through the daemon: {why}; "
        "compute that term with the original module in PyTorch"
    )

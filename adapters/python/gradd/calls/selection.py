"""The selection of one call: gradients and outputs of its plan, and outputs that it leaves out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradd.calls.graph import Graph


@dataclass(frozen=True)
class Selection:
    """The outputs and gradients that one call wants.

    Attributes:
        params: Positions in `bound` of the parameters whose gradient is wanted.
        input_grads: Names of the inputs whose gradient is wanted.
        outputs: Names of the outputs that are computed.
        gmask: Positions in `outputs` whose gradient may arrive.
        real: Positions in the graph's user outputs that are computed.
        differentiable: Per user output.
        asked: What requires a gradient, in reach or not (parameters by position, inputs by name),
            and whether gradients are on.
        budget: Share of the memory budget, in bytes; 0 = without one, None = all of it.
    """

    params: tuple[int, ...]
    input_grads: tuple[str, ...]
    outputs: tuple[str, ...]
    gmask: tuple[int, ...]
    real: list[int]
    differentiable: list[bool]
    asked: tuple[tuple[int, ...], tuple[str, ...], bool]
    budget: int | None = None

    @property
    def grad(self) -> bool:
        return self.asked[2]

    def of_plan(self) -> tuple[tuple, tuple, tuple, tuple]:
        """The part of the plan's key beside the shapes."""
        return self.params, self.input_grads, self.outputs, self.gmask


def selection_of(
    graph: Graph, bound: list[torch.Tensor], inputs: list[torch.Tensor], lazy: bool
) -> Selection:
    """Makes the selection of a call.

    Args:
        graph: Of the call; its module is in the call's mode.
        bound: The bound inputs.
        inputs: The free ones.
        lazy: Outputs that only the loss has needed so far may be left out of a training step.
    """
    params: tuple[int, ...] = ()
    input_grads: tuple[str, ...] = ()
    grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    if grad:
        params = tuple(i for i in graph.param_at if bound[i].requires_grad)
        pairs = zip(graph.free, inputs, strict=True)
        input_grads = tuple(name for name, tensor in pairs if tensor.requires_grad)
    asked = (params, input_grads, grad)
    differentiable, params, input_grads = graph.differentiable(params, input_grads)
    left_out: set[int] = set()
    if lazy and any(differentiable) and graph.owner.training:
        asked_for = () if graph.asks_again else graph.asked_for
        left_out = {i for i in graph.left_out() if graph.user[i].name not in asked_for}
    real = [i for i in range(len(graph.user)) if i not in left_out]
    outputs = tuple(graph.user[i].name for i in real) + graph.hidden
    gmask = tuple(k for k, i in enumerate(real) if differentiable[i])
    return Selection(params, input_grads, outputs, gmask, real, differentiable, asked)

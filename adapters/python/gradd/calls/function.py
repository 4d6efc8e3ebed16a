"""The autograd bridge: one torch.autograd.Function whose forward and backward run in the daemon.

What torch's users rely on is kept: parameters are saved so that an in-place change between forward
and backward raises torch's own error; outputs without a path to a parameter are not differentiable;
missing output gradients stay missing; gradients are fresh tensors over shared memory, which
AccumulateGrad takes over without a copy. `retain_graph=True` keeps the daemon's activations.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from gradd import errors
from gradd.calls import batched
from gradd.calls.lazy import LazyTensor
from gradd.calls.run import Run


def _keeps_graph() -> bool:
    """Whether the backward in progress was called with retain_graph=True."""
    read = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    if read is None:
        raise errors.UnsupportedError(
            "this torch does not tell whether retain_graph is set; use a supported version"
        )
    return bool(read())


class DaemonFunction(torch.autograd.Function):
    """Forward and backward of one run.

    `run` and `call` come first, then the parameters and inputs that need a gradient, in the order
    of the plan's gradients.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple:
        outputs = call.start()
        ctx.call = call
        call.given = [weakref.ref(t) for t in outputs]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(t for t, d in zip(outputs, call.differentiable, strict=True) if not d)
        )
        ctx.save_for_backward(*tensors)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple:
        if torch.is_grad_enabled():
            raise errors.UnsupportedError(
                "create_graph=True: second derivatives are not available through the daemon; "
                "compute that term with the original module in PyTorch"
            )
        # Raises torch's errors for a second backward and for parameters modified in place.
        ctx.saved_tensors  # noqa: B018
        if all(g is None for g in grad_outputs):
            return (None,) * (len(ctx.needs_input_grad))
        call = ctx.call
        call.check_readers(grad_outputs)
        keep = _keeps_graph()
        if batched.is_transformed(grad_outputs):
            grads = batched.one_by_one(lambda own: call.backward(own, True), grad_outputs)
            if not keep:
                call.run.release()
        else:
            grads = call.backward(grad_outputs, keep)
        if not keep:
            ctx.call = None
        return (None, *grads)


def _is_waited_for(output: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():  # a look is no reason to compute it
        return bool(output._backward_hooks) or output.retains_grad


class Call:
    """One call of the module: its run, and which of the module's outputs are real or lazy."""

    def __init__(
        self, run: Run, real: list[int], differentiable: list[bool], commit: bool = True
    ) -> None:
        """Args:
        run: Not started.
        real: Positions in the graph's user outputs that the plan computes, in plan order.
        differentiable: Per user output.
        commit: Write changed buffers back to the module.
        """
        self.run = run
        self.real = real
        self.differentiable = differentiable
        self.commit = commit
        self.given: list[weakref.ref] = []  # the outputs as the user has them
        self.views: list[tuple[str, weakref.ref]] = []  # of outputs on which the loss depends

    def start(self) -> list[torch.Tensor]:
        """Runs the forward; returns all user outputs, lazy ones among them."""
        run = self.run
        tensors = run.start()
        graph = run.graph
        outputs: list[Any] = [None] * len(graph.user)
        for position, tensor in zip(self.real, tensors, strict=False):
            outputs[position] = tensor
        if self.commit and graph.changed:
            with torch.no_grad():
                values = tensors[len(self.real) :]
                for place, value in zip(graph.changed_places, values, strict=True):
                    place.get().copy_(value)
        for position, tensor in enumerate(outputs):
            if tensor is None:
                outputs[position] = LazyTensor.make(run, graph.user[position])
        return outputs

    def watch_views(self, results: dict[int, Any]) -> None:
        """Remembers results that are views of others, by number of the leaf, for check_readers."""
        shared = self.run.graph.shared
        self.views = [(name, weakref.ref(results[leaf])) for leaf, name in shared.of_loss]

    def check_readers(self, grad_outputs: tuple[torch.Tensor | None, ...]) -> None:
        """The loss of a graph does not pass through the other outputs, as it does in PyTorch.

        Raises:
            UnsupportedError: A hook or retain_grad() waits for what would have passed there.
        """
        cap, user = self.run.graph.cap, self.run.graph.user
        if not cap.loss_ancestors:
            return
        arrives = {spec.leaf for spec, g in zip(user, grad_outputs, strict=True) if g is not None}
        if cap.loss_leaf not in arrives:
            return
        given = [
            (spec.name, ref)
            for spec, ref in zip(user, self.given, strict=True)
            if spec.leaf in cap.loss_ancestors
        ]
        for name, ref in (*given, *self.views):
            output = ref()
            if output is not None and _is_waited_for(output):
                raise errors.UnsupportedError(
                    f"{name!r}, an output on which the loss depends, has a hook or "
                    "retain_grad(): the loss of a graph passes no gradient through other outputs. "
                    "Compute the loss outside of the module, or that part in PyTorch"
                )

    def backward(
        self, grad_outputs: tuple[torch.Tensor | None, ...], keep: bool
    ) -> list[torch.Tensor | None]:
        """Gradients for the tensors of `DaemonFunction`, also where a lazy output has got one."""
        run = self.run
        real = [grad_outputs[p] for p in self.real]
        lazy = any(g is not None and p not in self.real for p, g in enumerate(grad_outputs))
        if not lazy:
            real += [None] * (len(run.plan.outputs) - len(real))
            return run.backward(real, keep)
        # A loss outside the graph used an output that was left out: run again with it.
        with run.client.lock:
            names = [run.graph.user[p].name for p, g in enumerate(grad_outputs) if g is not None]
            other = run.repeat(tuple(names), tuple(range(len(names))))
            try:
                other.start()
                grads = other.backward([g for g in grad_outputs if g is not None], False)
            finally:
                other.end()
            if not keep:
                run.release()
            return grads

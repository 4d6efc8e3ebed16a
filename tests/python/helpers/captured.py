"""Compares a captured graph with the module it came from: results, buffers and every gradient.

Two independent evaluations: onnxruntime for the values (com.gradd's operators are Identity there)
and onnx_eval for the gradients, which differentiates the graph with torch's autograd. A lost
detach() or a wrong gradient path shows in the second and nowhere else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_eval
import torch
from torch import nn

from gradd import export
from gradd.export.results import Result

_PASSED_ON = ("CheckIndex", "StopGradient", "StraightThrough", "WithSlope")


class Lambda(nn.Module):
    """A module from a function of (self, *args); keyword arguments become attributes."""

    def __init__(self, function: Any, **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in parts.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def leaves_of(value: Any) -> list[torch.Tensor]:
    """Tensor leaves of a module's result, in the order of the capture."""
    return list(Result().flatten(value))


def feeds(
    module: nn.Module, cap: export.Capture, args: tuple, kwargs: dict
) -> dict[str, torch.Tensor]:
    """Graph inputs for a call; parameters are copies that require a gradient."""
    leaves, _, _ = export.flatten_inputs(args, kwargs)
    states = dict(module.named_parameters(remove_duplicate=False))
    states |= dict(module.named_buffers(remove_duplicate=False))
    out = {i.name: export.as_tensor_leaf(leaves[i.leaf]).detach() for i in cap.inputs}
    for name in cap.params:
        out[name] = states[name].detach().clone().requires_grad_()
    for name in cap.buffers:
        out[name] = states[name].detach().clone()
    return out | {name: source.get().detach().clone() for name, source in cap.outside}


def run_ort(cap: export.Capture, values: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Evaluates a capture with onnxruntime, without any graph optimisation."""
    import onnxruntime

    model = onnx.ModelProto.FromString(cap.onnx)
    for node in model.graph.node:
        if node.domain == "com.gradd":
            assert node.op_type in _PASSED_ON
            node.domain, node.op_type = "", "Identity"
            del node.input[1:]
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    # onnxruntime's BatchNormalization writes running_var over its input: give it copies.
    given = {name: value.detach().numpy().copy() for name, value in values.items()}
    names = [o.name for o in cap.outputs]
    return dict(zip(names, session.run(names, given)))


def assert_same(
    module: nn.Module,
    args: tuple = (),
    kwargs: dict | None = None,
    *,
    cap: export.Capture | None = None,
    ort: bool = True,
) -> export.Capture:
    """Captures a call (or takes `cap`) and compares it with the module run by torch.

    Args:
        module: Module without active randomness.
        args: Positional arguments.
        kwargs: Keyword arguments.
        cap: A capture made with other arguments, to test that it serves these as well.
        ort: Compare values with onnxruntime too.

    Returns:
        The capture.
    """
    kwargs = kwargs or {}
    cap = cap or export.capture(module, args, kwargs)
    assert export.check_dynamic(cap, args, kwargs) is None
    values = feeds(module, cap, args, kwargs)
    if ort:
        ort_values = run_ort(cap, values)
    got = onnx_eval.evaluate(cap.onnx, values)
    want = leaves_of(module(*args, **kwargs))
    after = dict(module.named_buffers())
    for spec in cap.outputs:
        expected = want[spec.leaf] if spec.kind == "user" else after[spec.fqn]
        torch.testing.assert_close(got[spec.name], expected, rtol=1e-5, atol=1e-5)
        if ort:
            other = torch.from_numpy(np.asarray(ort_values[spec.name]))
            torch.testing.assert_close(other, expected.detach(), rtol=1e-4, atol=1e-5)
    if cap.loss_leaf is not None:
        _assert_gradients(module, cap, values, got, want[cap.loss_leaf])
    return cap


def _assert_gradients(module, cap, values, got, loss) -> None:
    name = next(o.name for o in cap.outputs if o.leaf == cap.loss_leaf)
    module.zero_grad()
    loss.backward()
    got[name].backward()
    params = {n: p for n, p in module.named_parameters() if p.requires_grad}
    largest = max(float(p.grad.abs().max()) for p in params.values() if p.grad is not None)
    for name, param in params.items():
        mine = values[name].grad if name in values else None
        want = param.grad if param.grad is not None else torch.zeros_like(param)
        mine = mine if mine is not None else torch.zeros_like(param)
        scale = max(float(want.abs().max()), 1e-4 * largest)
        worst = float((mine - want).abs().max())
        assert worst <= 1e-4 * scale, f"gradient of {name} is off by {worst} (scale {scale})"

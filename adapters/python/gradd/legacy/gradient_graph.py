"""export_gradient_graph(): a model with its loss and gradients as an ONNX file.

The call is captured as a wrapped module's would be, and `gradd explain --gradient` differentiates
the graph and writes it in ONNX's own operators: see docs/old-names.md for what has none.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gradd import errors
from gradd.dynamo import locks
from gradd.dynamo.frontend import function_of
from gradd.dynamo.owner import Owner, device_of
from gradd.dynamo.planning import plans
from gradd.memory.shm import DTYPE_CODES
from gradd.session.client import get_client
from gradd.session.daemon import find_binary
from gradd.spec import CaptureError

if TYPE_CHECKING:
    import onnx

    from gradd.calls.planned import Planned

OPSET = 23
_NAMES = ("input", "labels")


class _WithLoss(torch.nn.Module):
    """A model and its loss as one module."""

    def __init__(self, model: torch.nn.Module, loss_fn: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.training = model.training

    def forward(self, example: torch.Tensor, labels: torch.Tensor) -> tuple[Any, Any]:
        output = self.model(example)
        return output, self.loss_fn(output, labels)


def export_gradient_graph(
    model: torch.nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    example_input: torch.Tensor,
    example_labels: torch.Tensor,
    gradient_graph_path: str | os.PathLike[str],
    opset_version: int | None = None,
) -> None:
    """Writes an ONNX model that computes output, loss and gradients, for any runtime of ONNX.

    Its inputs are `input`, `labels` and the parameters by name, but for those that nothing reads;
    its outputs `output` (of several tensors `output_0`, `output_1`, ...), `loss`, and `<name>_grad`
    for each parameter with `requires_grad` that the loss depends on. Buffers are inside, as they
    are now. The sizes are those of the examples, the mode (training or evaluation) is the model's.

    Args:
        model: A module of one argument, or an ORTModule around it.
        loss_fn: Makes the loss, a scalar, of the model's result and the labels.
        example_input: The argument of the model.
        example_labels: The second argument of the loss.
        gradient_graph_path: The file, of at most 2 GiB.
        opset_version: None or 23: graphs have that one.

    Raises:
        TypeError: An example is no tensor.
        ValueError: Another opset; the loss depends on no parameter that requires a gradient.
        CaptureError: The call has no graph, or more than one, or a part of it is PyTorch's own.
        UnsupportedError: An operator, or its gradient, has no counterpart in ONNX; the message
            names the node.
        TensorError: The loss is not one element of floats.
        GraddError: The daemon cannot plan it, or the file cannot be written.
    """
    if opset_version not in (None, OPSET):
        raise ValueError(f"opset_version={opset_version}: graphs have opset {OPSET}")
    args = (example_input, example_labels)
    for what, tensor in zip(("example_input", "example_labels"), args, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{what} must be a tensor, got {type(tensor).__name__}")
    module = _WithLoss(getattr(model, "_gradd_module", model), loss_fn)
    planned = _planned(module, args)
    capture = planned.graph.cap
    needed = {name for name, p in module.model.named_parameters() if p.requires_grad}
    trained = [name for name in map(_own, capture.params) if name in needed]
    if not trained:
        raise ValueError("the loss depends on no parameter that requires a gradient")
    named = _named(planned, args, module)
    sizes = {name: tuple(t.shape) for name, t in zip(_NAMES, args, strict=True)}
    try:
        _write(named, sizes, trained, gradient_graph_path)
    except errors.GraddError as error:
        where = [f" ({where})" for node, where in capture.sources if f"'{node}'" in error.what]
        raise errors.from_code(error.code, error.what + "".join(where[:1])) from None


def _planned(module: _WithLoss, args: tuple[torch.Tensor, torch.Tensor]) -> Planned:
    """The one graph of a call, which is not run."""
    client = get_client(device=device_of(module, args))
    owner = Owner(module, type(module.model).__name__, client=client, moves=False)
    with contextlib.ExitStack() as stack, locks.both(client):
        stack.callback(owner.finish())
        found, in_torch = plans(owner, function_of(owner, module), args, {}, True, 0)
    if in_torch:
        raise next(iter(in_torch.values()))
    if len(found) != 1:
        text = f"torch.compile makes {len(found)} graphs of this call, expected one"
        raise owner.refused or CaptureError("export_failed", text)
    return found[0]


def _own(name: str) -> str:
    """A qualified name as the model has it."""
    return name.removeprefix("model.")


def _named(
    planned: Planned, args: tuple[torch.Tensor, torch.Tensor], module: _WithLoss
) -> onnx.ModelProto:
    """The graph with the names that users know; what is no argument or parameter is inside."""
    import onnx

    capture = planned.graph.cap
    model = onnx.load_model_from_string(capture.onnx)
    *results, loss = [o.name for o in capture.outputs if o.kind == "user"]
    new = {name: _own(name) for name in capture.params} | {loss: "loss"}
    for i, name in enumerate(results):
        new[name] = "output" if len(results) == 1 else f"output_{i}"
    inside = {**dict(module.named_buffers()), **dict(module.named_parameters(prefix=""))}
    inside = {n: t for n, t in inside.items() if n in capture.buffers or n.startswith("loss_fn.")}
    for name, tensor in zip(planned.graph.free, planned.given, strict=True):
        known = [own for own, arg in zip(_NAMES, args, strict=True) if arg is tensor]
        new |= {name: known[0]} if known else {}
        inside |= {} if known else {name: tensor}
    kept = [value for value in model.graph.input if value.name not in inside]
    for value in model.graph.input:
        if value.name in inside:
            model.graph.initializer.append(_constant(value.name, inside[value.name]))
    del model.graph.input[:]
    model.graph.input.extend(kept)
    _rename(model.graph, new)
    return model


def _constant(name: str, tensor: torch.Tensor) -> onnx.TensorProto:
    """With the tensor's bytes, which NumPy has no type for if it is a bf16."""
    import onnx

    flat = tensor.detach().cpu().contiguous()
    raw = flat.reshape(-1).view(torch.uint8).numpy().tobytes()
    return onnx.TensorProto(
        name=name, dims=flat.shape, data_type=DTYPE_CODES[flat.dtype], raw_data=raw
    )


def _rename(graph: onnx.GraphProto, new: dict[str, str]) -> None:
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = new.get(value.name, value.name)
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [new.get(name, name) for name in names]
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                _rename(body, new)


def _write(
    model: onnx.ModelProto,
    sizes: dict[str, tuple[int, ...]],
    trained: list[str],
    path: str | os.PathLike[str],
) -> None:
    given = {value.name for value in model.graph.input}
    outputs = [v.name for v in model.graph.output if v.name.startswith(("output", "loss"))]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "forward.onnx"
        source.write_bytes(model.SerializeToString())
        command = [find_binary(), "explain", str(source), "--gradient", os.fspath(path)]
        command += [f"{n}={'x'.join(map(str, s))}" for n, s in sizes.items() if n in given]
        command += ["--train", ",".join(trained), "--out", ",".join(outputs), "--grad", "loss"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().removeprefix("gradd explain: ").removeprefix("GRADD_E_")
        code, _, what = said.partition(": ")
        raise errors.from_code(code, what)

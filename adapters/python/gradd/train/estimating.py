"""What a training will take, from its files, without a step. Needs the package onnx."""

from __future__ import annotations

import os
from collections.abc import Sequence

import onnx

from gradd.train.module import Module
from gradd.train.optimizer import Optimizer
from gradd.train.state import CheckpointState

_MOMENTS = {1: 2, 2: 0}  # by kind of optimizer; SGD with momentum has one


def estimate(
    training_model: str | os.PathLike,
    checkpoint: str | os.PathLike,
    optimizer_model: str | os.PathLike | None,
    batches: Sequence[int],
    *,
    sizes: dict[str, int],
    budget: int = 0,
) -> str:
    """A table of bytes: what is held whatever the batch, and activations by batch size.

    Args:
        training_model: Its file.
        checkpoint: The file of its parameters.
        optimizer_model: Its file; None = no optimizer.
        batches: Sizes of the first dynamic dimension of the first input.
        sizes: Of other dynamic dimensions, by name.
        budget: Most bytes of activations; 0 = what it takes.

    Raises:
        ValueError: The size of a dimension is not known.
        RuntimeError: The model cannot be planned, or the budget not be met.
    """
    described = onnx.load(training_model, load_external_data=False).graph.input
    state = CheckpointState.load_checkpoint(checkpoint)
    module = Module(training_model, state, memory_budget=budget)
    inputs = [value for value in described if value.name in module.input_names()]
    parameters = dict.fromkeys((True, False), 0)
    for _, parameter in state.parameters:
        parameters[parameter.requires_grad] += parameter.data.nbytes
    moments = _moments(optimizer_model, module) * parameters[True]
    rows = [
        ("parameters", sum(parameters.values())),
        ("gradients", parameters[True]),
        ("optimizer", moments),
    ]
    for batch in sorted(batches):
        module.prepare(*_shapes(inputs, batch, sizes))
        rows.append((f"activations, batch {batch}", module.memory()["arena"]))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}} {_text(size):>11}" for name, size in rows)


def _moments(optimizer_model: str | os.PathLike | None, module: Module) -> int:
    if optimizer_model is None:
        return 0
    constants = Optimizer(optimizer_model, module).constants
    return 1 if constants.momentum else _MOMENTS[constants.kind]


def _shapes(
    inputs: Sequence[onnx.ValueInfoProto], batch: int, sizes: dict[str, int]
) -> list[list[int]]:
    """Shapes of the inputs; dimensions of one name have one size."""
    known, shapes = dict(sizes), []
    for value in inputs:
        shape = []
        for dim in value.type.tensor_type.shape.dim:
            if not dim.HasField("dim_value") and not set(known) - set(sizes):
                known.setdefault(dim.dim_param, batch)
            if not dim.HasField("dim_value") and dim.dim_param not in known:
                name = dim.dim_param or "a dimension without a name"
                raise ValueError(f"input {value.name!r}: {name} has no size: say --dim NAME=SIZE")
            shape.append(dim.dim_value if dim.HasField("dim_value") else known[dim.dim_param])
        shapes.append(shape)
    return shapes


def _text(size: int) -> str:
    return f"{size / 2**20:.2f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"

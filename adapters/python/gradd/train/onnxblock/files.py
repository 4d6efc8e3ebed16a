"""Checkpoints of parameters that are ONNX tensors."""

from __future__ import annotations

import os

import onnx

from gradd.train.onnxblock.training import Parameters
from gradd.train.state import CheckpointState


def raw_values(tensor: onnx.TensorProto) -> bytes:
    """Its values, little-endian and row-major."""
    if tensor.HasField("raw_data"):
        return tensor.raw_data
    return onnx.numpy_helper.to_array(tensor).tobytes()


def save_checkpoint(
    parameters: Parameters, path_to_checkpoint: str | os.PathLike, nominal_checkpoint: bool = False
) -> None:
    """Writes parameters to a checkpoint.

    Args:
        parameters: Those that are trained, and those that are frozen.
        path_to_checkpoint: The file.
        nominal_checkpoint: Whether to leave out their values.

    Raises:
        RuntimeError: There are no parameters, or one has a type that a checkpoint cannot hold.
    """
    if parameters is None:
        raise RuntimeError("no parameters to save")
    state = CheckpointState.empty()
    for tensors, trained in zip(parameters, (True, False)):
        for tensor in tensors:
            values = None if nominal_checkpoint else raw_values(tensor)
            state.add(tensor.name, tensor.data_type, tuple(tensor.dims), values, trained)
    CheckpointState.save_checkpoint(state, path_to_checkpoint)


def load_checkpoint_to_model(path_to_checkpoint: str | os.PathLike, model: onnx.ModelProto) -> None:
    """Puts the values of a checkpoint into the initializers of the same names.

    Args:
        path_to_checkpoint: The file.
        model: The model to change. An input that the checkpoint has a value for becomes an
            initializer.

    Raises:
        RuntimeError: The file is no checkpoint, or is nominal.
    """
    state = CheckpointState.load_checkpoint(path_to_checkpoint)
    values = {name: parameter.data for name, parameter in state.parameters}
    known = {*(value.name for value in model.graph.input)}
    known |= {tensor.name for tensor in model.graph.initializer}
    tensors = [t for t in model.graph.initializer if t.name not in values]
    tensors += [onnx.numpy_helper.from_array(values[n], n) for n in values if n in known]
    inputs = [value for value in model.graph.input if value.name not in values]
    tensors, inputs = (
        [type(p).FromString(p.SerializeToString()) for p in ps] for ps in (tensors, inputs)
    )
    del model.graph.initializer[:], model.graph.input[:]
    model.graph.initializer.extend(tensors)
    model.graph.input.extend(inputs)

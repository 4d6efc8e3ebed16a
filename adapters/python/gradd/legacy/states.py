"""States of ORTTrainer: of model and optimizer by name, and the model as an ONNX file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from gradd.legacy.model_desc import ModelDescription

_ONE_FILE = 1 << 30  # bytes of weights; above it they go beside the file, whose limit is 2 GiB
_MOMENTS = {"Moment_1": "exp_avg", "Moment_2": "exp_avg_sq"}


def model_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of parameters and buffers."""
    return {n: t.detach().to("cpu", copy=True) for n, t in model.state_dict().items()}


def _names(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[str]:
    """Of the optimizer's parameters, in its order."""
    names = {id(p): n for n, p in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def optimizer_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Any]:
    """The moments by parameter; `Update_Count` is the number of the next update."""
    state = optimizer.state_dict()["state"]
    found = {}
    for i, name in enumerate(_names(optimizer, model)):
        if own := state.get(i, {}):
            found[name] = {
                old: own[new].detach().to("cpu", copy=True)
                for old, new in _MOMENTS.items()
                if own.get(new) is not None
            }
            if "step" in own:
                found[name]["Update_Count"] = torch.tensor([int(own["step"]) + 1])
    return found


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, given: dict[str, Any], strict: bool
) -> None:
    """Loads what optimizer_state() gave.

    Raises:
        RuntimeError: It has parameters that the optimizer does not have (strict), or moments of
            another shape.
    """
    names = _names(optimizer, model)
    if strict and (unknown := sorted(set(given) - set(names))):
        raise RuntimeError(f"the optimizer has no parameters {unknown}")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    loaded: dict[int, dict[str, Any]] = {} if strict else optimizer.state_dict()["state"]
    for i, (name, p) in enumerate(zip(names, params, strict=True)):
        own = given.get(name)
        if not own:
            continue
        for old in _MOMENTS:
            if tuple(own[old].shape) != tuple(p.shape):
                shapes = f"{tuple(own[old].shape)}, the parameter {tuple(p.shape)}"
                raise RuntimeError(f"{old} of {name} has the shape {shapes}")
        loaded[i] = {new: torch.as_tensor(own[old]).clone() for old, new in _MOMENTS.items()}
        loaded[i]["step"] = int(own["Update_Count"]) - 1
    optimizer.load_state_dict({**optimizer.state_dict(), "state": loaded})


def export(
    module: torch.nn.Module,
    example: list[torch.Tensor],
    description: ModelDescription,
    path: str | os.PathLike[str],
) -> None:
    """Writes the module in evaluation mode as ONNX.

    Args:
        module: Takes the described inputs by position.
        example: Inputs, of which shapes and types count.
        description: The names; a dimension with a name is dynamic.
        path: The file.
    """
    dynamic = tuple(
        {i: torch.export.Dim.DYNAMIC for i, d in enumerate(described.shape) if isinstance(d, str)}
        for described in description.inputs
    )
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    was_training = module.training
    module.eval()
    try:
        program = torch.onnx.export(
            module,
            tuple(torch.zeros_like(t, device=device) for t in example),
            input_names=[d.name for d in description.inputs],
            output_names=[d.name for d in description.outputs],
            dynamic_shapes=(dynamic,),
            dynamo=True,
            verbose=False,
        )
    finally:
        module.train(was_training)
    graph = program.model.graph
    for value in list(graph.initializers.values()):
        value.name = value.name.removeprefix("model.")
    for values, described in ((graph.inputs, description.inputs),
                              (graph.outputs, description.outputs)):  # fmt: skip
        for value, one in zip(values, described, strict=False):
            value.shape = type(value.shape)(one.shape)
    size = sum(t.numel() * t.element_size() for t in module.state_dict().values())
    program.save(path, external_data=size > _ONE_FILE)
    for value in graph.initializers.values():  # torch keeps the last program, and with it weights
        value.const_value = None

"""What a script says about its model: names and shapes of inputs and outputs.

{"inputs": [(name, shape)], "outputs": [(name, shape, is_loss)]}; a dimension of a shape is a
number, or a name for one that may differ from call to call and is the same wherever it occurs.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Shape = list[int | str]


class InputDescription(NamedTuple):
    """An input of the model, or the label."""

    name: str
    shape: Shape


class OutputDescription(NamedTuple):
    """An output of the model, or the loss."""

    name: str
    shape: Shape
    is_loss: bool = False


class ModelDescription:
    """A checked description.

    Args:
        model_desc: See the module.

    Attributes:
        inputs: InputDescriptions, the label of a loss function last.
        outputs: OutputDescriptions in the order of the results.

    Raises:
        ValueError: It has another form, or not exactly one output is the loss.
    """

    def __init__(self, model_desc: dict[str, Any]) -> None:
        if not isinstance(model_desc, dict) or set(model_desc) != {"inputs", "outputs"}:
            raise ValueError("model_desc must be a dict with 'inputs' and 'outputs', no more")
        self.inputs = [InputDescription(*_entry(e, "inputs", 2)) for e in model_desc["inputs"]]
        self.outputs = [OutputDescription(*_entry(e, "outputs", 3)) for e in model_desc["outputs"]]
        for what in (self.inputs, self.outputs):
            names = [d.name for d in what]
            if doubles := {n for n in names if names.count(n) > 1}:
                raise ValueError(f"model_desc names {sorted(doubles)} twice")
        losses = [d.name for d in self.outputs if d.is_loss]
        if len(losses) != 1:
            raise ValueError(f"model_desc: exactly one output must be the loss, found {losses}")
        self.loss = losses[0]

    def __repr__(self) -> str:
        return f"ModelDescription(inputs={self.inputs}, outputs={self.outputs})"

    def check_forward(self, forward: Any, has_loss_function: bool) -> None:
        """Fails with a ValueError where an input is no parameter of the model's forward()."""
        parameters = inspect.signature(forward).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return
        inputs = self.inputs[:-1] if has_loss_function else self.inputs
        if unknown := [d.name for d in inputs if d.name not in parameters]:
            raise ValueError(
                f"model_desc has the inputs {unknown}, forward() has the parameters "
                f"{list(parameters)}: inputs are passed by name"
            )

    def check(self, values: Sequence[Any], outputs: Sequence[Any] = ()) -> None:
        """Compares the shapes of a call's tensors with the description.

        Args:
            values: The inputs; the last may be missing.
            outputs: The results in order, None where one is missing.

        Raises:
            ValueError: A number of dimensions or a dimension is another one.
        """
        known: dict[str, int] = {}
        pairs = [*zip(self.inputs, values, strict=False), *zip(self.outputs, outputs, strict=False)]
        for described, value in pairs:
            if isinstance(value, torch.Tensor):
                _compare(described, tuple(value.shape), known)


def _compare(
    described: InputDescription | OutputDescription, shape: tuple[int, ...], known: dict[str, int]
) -> None:
    is_loss = isinstance(described, OutputDescription) and described.is_loss
    if is_loss and shape in ((), (1,)) and described.shape in ([], [1]):
        return
    expected = [known.setdefault(d, n) if isinstance(d, str) else d
                for d, n in zip(described.shape, shape, strict=False)]  # fmt: skip
    if len(described.shape) != len(shape) or list(shape) != expected:
        sizes = f" with {known}" if known else ""
        raise ValueError(
            f"{described.name} has the shape {list(shape)}, model_desc says {described.shape}"
            f"{sizes}"
        )


def _entry(entry: Any, where: str, longest: int) -> tuple[Any, ...]:
    if not isinstance(entry, tuple) or not 2 <= len(entry) <= longest:
        raise ValueError(f"model_desc[{where!r}]: {entry!r} must be a tuple (name, shape[, loss])")
    name, shape, *rest = entry
    fits = isinstance(shape, (list, tuple)) and all(
        isinstance(d, (int, str)) and not isinstance(d, bool) for d in shape
    )
    if not isinstance(name, str) or not fits or not all(isinstance(r, bool) for r in rest):
        raise ValueError(
            f"model_desc[{where!r}]: {entry!r} must have a name, a list of numbers and names, "
            "and for the loss True"
        )
    return (name, list(shape), *rest)

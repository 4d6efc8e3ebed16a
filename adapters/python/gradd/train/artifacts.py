"""The files that a training on a device begins with. Needs the package onnx.

from gradd.train import artifacts
artifacts.generate_artifacts(
    "model.onnx", requires_grad=["fc.weight", "fc.bias"],
    loss=artifacts.LossType.CrossEntropyLoss, optimizer=artifacts.OptimType.AdamW,
    artifact_directory="files",
)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import onnx

from gradd.train import onnxblock

_logger = logging.getLogger(__name__)


class LossType(Enum):
    """A loss that generate_artifacts adds to the model."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(Enum):
    """An optimizer that generate_artifacts describes."""

    AdamW = 1
    SGD = 2


_LOSSES = {kind: getattr(onnxblock.loss, kind.name) for kind in LossType}
_OPTIMIZERS = {kind: getattr(onnxblock.optim, kind.name) for kind in OptimType}


def generate_artifacts(
    model: onnx.ModelProto | str,
    requires_grad: list[str] | None = None,
    frozen_params: list[str] | None = None,
    loss: LossType | onnxblock.Block | None = None,
    optimizer: OptimType | onnxblock.Block | None = None,
    artifact_directory: str | bytes | os.PathLike | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | bytes | os.PathLike | None = None,
    additional_output_names: list[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: list[str] | None = None,
) -> None:
    """Writes training_model.onnx, eval_model.onnx, checkpoint and optimizer_model.onnx.

    The training model is the forward with its loss, with parameters as inputs. Files that are there
    are replaced.

    Args:
        model: The model, or its path.
        requires_grad: Initializers that are trained.
        frozen_params: Initializers that are parameters, but not trained; all others stay in the
            models.
        loss: The loss on the model's outputs; None = the first output is one already.
        optimizer: The optimizer; None = no optimizer model is written.
        artifact_directory: Where the files go; None = the current folder.
        prefix: For the names of the files.
        ort_format: Not supported: gradd reads .onnx models.
        custom_op_library: Not supported: gradd runs no custom operators.
        additional_output_names: Outputs of the models behind the loss.
        nominal_checkpoint: Whether to write nominal_checkpoint, without values, as well.
        loss_input_names: The values that the loss gets; None = all outputs of the model.

    Raises:
        RuntimeError: An argument is not of its type, a parameter is both trained and frozen or not
            there, or something is not supported.
        TypeError: The optimizer is none.
    """
    loaded, path = _load(model)
    _refuse(ort_format, custom_op_library)
    _check_names(requires_grad, frozen_params, additional_output_names)
    block = _TrainingBlock(_loss_block(loss), loss_input_names, additional_output_names)
    for name in requires_grad or ():
        block.requires_grad(name)
    for name in frozen_params or ():
        block.requires_grad(name, False)
    optimizer_block = None if optimizer is None else _optimizer_block(optimizer)
    with onnxblock.base(loaded, path):
        block(*[output.name for output in loaded.graph.output])
    folder = Path(os.fsdecode(artifact_directory)) if artifact_directory is not None else Path()
    training, evaluation = block.to_model_proto()
    _save(training, folder / f"{prefix}training_model.onnx")
    _save(evaluation, folder / f"{prefix}eval_model.onnx")
    onnxblock.save_checkpoint(block.parameters(), folder / f"{prefix}checkpoint")
    if nominal_checkpoint:
        nominal = folder / f"{prefix}nominal_checkpoint"
        onnxblock.save_checkpoint(block.parameters(), nominal, nominal_checkpoint=True)
    if optimizer_block is None:
        _logger.info("no optimizer was asked for, and no optimizer model written")
        return
    with onnxblock.empty_base(opset_version=_opset(loaded)):
        optimizer_block(block.parameters())
        _save(optimizer_block.to_model_proto(), folder / f"{prefix}optimizer_model.onnx")


def _load(model: onnx.ModelProto | str) -> tuple[onnx.ModelProto, str | None]:
    if isinstance(model, (str, os.PathLike)):
        path = os.fspath(model)
        return onnx.load(path), path
    if isinstance(model, onnx.ModelProto):
        return model, None
    kind = type(model).__name__
    raise RuntimeError(f"model is a {kind}, expected an onnx.ModelProto or a path")


def _refuse(ort_format: bool, custom_op_library: Any) -> None:
    if ort_format:
        raise RuntimeError("ort_format=True: gradd writes and reads .onnx models, no .ort files")
    if custom_op_library is not None:
        library = os.fsdecode(custom_op_library)
        raise RuntimeError(f"custom_op_library={library!r}: gradd runs no custom operators")


def _check_names(
    requires_grad: list[str] | None, frozen: list[str] | None, additional: Sequence[str] | None
) -> None:
    if both := sorted(set(requires_grad or ()) & set(frozen or ())):
        raise RuntimeError(f"{', '.join(both)}: a parameter is trained or frozen, not both")
    if additional is not None and not isinstance(additional, list):
        kind = type(additional).__name__
        raise RuntimeError(f"additional_output_names is a {kind}, expected a list of names")


def _loss_block(loss: LossType | onnxblock.Block | None) -> onnxblock.Block:
    if loss is None:
        return onnxblock.blocks.PassThrough()
    if isinstance(loss, LossType):
        return _LOSSES[loss]()
    if isinstance(loss, onnxblock.Block):
        return loss
    kind = type(loss).__name__
    raise RuntimeError(f"loss is a {kind}, expected a LossType or an onnxblock.Block")


def _optimizer_block(optimizer: OptimType | onnxblock.Block) -> onnxblock.Block:
    if isinstance(optimizer, OptimType):
        return _OPTIMIZERS[optimizer]()
    if isinstance(optimizer, onnxblock.Block):
        return optimizer
    kind = type(optimizer).__name__
    raise TypeError(f"optimizer is a {kind}, expected an OptimType or an onnxblock.Block")


class _TrainingBlock(onnxblock.TrainingBlock):
    """A loss on some outputs, with others behind it."""

    def __init__(
        self,
        loss: onnxblock.Block,
        loss_inputs: list[str] | None,
        additional: list[str] | None,
    ) -> None:
        super().__init__()
        self._loss = loss
        self._loss_inputs = loss_inputs
        self._additional = additional or []

    def build(self, *outputs: str) -> Any:
        loss = self._loss(*(self._loss_inputs or outputs))
        if not self._additional:
            return loss
        first = loss if isinstance(loss, tuple) else (loss,)
        return (*first, *self._additional)


def _save(model: onnx.ModelProto, path: Path) -> None:
    if path.exists():
        _logger.info("%s is replaced", path)
    onnx.save(model, path)
    _logger.info("%s is written", path)


def _opset(model: onnx.ModelProto) -> int | None:
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx"):
            return opset.version
    return None

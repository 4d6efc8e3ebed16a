"""Losses as blocks. Each adds the input that it compares with, unless the model has one."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from gradd.train.onnxblock import blocks, graphs

_REDUCTIONS = {"mean": blocks.ReduceMean, "sum": blocks.ReduceSum}


def _check(reduction: str) -> str:
    if reduction not in (*_REDUCTIONS, "none"):
        raise RuntimeError(f"reduction {reduction!r}, expected 'mean', 'sum' or 'none'")
    return reduction


class _Loss(blocks.Block):
    """A loss of elements that is reduced at the end."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self._reduction = _check(reduction)

    def _reduce(self, name: str) -> str:
        if self._reduction == "none":
            return name
        return _REDUCTIONS[self._reduction](keepdims=False)(name)

    def _target(self, like: str, name: str) -> str:
        """The input to compare with, which is added if the model has none of that name."""
        return name if graphs.check_label(self.base, name) else blocks.InputLike(like)(name)


class MSELoss(_Loss):
    """The squared difference.

    Args:
        reduction: "mean", "sum" or "none".
    """

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Adds the loss; returns its name."""
        target = self._target(loss_input_name, target_name)
        return self._reduce(blocks.Pow(2.0)(blocks.Sub()(loss_input_name, target)))


class L1Loss(_Loss):
    """The absolute difference.

    Args:
        reduction: "mean", "sum" or "none".
    """

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Adds the loss; returns its name."""
        target = self._target(loss_input_name, target_name)
        return self._reduce(blocks.Abs()(blocks.Sub()(loss_input_name, target)))


class CrossEntropyLoss(blocks.Block):
    """The cross entropy of scores, whose second axis is that of the classes, with labels.

    Args:
        weight: One factor for each class; None = all alike.
        reduction: "mean", "sum" or "none".
        ignore_index: A label that does not count; None = all count.
    """

    def __init__(
        self,
        weight: np.ndarray | None = None,
        reduction: str = "mean",
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        self._weight = weight
        self._attributes: dict[str, Any] = {"reduction": _check(reduction)}
        if ignore_index is not None:
            self._attributes["ignore_index"] = ignore_index

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """Adds the loss; returns its name."""
        self._add_labels(scores_input_name, labels_name)
        inputs = [scores_input_name, labels_name]
        if self._weight is not None:
            inputs.append(self.add_values("celoss.weight", self._weight))
        loss, log_prob = graphs.new_name("loss"), graphs.new_name("log_prob")
        name = graphs.new_name("SoftmaxCrossEntropyLoss")
        node = onnx.helper.make_node(
            "SoftmaxCrossEntropyLoss", inputs, [loss, log_prob], name, **self._attributes
        )
        self.base.graph.node.append(node)
        return loss

    def _add_labels(self, scores: str, labels: str) -> None:
        if graphs.check_label(self.base, labels):
            return
        made = graphs.value_like(self.base, scores, ("output",))
        made.name = labels
        made.type.tensor_type.elem_type = onnx.TensorProto.INT64
        del made.type.tensor_type.shape.dim[1:2]  # the axis of the classes
        self.base.graph.input.append(made)


class BCEWithLogitsLoss(_Loss):
    """The binary cross entropy of logits x with targets z.

    It is p z softplus(-x) + (1 - z) softplus(x), which is finite for every x, where the logarithm
    of a sigmoid is not.

    Args:
        weight: A factor for each element, or for each of a row; None = 1.
        reduction: "mean", "sum" or "none".
        pos_weight: The factor p; None = 1.
    """

    def __init__(
        self,
        weight: np.ndarray | None = None,
        reduction: str = "mean",
        pos_weight: np.ndarray | None = None,
    ) -> None:
        super().__init__(reduction)
        self._weight = weight
        self._pos_weight = pos_weight

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Adds the loss; returns its name."""
        target = self._target(loss_input_name, target_name)
        positive = blocks.Mul()(target, blocks.Softplus()(blocks.Neg()(loss_input_name)))
        if self._pos_weight is not None:
            weight = self.add_values("bceloss.pos_weight", self._pos_weight)
            positive = blocks.Mul()(positive, weight)
        rest = blocks.Sub()(self.add_floats("bceloss.sub_ones", 1.0), target)
        negative = blocks.Mul()(rest, blocks.Softplus()(loss_input_name))
        loss = blocks.Add()(positive, negative)
        if self._weight is not None:
            loss = blocks.Mul()(self.add_values("bceloss.weight", self._weight), loss)
        return self._reduce(loss)

"""Blocks that make whole models: a forward, and a training model with its evaluation model."""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any

import onnx

from gradd.train.onnxblock import graphs
from gradd.train.onnxblock.blocks import Block

Parameters = tuple[list[onnx.TensorProto], list[onnx.TensorProto]]


class ForwardBlock(Block):
    """A block whose output, or outputs, become those of the model.

    A subclass stacks blocks in `build` and returns the name of the last one's output.
    """

    def __init__(self) -> None:
        super().__init__()
        self._model: onnx.ModelProto | None = None

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Adds blocks; returns the name of the output, or several."""

    def to_model_proto(self) -> onnx.ModelProto:
        """The model.

        Raises:
            RuntimeError: The block has not been called.
        """
        if self._model is None:
            raise RuntimeError("the model is not built yet: call the block first")
        return self._model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Builds the model; returns what `build` returns."""
        self.base = graphs.current().model
        output = self.build(*args, **kwargs)
        self._model = self.infer_shapes_on_base()
        graphs.set_outputs(self._model, output)
        graphs.current().model.CopyFrom(self._model)
        return output


class TrainingBlock(Block):
    """A block whose first output is the loss that a training model begins its backward at.

    The training model is the forward with its loss: parameters are inputs, and there are no
    gradient nodes, since the engine differentiates by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trained: set[str] = set()
        self._frozen: set[str] = set()
        self._parameters: Parameters | None = None
        self._models: tuple[onnx.ModelProto, onnx.ModelProto] | None = None

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Adds blocks; returns the name of the loss, or several of which it is the first."""

    def requires_grad(self, argument_name: str, value: bool = True) -> None:
        """Says that an initializer is a parameter.

        Args:
            argument_name: Its name.
            value: Whether it is trained; False = it is frozen.
        """
        if value:
            self._trained.add(argument_name)
            self._frozen.discard(argument_name)
        else:
            self._frozen.add(argument_name)
            self._trained.discard(argument_name)

    def parameters(self) -> Parameters:
        """Values of the parameters: those that are trained, and those that are frozen.

        Raises:
            RuntimeError: The block has not been called.
        """
        if self._parameters is None:
            raise RuntimeError("the parameters are not known yet: call the block first")
        return self._parameters

    def to_model_proto(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """The training model and the evaluation model.

        Raises:
            RuntimeError: The block has not been called.
        """
        if self._models is None:
            raise RuntimeError("the models are not built yet: call the block first")
        return self._models

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Builds both models; returns what `build` returns.

        Raises:
            RuntimeError: A parameter is no initializer of the model.
        """
        self.base = graphs.current().model
        output = self.build(*args, **kwargs)
        model = graphs.write_out(self.infer_shapes_on_base())
        graphs.set_outputs(model, output)
        graphs.read_numbers(model)
        self._parameters = self._take_parameters(model)
        evaluation = copy.deepcopy(model)
        _stop_training(evaluation)
        self._models = (model, evaluation)
        graphs.current().model.CopyFrom(model)
        return output

    def _take_parameters(self, model: onnx.ModelProto) -> Parameters:
        """Makes parameters inputs of the graph, behind its own; all if none was named."""
        named = self._trained | self._frozen
        there = {tensor.name for tensor in model.graph.initializer}
        if missing := sorted(named - there):
            raise RuntimeError(f"the model has no initializer {', '.join(map(repr, missing))}")
        if written := sorted(self._trained & _statistics(model)):
            raise RuntimeError(
                f"{', '.join(map(repr, written))}: running statistics of a BatchNormalization are "
                "written by each step and not trained; name them as frozen"
            )
        trained, frozen, others = [], [], []
        inputs = {value.name for value in model.graph.input}
        for tensor in model.graph.initializer:
            if named and tensor.name not in named:
                others.append(tensor)
                continue
            (trained if tensor.name in self._trained else frozen).append(copy.deepcopy(tensor))
            if tensor.name not in inputs:
                value = onnx.helper.make_tensor_value_info(
                    tensor.name, tensor.data_type, tensor.dims
                )
                model.graph.input.append(value)
        others = [copy.deepcopy(tensor) for tensor in others]
        constants = {tensor.name for tensor in others}  # which a caller might have replaced
        inputs = [copy.deepcopy(i) for i in model.graph.input if i.name not in constants]
        del model.graph.initializer[:], model.graph.input[:]
        model.graph.input.extend(inputs)
        model.graph.initializer.extend(others)
        return trained, frozen


def _statistics(model: onnx.ModelProto) -> set[str]:
    """Names of running statistics that training steps write."""
    domains = {opset.domain: opset.version for opset in model.opset_import}
    has_mode = domains.get("", domains.get("ai.onnx", 0)) >= 14  # which the number of outputs was

    def trains(node: onnx.NodeProto) -> bool:
        if not has_mode:
            return len(node.output) > 1
        return any(
            attribute.name == "training_mode" and attribute.i for attribute in node.attribute
        )

    norms = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    return {name for node in norms if trains(node) for name in node.input[3:5]}


def _stop_training(model: onnx.ModelProto) -> None:
    """Dropout lets everything through, and BatchNormalization takes its running statistics."""
    known = {value.name: value for value in model.graph.output}
    for node in model.graph.node:
        if node.op_type == "Dropout" and len(node.input) > 2:
            node.input[2] = ""
        if node.op_type == "BatchNormalization":
            for attribute in node.attribute:
                if attribute.name == "training_mode":
                    attribute.i = 0
            # Only a training has the updated statistics as outputs.
            if not any(name in known for name in node.output[1:]):
                del node.output[1:]

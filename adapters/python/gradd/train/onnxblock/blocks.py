"""Blocks: each adds nodes to the open model and returns the name of their output.

    with onnxblock.base(model) as accessor:
        output = blocks.Sigmoid()(model.graph.output[0].name)

The names and arguments are those of ONNX Runtime's onnxblock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import onnx

from gradd.train.onnxblock import graphs


class Block(ABC):
    """The base of all blocks; a subclass adds nodes to `self.base` in `build`.

    Attributes:
        base: The model to add to, while the block is called.

    Args:
        temp_file_name: Not used; ONNX Runtime kept large models under this name.
    """

    def __init__(self, temp_file_name: str = "temp.onnx") -> None:
        self.base: onnx.ModelProto = None

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Adds the block's nodes; returns the name of its output, or several."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Builds on the open model and checks what came out.

        Raises:
            RuntimeError: No model is open.
            onnx.checker.ValidationError: The model is not valid with the block.
        """
        self.base = graphs.current().model
        output = self.build(*args, **kwargs)
        graphs.check(self.base)
        return output

    def infer_shapes_on_base(self) -> onnx.ModelProto:
        """The open model with the types of all values."""
        return graphs.infer_shapes(graphs.current().model)

    def add_node(self, op: str, inputs: list[str], *, stem: str = "", **attributes: Any) -> str:
        """Adds a node with one output.

        Args:
            op: The operator.
            inputs: Names of its operands, "" for one that is left out.
            stem: For the name of the output; by default that of the operator.
            **attributes: Of the node, and its `domain`.

        Returns:
            The name of the output.
        """
        output = graphs.new_name(stem or f"{op.lower()}_output")
        node = onnx.helper.make_node(op, inputs, [output], graphs.new_name(op), **attributes)
        self.base.graph.node.append(node)
        return output

    def add_values(self, stem: str, values: Any) -> str:
        """Adds a constant; returns its name."""
        name = graphs.new_name(stem)
        self.base.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(values), name))
        return name

    def add_floats(self, stem: str, *values: float) -> str:
        """Adds a constant of f32; returns its name."""
        return self.add_values(stem, np.array(values, np.float32))


class _BinaryOp(Block):
    op: str

    def build(self, input_name1: str, input_name2: str) -> str:
        return self.add_node(self.op, [input_name1, input_name2])


class Add(_BinaryOp):
    """The sum of two values."""

    op = "Add"


class Sub(_BinaryOp):
    """Their difference."""

    op = "Sub"


class Mul(_BinaryOp):
    """Their product."""

    op = "Mul"


class Div(_BinaryOp):
    """Their quotient."""

    op = "Div"


class Pow(Block):
    """A value to a fixed power.

    Args:
        exponent: The power.
    """

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self._exponent = exponent

    def build(self, pow_input_name: str) -> str:
        return self.add_node(
            "Pow", [pow_input_name, self.add_floats("pow_exponent", self._exponent)]
        )


class _UnaryOp(Block):
    op: str

    def build(self, input_name: str) -> str:
        return self.add_node(self.op, [input_name])


class ReduceMean(Block):
    """The mean over all axes.

    Args:
        keepdims: Whether the result has as many axes.
    """

    op = "ReduceMean"

    def __init__(self, keepdims: bool = True) -> None:
        super().__init__()
        self._keepdims = int(keepdims)

    def build(self, input_name: str) -> str:
        return self.add_node(self.op, [input_name], keepdims=self._keepdims)


class ReduceSum(ReduceMean):
    """The sum over all axes, with the same argument."""

    op = "ReduceSum"


class Sigmoid(_UnaryOp):
    """The logistic function."""

    op = "Sigmoid"


class Log(_UnaryOp):
    """The natural logarithm."""

    op = "Log"


class Neg(_UnaryOp):
    """The value with the other sign."""

    op = "Neg"


class Abs(_UnaryOp):
    """The absolute value."""

    op = "Abs"


class Softplus(_UnaryOp):
    """log(1 + exp(x)), which stays finite for every x."""

    op = "Softplus"


class Constant(Block):
    """A constant of one float.

    Args:
        value_float: Its value.
    """

    def __init__(self, value_float: float) -> None:
        super().__init__()
        self._value = value_float

    def build(self) -> str:
        return self.add_floats("initializer", self._value)


class SequenceConstruct(Block):
    """A sequence of values."""

    def build(self, *sequence_input_names: str) -> str:
        return self.add_node("SequenceConstruct", list(sequence_input_names))


class ReduceAllL2(Block):
    """The square root of the sum of squares of all values together (domain com.microsoft)."""

    def build(self, *reduce_node_input_names: str) -> str:
        output = self.add_node("ReduceAllL2", [*reduce_node_input_names], domain="com.microsoft")
        self.base.graph.value_info.append(
            onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, [1])
        )
        return output


class Clip(Block):
    """A value kept within limits.

    Args:
        clip_min: The least value; None = no limit.
        clip_max: The greatest value; None = no limit.
    """

    def __init__(self, clip_min: float | None = None, clip_max: float | None = None) -> None:
        super().__init__()
        self._min = clip_min
        self._max = clip_max

    def _limit(self, stem: str, value: float | None) -> str:
        return "" if value is None else self.add_values(stem, np.float32(value))

    def build(self, clip_input_name: str) -> str:
        limits = [self._limit("clip_min", self._min), self._limit("clip_max", self._max)]
        return self.add_node("Clip", [clip_input_name, *limits])


class PassThrough(Block):
    """Adds nothing: its outputs are its inputs."""

    def build(self, *input_names: str) -> tuple[str, ...]:
        return input_names


class InputLike(Block):
    """A new input of the graph with type and shape of another input or output.

    Args:
        like: The name of the other one.
    """

    def __init__(self, like: str) -> None:
        super().__init__()
        self._like = like

    def build(self, input_name: str | None = None) -> str:
        """Adds the input.

        Args:
            input_name: Its name; None = one that is made up.

        Raises:
            LookupError: The graph has no input or output `like`.
        """
        made = graphs.value_like(self.base, self._like)
        made.name = input_name or graphs.new_name("input")
        self.base.graph.input.append(made)
        return made.name


class LabelEncoder(Block):
    """Replaces keys by values (domain ai.onnx.ml).

    Args:
        default_float: What a key that is not in the list becomes, as a float.
        default_int64: The same as an integer.
        default_string: The same as a text.
        keys_floats: Keys, if they are floats.
        keys_int64s: Keys, if they are integers.
        keys_strings: Keys, if they are texts.
        values_floats: Values, if they are floats.
        values_int64s: Values, if they are integers.
        values_strings: Values, if they are texts.
    """

    def __init__(
        self,
        default_float: float = 0.0,
        default_int64: int = -1,
        default_string: str = "_Unused",
        keys_floats: list[float] | None = None,
        keys_int64s: list[int] | None = None,
        keys_strings: list[str] | None = None,
        values_floats: list[float] | None = None,
        values_int64s: list[int] | None = None,
        values_strings: list[str] | None = None,
    ) -> None:
        super().__init__()
        lists = {
            "keys_floats": keys_floats,
            "keys_int64s": keys_int64s,
            "keys_strings": keys_strings,
            "values_floats": values_floats,
            "values_int64s": values_int64s,
            "values_strings": values_strings,
        }
        self._attributes = {
            "default_float": default_float,
            "default_int64": default_int64,
            "default_string": default_string,
        } | {name: values for name, values in lists.items() if values is not None}

    def build(self, label_encoder_input_name: str) -> str:
        return self.add_node(
            "LabelEncoder",
            [label_encoder_input_name],
            stem="label_encoder.output",
            domain="ai.onnx.ml",
            **self._attributes,
        )


class Cast(Block):
    """A value as another type.

    Args:
        to: The type, as onnx.TensorProto names it.
    """

    def __init__(self, to: int) -> None:
        super().__init__()
        self._to = to

    def build(self, cast_input_name: str) -> str:
        return self.add_node("Cast", [cast_input_name], stem="cast.output", to=self._to)


class Linear(Block):
    """A layer y = alpha x W + beta b with new weights, drawn from a normal distribution.

    Args:
        in_features: Columns of x.
        out_features: Columns of y.
        bias: Whether there is a b.
        alpha: Factor of the product.
        beta: Factor of b.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        alpha: float = 1.0,
        beta: float = 1.0,
    ) -> None:
        super().__init__()
        self._shape = (in_features, out_features)
        self._bias = bias
        self._factors = {"alpha": float(alpha), "beta": float(beta)}

    def build(self, linear_input_name: str) -> str:
        weight = np.random.randn(*self._shape).astype(np.float32)
        inputs = [linear_input_name, self.add_values("linear.weight", weight)]
        if self._bias:
            bias = np.random.randn(self._shape[1]).astype(np.float32)
            inputs.append(self.add_values("linear.bias", bias))
        return self.add_node("Gemm", inputs, stem="linear.output", **self._factors)

"""Values that capture hands out: what a captured graph takes, gives and means.

Nothing here imports torch at module level or knows how a graph is made, so the bridge, the
options and the tests can use these types without paying for the exporter. All of them are
frozen: a Capture is shared by every call with the same key, also between threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class CaptureError(Exception):
    """A module cannot be captured; the caller falls back to torch or raises.

    Attributes:
        reason: Stable short name, one of REASONS.
        message: What was found, where, and what to do about it.
    """

    REASONS = (
        "attribute_written",
        "autocast",
        "autograd_function",
        "backward_hooks",
        "backward_refused",
        "being_traced",
        "data_dependent_control_flow",
        "export_failed",
        "flush_denormal",
        "forward_ad",
        "forward_hooks",
        "forward_replaced",
        "func_transform",
        "input_mutation",
        "outside_state",
        "memory_layout",
        "nested_wrapper",
        "outside_written",
        "python_random",
        "sequence_or_loop",
        "tensor_subclass",
        "unsupported_input_type",
        "unsupported_operator",
        "unsupported_output_type",
        "unsupported_parameter",
    )

    def __init__(self, reason: str, message: str) -> None:
        if reason not in self.REASONS:
            raise ValueError(f"unknown capture error reason {reason!r}")
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message

    def __reduce__(self) -> tuple:
        return (type(self), (self.reason, self.message))


@dataclass(frozen=True)
class InputSpec:
    """A graph input that comes from the call: its name, its leaf number, its element type."""

    name: str
    leaf: int
    dtype: str


@dataclass(frozen=True)
class OutputSpec:
    """A graph output, of one of three kinds.

    "user": a leaf of the module's result; "buffer": a buffer's new value; "rows": the indices of a
    lookup in a parameter, whose gradient is sparse and has these rows, but for the padding index.
    """

    name: str
    kind: str
    fqn: str | None
    leaf: int | None
    dtype: str
    padding: int = -1


@dataclass(frozen=True)
class SharedSpec:
    """A result leaf that is a tensor which the caller has or gets anyway, or shares its memory.

    It is no graph output: the bridge puts it together from its source.

    Attributes:
        leaf: Its number among the result leaves.
        kind: What the source is: "output" (another result leaf, ready before this one),
            "argument", "state" (a parameter or a buffer) or "outside".
        source: Number of the leaf, qualified name, or what has get().
        same: It is the very object of the source.
        way: How its history follows: "view", or cut off by "no_grad", "detach" or "data".
        form: Sizes, strides, and the distance from the start of the source, in elements; numbers
            or expressions over the symbols of `DimRules`. None: those of the source. With a form,
            the source lies in memory as `strides` say, or contiguously.
        strides: Of a source that belongs to the module or to outside; else None.
    """

    leaf: int
    kind: str
    source: Any
    same: bool = True
    way: str = "view"
    form: tuple[tuple[int | str, ...], tuple[int | str, ...], int | str] | None = None
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class DimRules:
    """What the trace assumed about sizes; check_dynamic() evaluates it for another call.

    Attributes:
        shapes: Per tensor of the call: (leaf, sizes); a size is an int or the name of a symbol.
        ranges: Per symbol: (name, smallest, largest or None).
        guards: Python expressions over L["leaves"][i].size()[j], as torch.export states them;
            i counts the tensors in the order of `shapes`.
    """

    shapes: tuple[tuple[int, tuple[int | str, ...]], ...] = ()
    ranges: tuple[tuple[str, int, int | None], ...] = ()
    guards: tuple[str, ...] = ()


@dataclass(frozen=True)
class Capture:
    """One captured graph and everything needed to feed it and to rebuild the module's result.

    Attributes:
        onnx: Serialised ModelProto without weights, opset 23 and domain com.gradd version 1.
            Parameters and buffers in use are graph inputs named by their qualified name.
        inputs: Inputs of the call that the graph uses, in the order of the graph.
        params: Qualified names of the parameters that are graph inputs (canonical aliases).
        buffers: Qualified names of the buffers that are graph inputs.
        aliases: Groups of names that are one tensor, canonical name first.
        outputs: Graph outputs in order.
        unflatten: Turns the list of result leaves (None where the caller has no value) into the
            module's own result structure; python constants and None are filled in.
        flat: Class, keys and leaves of a result of a simple form, see Result.flat().
        loss_leaf: Result leaf that is the loss (see outputs.find_loss), or None.
        depends: Result leaves on which a result leaf depends, for those that do.
        sources: (node name, "module.path @ file:line"), for messages; not part of the bytes.
        seconds: Time spent per phase.
        dims: Assumptions about sizes, see check_dynamic().
        outside: Inputs that come neither from the call nor from the module: name and source, whose
            get() gives the tensor of now. They belong to one module.
        guards: What forward() read from outside, of one module; None if it is not watched.
        shared: Result leaves that are no outputs of the graph, in an order in which they can be
            made. If all are, one is an output nevertheless, as a graph needs one.
        checkpoints: forward() has called activation checkpoints, which are not in the graph.
    """

    onnx: bytes
    inputs: tuple[InputSpec, ...]
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    aliases: tuple[tuple[str, ...], ...]
    outputs: tuple[OutputSpec, ...]
    unflatten: Callable[[list], Any]
    loss_leaf: int | None
    depends: Mapping[int, frozenset[int]]
    sources: tuple[tuple[str, str], ...]
    seconds: dict[str, float]
    dims: DimRules = field(default_factory=DimRules)
    outside: tuple[tuple[str, Any], ...] = ()
    guards: Any = None
    shared: tuple[SharedSpec, ...] = ()
    flat: tuple[type | None, list[str], list[int]] | None = None
    checkpoints: bool = False

    @property
    def loss_ancestors(self) -> frozenset[int]:
        """Result leaves on which the loss depends."""
        return self.depends.get(self.loss_leaf, frozenset())  # type: ignore[arg-type]


# ONNX TensorProto.DataType code -> our name; one list for the whole adapter side of capture.
ONNX_DTYPES = {
    1: "f32",
    2: "u8",
    3: "i8",
    5: "i16",
    6: "i32",
    7: "i64",
    9: "bool",
    10: "f16",
    11: "f64",
    16: "bf16",
}

"""The model that blocks are stacked on, and what they ask of it."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx
import onnx.inliner

LARGEST = 2**31 - 1  # bytes of a protobuf message: a larger model goes through files
_numbers = itertools.count(1)


class ModelAccessor:
    """Holds the model that blocks change.

    Args:
        model: The model.
        model_path: Where it came from; None if it was made in memory.
    """

    def __init__(self, model: onnx.ModelProto, model_path: str | None = None) -> None:
        self._model = model
        self._path = model_path

    @property
    def model(self) -> onnx.ModelProto:
        """The model as the blocks have left it."""
        return self._model

    @property
    def path(self) -> str:
        """The path that was given with the model.

        Raises:
            RuntimeError: There was none.
        """
        if self._path is None:
            raise RuntimeError(
                "the model was given without a path: use onnxblock.base(model, path)"
            )
        return self._path

    @property
    def has_path(self) -> bool:
        """Whether there is one."""
        return self._path is not None


_current: ModelAccessor | None = None


def current() -> ModelAccessor:
    """The accessor of the `with` block around the call.

    Raises:
        RuntimeError: There is no `with onnxblock.base(model)` around it.
    """
    if _current is None:
        raise RuntimeError(
            "no model to add to: build blocks inside `with onnxblock.base(model):` "
            "or `with onnxblock.empty_base():`"
        )
    return _current


@contextlib.contextmanager
def _opened(accessor: ModelAccessor) -> Iterator[ModelAccessor]:
    global _current
    if _current is not None:
        raise RuntimeError("a base model is open already: one `with onnxblock.base()` at a time")
    _current = accessor
    try:
        yield accessor
    finally:
        _current = None


def base(
    model: onnx.ModelProto, model_path: str | None = None
) -> contextlib.AbstractContextManager[ModelAccessor]:
    """Makes a copy of `model` the one that blocks add to, inside a `with`.

    Args:
        model: The model to build on.
        model_path: Its file, if it has one.

    Returns:
        A context manager; its value has the changed model as `.model`.

    Raises:
        RuntimeError: The model is None, or another base is open.
    """
    if model is None:
        raise RuntimeError("the base model is None: onnxblock.empty_base() starts without one")
    model = copy.deepcopy(model)
    model.ir_version = max(model.ir_version, 4)  # before it, constants are inputs too
    return _opened(ModelAccessor(model, model_path))


def empty_base(
    opset_version: int | None = None,
) -> contextlib.AbstractContextManager[ModelAccessor]:
    """The same with a model without nodes.

    Args:
        opset_version: Of ONNX's operators; None = the newest that the package onnx has.
    """
    model = onnx.ModelProto()
    model.ir_version = min(onnx.IR_VERSION, 10)
    model.producer_name = "gradd"
    model.graph.name = "graph"
    version = opset_version or onnx.defs.onnx_opset_version()
    model.opset_import.extend(
        [onnx.helper.make_opsetid("com.microsoft", 1), onnx.helper.make_opsetid("", version)]
    )
    return _opened(ModelAccessor(model))


@contextlib.contextmanager
def custom_op_library(custom_op_library_path: str | os.PathLike) -> Iterator[Path]:
    """Where ONNX Runtime registers operators of a shared library; gradd runs none.

    Raises:
        RuntimeError: Always: the training would miss those operators.
    """
    raise RuntimeError(
        f"{os.fspath(custom_op_library_path)}: gradd runs no custom operators; write them as "
        "functions of the model, or with operators of ONNX"
    )
    yield Path()


# ---- names and values of a graph -------------------------------------------------------------


def new_name(stem: str) -> str:
    """A name that no other call returned: "onnx::loss::7"."""
    return f"onnx::{stem}::{next(_numbers)}"


def has_value(model: onnx.ModelProto, name: str) -> bool:
    """Whether some node reads or writes a value of that name."""
    return any(name in node.input or name in node.output for node in model.graph.node)


def check_label(model: onnx.ModelProto, name: str) -> bool:
    """Whether the label of that name is an input of the model already; else it is to be added.

    Raises:
        RuntimeError: The name is that of a parameter, a constant or a result of the model.
    """
    made = {output for node in model.graph.node for output in node.output}
    if name in made or any(tensor.name == name for tensor in model.graph.initializer):
        kind = "a result of a node" if name in made else "an initializer"
        raise RuntimeError(
            f"the label of the loss is the input {name!r}, but {name!r} is {kind} of the model: "
            "rename that, or call the loss's block with another name for the label"
        )
    return any(value.name == name for value in model.graph.input)


def value_like(
    model: onnx.ModelProto, name: str, kinds: tuple[str, ...] = ("input", "output")
) -> onnx.ValueInfoProto:
    """A copy of the description of an input or output, or of one of these kinds.

    Raises:
        LookupError: The graph has none of that name.
    """
    for kind in kinds:
        for value in getattr(model.graph, kind):
            if value.name == name:
                return copy.deepcopy(value)
    raise LookupError(f"the graph has no {' or '.join(kinds)} {name!r}")


def set_outputs(model: onnx.ModelProto, names: str | Sequence[str]) -> None:
    """Makes values the outputs of the graph, in this order.

    Raises:
        LookupError: The type of one is not known.
    """
    known = {value.name: value for value in (*model.graph.value_info, *model.graph.output)}
    outputs = []
    fixed = {value.name for value in (*model.graph.input, *model.graph.initializer)}
    for name in [names] if isinstance(names, str) else names:
        if name in fixed:
            raise LookupError(
                f"{name!r} cannot be an output: it is an input or a parameter of the model"
            )
        if name not in known:
            raise LookupError(f"{name!r} cannot be an output: no value of that name has a type")
        outputs.append(copy.deepcopy(known[name]))
    listed = {*fixed, *(value.name for value in (*model.graph.value_info, *outputs))}
    model.graph.value_info.extend(  # what it declares is kept for an export of them
        value for value in model.graph.output if value.name not in listed
    )
    del model.graph.output[:]
    model.graph.output.extend(outputs)


def read_numbers(model: onnx.ModelProto) -> None:
    """Makes inputs of strings, which nodes cast to a number, inputs of such numbers.

    The engine has no strings; a module reads the numbers in an array of strings by itself.
    """
    for value in model.graph.input:
        kind = value.type.tensor_type
        if kind.elem_type != onnx.TensorProto.STRING:
            continue
        users = [node for node in model.graph.node if value.name in node.input]
        types = {a.i for node in users for a in node.attribute if a.name == "to"}
        if len(types) != 1 or any(node.op_type != "Cast" for node in users):
            continue
        kind.elem_type = types.pop()
        for node in users:
            node.op_type = "Identity"
            del node.attribute[:]


def _name_defaults(
    nodes: Sequence[onnx.NodeProto], defaults: dict[tuple[str, ...], Sequence[onnx.AttributeProto]]
) -> None:
    """Gives calls of functions the attributes that they leave to the function's default."""
    for node in nodes:
        given = {attribute.name for attribute in node.attribute}
        own = defaults.get((node.domain, node.op_type, getattr(node, "overload", "")), ())
        node.attribute.extend(attribute for attribute in own if attribute.name not in given)
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                _name_defaults(graph.node, defaults)


def write_out(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, which may change, with its own functions in place of their calls."""
    if not model.functions:
        return model
    # onnx's inliner drops what a function has a default for
    defaults = {
        (
            function.domain,
            function.name,
            getattr(function, "overload", ""),
        ): function.attribute_proto
        for function in model.functions
    }
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        _name_defaults(nodes, defaults)
    return onnx.inliner.inline_local_functions(model)


# ---- models of 2 GiB and more ----------------------------------------------------------------


@contextlib.contextmanager
def _as_file(model: onnx.ModelProto) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gradd-") as folder:
        path = os.path.join(folder, "model.onnx")
        stored = copy.deepcopy(model)
        onnx.save(stored, path, save_as_external_data=True, location="model.onnx.data")
        yield path


def _fits(model: onnx.ModelProto) -> bool:
    try:
        return model.ByteSize() <= LARGEST
    except Exception:  # protobuf's own, of several kinds, where it cannot count that far
        return False


def check(model: onnx.ModelProto) -> None:
    """Runs onnx's checker, shapes included.

    Raises:
        onnx.checker.ValidationError: The model is not valid.
    """
    if _fits(model):
        onnx.checker.check_model(model, True)
        return
    with _as_file(model) as path:
        onnx.checker.check_model(path, True)


def infer_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model with the types of its values."""
    if _fits(model):
        return onnx.shape_inference.infer_shapes(model)
    with _as_file(model) as path:
        onnx.shape_inference.infer_shapes_path(path)
        return onnx.load(path)

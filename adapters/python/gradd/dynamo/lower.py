"""Lowers a graph of TorchDynamo to a flat graph of aten operators, still before autograd.

Dynamo's graph holds calls of torch's Python functions, each with the fake tensor that it returns.
This module repeats each call under a dispatch mode that records the operators which the function
calls. Most functions call one operator, which is not computed again: its result is the fake tensor
that Dynamo knows. So a node costs a fraction of a millisecond instead of the ten that torch's own
tracer needs to propagate symbolic sizes. A function that calls several operators runs on fake
tensors.

Sizes are expressions over the sizes of the inputs. Regions without gradients, detached aliases and
autocast become marks of nodes, see graph/nodes.py, and casts.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
import torch.fx
from sympy.logic.boolalg import BooleanAtom
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
)

from gradd import private
from gradd.dynamo import arithmetic, modes, planned_numbers
from gradd.graph import autocast, rules
from gradd.graph.locations import location_of
from gradd.graph.nodes import (
    DATA,
    INFERENCE,
    OFF,
    fake_mode,
    is_mutable,
    storages,
    takes_graphs,
    targets,
)
from gradd.graph.recurrent import LAYERS
from gradd.memory import devices
from gradd.memory.watch import address
from gradd.spec import CaptureError

_aten = torch.ops.aten
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
ORIGIN = "gradd_origin"  # mark of nodes: the node of Dynamo's graph that they come from
_CAST = "gradd_cast"  # mark of nodes: autocast to this type is on
_UNKNOWN = object()
# They change a fake tensor itself: Dynamo's record of it is not its state before the call.
CUSTOM = "autograd_function_apply"  # of autograd.Function
_RESHAPING = frozenset(
    {
        *("resize_", "resize_as_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_"),
        *("swapaxes_", "swapdims_", "as_strided_"),
    }
)
_ATTRIBUTES = ("__delattr__", "__setattr__")  # of a tensor: no operator, and no result
# The daemon plans them for bounds that it knows.
_BOUNDED = {
    *(_aten.slice.Tensor, _aten.slice_scatter.default, _aten.roll.default),
    *(_aten.arange.default, _aten.arange.start, _aten.arange.start_step),
}


def _indexes(node: torch.fx.Node) -> bool:
    """Whether a node is an index of several parts: C++ code that looks at what lies between."""
    index = node.target in (operator.getitem, operator.setitem)
    return index and isinstance(node.args[1], (tuple, list))


def _may_give(func: Any, args: tuple, value: Any) -> bool:
    """Whether a value has the form of an operator's result."""
    returns = private.schema(func).returns
    if len(returns) == 1 and str(returns[0].type) == "Tensor":
        # NumPy's float32(1) converts a constant, as the second of its steps
        like = args[0] if func is _aten.clone.default else value
        return isinstance(value, torch.Tensor) and value.dtype is like.dtype
    return isinstance(value, (list, tuple)) and len(returns) in (1, len(value))


def _is_same(a: Any, b: torch.Tensor) -> bool:
    """Whether two objects are one tensor without values."""
    if not isinstance(a, FakeTensor) or a.dtype is not b.dtype:
        return False
    if address(a) != address(b):
        return False
    return a.shape == b.shape and a.stride() == b.stride()


def _is_within(
    tensor: torch.Tensor, size: Sequence[Any], stride: Sequence[Any], offset: Any = None
) -> bool:
    """Whether as_strided() reads elements of a tensor that lies in memory as its indices count."""
    if not tensor.is_contiguous() or (offset is not None and tensor.storage_offset() != 0):
        return False
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + (offset or 0)
    return bool(last < tensor.numel())


def _takes_all(node: torch.fx.Node) -> bool:
    """Whether a slice leaves nothing out, which the translation sees."""
    if node.target is not _aten.slice.Tensor:
        return False
    before, after = (x.meta["val"].shape for x in (node.args[0], node))  # type: ignore[union-attr]
    return list(map(str, before)) == list(map(str, after))  # to compare sizes would guard them


class _SeveralError(Exception):
    """A function calls more than one operator."""


class Lowered:
    """A flat graph.

    Attributes:
        graph: Placeholders (tensors alone), operators, and one output: a tuple.
        inputs: Per placeholder the node of Dynamo's graph that it stands for, or a tensor: a
            constant.
        written: Positions in `inputs` of those that the graph writes to.
        planned: Positions in `inputs` of numbers that come as sizes, see planned_numbers.py.
    """

    def __init__(self) -> None:
        self.graph = torch.fx.Graph()
        self.inputs: list[torch.fx.Node | torch.Tensor] = []
        self.written: list[int] = []
        self.planned: set[int] = set()

    def placeholders(self) -> list[torch.fx.Node]:
        """In the order of `inputs`."""
        return list(self.graph.find_nodes(op="placeholder"))


def attribute(owner: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
    value: Any = owner
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def name_of(node: torch.fx.Node) -> str:
    """The name of a node's function: `linear`, `add`."""
    target = node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def readable_name(node: torch.fx.Node) -> str:
    """The same for messages: names that torch uses for itself say nothing to users."""
    if node.target is getattr:  # x.real
        return f".{node.args[1]}"
    name = name_of(node)
    return "a custom autograd.Function" if name == CUSTOM else name


def value_of(node: torch.fx.Node) -> Any:
    """Dynamo's record of a node's value: fake tensors, numbers, or lists of them."""
    return node.meta.get("example_value", node.meta.get("val"))


def lower(
    nodes: Sequence[torch.fx.Node],
    inputs: Sequence[torch.fx.Node],
    outputs: Sequence[torch.fx.Node],
    owner: torch.fx.GraphModule,
) -> Lowered:
    """Lowers some nodes of a graph of Dynamo, whose modes are marked.

    Args:
        nodes: In the order of the graph.
        inputs: Nodes whose tensors come from elsewhere; one placeholder for those of one tensor.
        outputs: Nodes whose tensors are wanted.
        owner: The module of the graph.

    Raises:
        CaptureError: A node does something that no graph of ours can hold.
    """
    planned = planned_numbers.symbols(value_of(n) for n in (*inputs, *nodes))
    while True:
        recorder = _recorded(nodes, inputs, owner, planned)
        if not recorder.late:
            break
        planned |= recorder.late
    if recorder.refused:
        error = next(iter(recorder.refused.values()))
        error.nodes = recorder.refused  # type: ignore[attr-defined]
        raise error
    recorder.finish(outputs)
    return recorder.done


def _recorded(
    nodes: Sequence[torch.fx.Node],
    inputs: Sequence[torch.fx.Node],
    owner: torch.fx.GraphModule,
    planned: set[sympy.Symbol],
) -> _Recorder:
    values = [value_of(n) for n in (*inputs, *nodes)]
    mode = fake_mode(values)
    recorder = _Recorder(Lowered(), inputs, owner, mode, planned, _device_of(values))
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(True))
        stack.enter_context(autocast.entered(frozenset()))
        if mode is not None:
            stack.enter_context(mode)
        stack.enter_context(private.enable_python_dispatcher())
        stack.enter_context(recorder)
        for node in nodes:
            recorder.take(node)
    return recorder


def _device_of(values: Iterable[Any]) -> str:
    """The type of device of some values: of the CPU there may be numbers among those of a GPU."""
    types = {v.device.type for v in values if isinstance(v, torch.Tensor)}
    return next((t for t in devices.types() if t in types and t != "cpu"), "cpu")


class _Recorder(ProxyTorchDispatchMode):  # the kind of mode that torch lets in here
    """Records the operators that functions of torch call."""

    def __init__(
        self,
        done: Lowered,
        inputs: Sequence[torch.fx.Node],
        owner: torch.fx.GraphModule,
        mode: Any,
        planned: set[sympy.Symbol],
        device: str,
    ) -> None:
        super().__init__(PythonKeyTracer(), "real", pre_dispatch=True)
        self.mode = mode  # of the fake tensors; None: there are none
        self.device = device  # type: autocast for any other does not change what they give
        self.done = done
        self.flat = done.graph
        self.owner = owner
        self.known: dict[torch.fx.Node, Any] = {}  # values of Dynamo's nodes
        self.nodes: dict[int, torch.fx.Node] = {}  # of tensors, by id: the last that wrote them
        self.kept: list[Any] = []  # so that ids stay theirs
        self.sizes: dict[sympy.Expr, tuple[torch.fx.Node, int]] = {}  # axes of inputs
        self.numbers_of: tuple[dict[Any, torch.fx.Node], ...] = ({}, {})  # by expression
        self.as_data = False  # the present operator computes with numbers; one of sizes does not
        self.bounds = False  # of its result's sizes: it takes numbers for that
        self.planned = planned  # symbols whose values a plan knows
        self.scalars: set[sympy.Symbol] = set()  # those of numbers that go in as data
        self.late: set[sympy.Symbol] = set()  # of these, those of sizes that showed up later
        self.opaque: dict[sympy.Symbol, torch.fx.Node] = {}  # numbers that torch misjudges
        self.refused: dict[torch.fx.Node, CaptureError] = {}  # nodes that need them in a plan
        self.last_input: torch.fx.Node | None = None
        self.origin: torch.fx.Node | None = None
        self.data = False
        self.last: torch.fx.Node | None = None  # of the call, with one result
        self.expected: Any = _UNKNOWN
        self.before: list[tuple[int, torch.fx.Node | None]] = []  # changes to nodes by a try
        self.steps = 0
        for node in inputs:
            self._add_input(node)

    # ---- values ----

    def _add_input(self, node: torch.fx.Node) -> None:
        value = value_of(node)
        self.known[node] = value
        if not isinstance(value, torch.Tensor) or id(value) in self.nodes:
            return
        placeholder = self._placeholder(node.name, node, value)
        for axis, size in enumerate(value.shape):
            expression = size.node.expr if isinstance(size, torch.SymInt) else None
            if expression is not None and not expression.is_number:
                self.sizes.setdefault(expression, (placeholder, axis))

    def _placeholder(
        self, name: str, source: torch.fx.Node | torch.Tensor, value: Any
    ) -> torch.fx.Node:
        if self.last_input is None:
            made = self.flat.placeholder(name)
        else:
            with self.flat.inserting_after(self.last_input):
                made = self.flat.placeholder(name)
        made.target = made.name  # a number may go in twice, as a size and as data
        self.last_input = made
        self.done.inputs.append(source)
        made.meta["val"] = value
        if isinstance(value, torch.Tensor):
            self._track(value, made)
        return made

    def _track(self, tensor: torch.Tensor, node: torch.fx.Node) -> None:
        if self.expected is not _UNKNOWN:  # may be taken back
            self.before.append((id(tensor), self.nodes.get(id(tensor))))
        self.nodes[id(tensor)] = node
        self.kept.append(tensor)

    def _operand(self, value: Any) -> Any:
        """The substitute for a value among the arguments of an operator."""
        if isinstance(value, torch.Tensor):
            node = self.nodes.get(id(value)) or self._copied(value)
            if node is None:
                node = self._constant(value)
            return node
        if isinstance(value, SYMBOLIC):
            return self._number(value)
        if isinstance(value, torch.Generator):
            raise self._refusal("unsupported_operator", "draws from a generator of its own")
        return value

    def _copied(self, tensor: torch.Tensor) -> torch.fx.Node | None:
        """The node of a tensor that torch.empty_like() and others have copied: `kept` holds it."""
        if isinstance(tensor, FakeTensor):
            for known in reversed(self.kept):
                if id(known) in self.nodes and _is_same(known, tensor):
                    self._track(tensor, self.nodes[id(known)])
                    return self.nodes[id(known)]
        return None

    def _constant(self, tensor: torch.Tensor) -> torch.fx.Node:
        if isinstance(tensor, FakeTensor) or self.mode is None:
            raise self._refusal("export_failed", "uses a tensor that the graph does not know")
        fake = self.mode.from_tensor(tensor, static_shapes=True)
        made = self._placeholder(f"constant_{len(self.done.inputs)}", tensor, fake)
        self._track(tensor, made)
        return made

    def _number(self, value: Any) -> Any:
        """A node for a size or a number made of sizes; itself where it is known by now."""
        expression = value.node.expr
        if expression.is_number or isinstance(expression, BooleanAtom):
            return value.node.pytype(expression)
        floats = isinstance(value, torch.SymFloat) and not isinstance(expression, sympy.Symbol)
        # A plan has to know it: arange(0, n / 10).
        bound = floats and self.bounds and expression.free_symbols <= self.sizes.keys()
        found = None if bound else self.numbers.get(expression)
        if found is not None:
            return found
        # Python computes floats of floats before the graph runs, in doubles.
        floats = floats and not bound
        if floats or arithmetic.is_pythons(expression):
            made = self._computed(expression)
            if made is not None:
                self.numbers[expression] = made
                return made
            if not floats:
                raise self._refusal("export_failed", f"needs {expression}, which no operator gives")
        rest, axes = self._of_axes(expression)
        parts: dict[sympy.Symbol, torch.fx.Node] = {}
        outside = not rest.free_symbols <= axes.keys() | self.sizes.keys()
        # A plan need not know more: i % 4, and not i. Nor do Python's whole numbers wrap around.
        if outside and (not self.as_data or arithmetic.may_wrap(expression)):
            made = self._computed(expression)
            if made is not None:
                self.numbers[expression] = made
                return made
            rest, parts = self._of_parts(expression)
            rest, axes = self._of_axes(rest)
        known = {}
        for symbol in rest.free_symbols:
            axis = axes.get(symbol, symbol)
            node = parts.get(symbol)
            if node is None:
                node = self._size(axis) if axis in self.sizes else self._given(axis)
            known[symbol] = torch.fx.Proxy(node, arithmetic.Appending(self.flat))
        try:
            made = arithmetic.computed(rest, known).node
        except Exception as error:
            made = self._computed(expression)
            if made is None:
                text = f"needs the size {expression}, which has no operator"
                raise self._refusal("export_failed", text) from error
        if not bound:
            self.numbers[expression] = made
        return made

    def _of_axes(self, expression: sympy.Expr) -> tuple[sympy.Expr, dict[sympy.Symbol, sympy.Expr]]:
        """A number in terms of axes that are no symbols themselves, if it needs that.

        Behind a pooling an axis is (n - 3) // 2, and nothing that goes in has one of n.

        Returns:
            The number, and the axes that symbols in it stand for.
        """
        if expression.free_symbols <= self.sizes.keys():
            return expression, {}
        axes = {
            sympy.Dummy(integer=True, nonnegative=True): axis
            for axis in self.sizes
            if not isinstance(axis, sympy.Symbol)
        }
        return expression.xreplace({axis: symbol for symbol, axis in axes.items()}), axes

    def _of_parts(
        self, expression: sympy.Expr
    ) -> tuple[sympy.Expr, dict[sympy.Symbol, torch.fx.Node]]:
        """A size in terms of whole numbers that Python computes, as int(n * ratio).

        Returns:
            The size, and the nodes that symbols in it stand for.
        """
        values = map(value_of, self.owner.graph.nodes)
        known = {v.node.expr for v in values if isinstance(v, torch.SymInt)}
        inner = [x for x in sympy.preorder_traversal(expression) if x in known and x.args]
        found = {}
        for part in dict.fromkeys(inner):  # the largest first
            if expression.has(part) and (made := self._computed(part)) is not None:
                symbol = sympy.Dummy(integer=True, nonnegative=None if self.as_data else True)
                expression = expression.xreplace({part: symbol})
                found[symbol] = made
        return expression, found

    def _computed(self, expression: sympy.Expr) -> torch.fx.Node | None:
        """An input for a number that Python computes before the graph runs: min(1.0, step / 9)."""
        for node in self.owner.graph.nodes:
            value = value_of(node)
            if isinstance(value, (torch.SymInt, torch.SymFloat)) and value.node.expr == expression:
                return self._brought(node, value)
        return None

    def _brought(self, node: torch.fx.Node, value: torch.SymInt | torch.SymFloat) -> torch.fx.Node:
        """An input for the number that a node of Dynamo's graph computes."""
        if isinstance(value, torch.SymInt):
            return self._whole(node, value)
        scalar = torch.zeros((), dtype=torch.float64, device="cpu")
        fake = self.mode.from_tensor(scalar, static_shapes=True)
        given = self._placeholder(node.name, node, fake)
        made = self.flat.call_function(_aten._local_scalar_dense.default, (given,))
        made.meta["val"] = value
        return made

    def _opaque(self, node: torch.fx.Node, value: Any) -> Any:
        """A number of which torch knows nothing, in place of one that it misjudges.

        It goes in as an input. A function that has to know it cannot be lowered, and runs in
        PyTorch.
        """
        env = value.node.shape_env
        with env.ignore_fresh_unbacked_symbols():
            whole = isinstance(value, torch.SymInt)
            made = env.create_unbacked_symint() if whole else env.create_unbacked_symfloat()
        self.opaque[made.node.expr] = node
        self.known[node] = made
        return made

    def _whole(self, node: torch.fx.Node, value: torch.SymInt) -> torch.fx.Node:
        """An input for a whole number; one that decides about sizes comes as a size."""
        if self.as_data:
            return self._placeholder(node.name, node, value)
        unknown = value.node.expr.free_symbols - self.planned
        if unknown:
            self.scalars |= unknown
            return self._placeholder(node.name, node, value)
        self.done.planned.add(len(self.done.inputs))
        given = self._placeholder(node.name, node, planned_numbers.as_tensor(value))
        axes = [self.flat.call_function(_aten.sym_size.int, (given, i)) for i in range(2)]
        made = self.flat.call_function(operator.sub, tuple(axes))
        values = (*given.meta["val"].shape[:2], value)
        for number, known in zip((*axes, made), values, strict=True):
            number.meta.update(self._place(), val=known)
        return made

    @property
    def numbers(self) -> dict[Any, torch.fx.Node]:
        """Nodes of numbers, for the present operator."""
        return self.numbers_of[self.as_data]

    def _size(self, expression: sympy.Expr) -> torch.fx.Node:
        found = self.numbers.get(expression)
        if found is None:
            source, axis = self.sizes[expression]
            found = self.flat.call_function(_aten.sym_size.int, (source, axis))
            found.meta.update(self._place())
            found.meta["val"] = source.meta["val"].shape[axis]
            self.numbers[expression] = found
        return found

    def _given(self, symbol: sympy.Symbol) -> torch.fx.Node:
        """A number that a call brings: an argument, or the result of item() on one."""
        found = self.numbers.get(symbol)
        if found is not None:
            return found
        if symbol in self.opaque:
            node = self.opaque[symbol]
            self.numbers[symbol] = made = self._brought(node, self.known[node])
            return made
        for node in self.owner.graph.nodes:
            value = value_of(node)
            if not isinstance(value, SYMBOLIC) or value.node.expr != symbol:
                continue
            is_given = node.op == "placeholder" or arithmetic.taken_from(node) is not None
            if is_given and isinstance(value, torch.SymInt):
                found = self._whole(node, value)
            elif node.op == "placeholder":
                found = self._placeholder(node.name, node, value)
            elif name_of(node) == "item" and isinstance(value, torch.SymFloat):
                given = node.args[0]
                tensor = self._known_value(given)  # type: ignore[arg-type]
                source = self.nodes.get(id(tensor))
                if source is None and given.op == "placeholder":  # type: ignore[union-attr]
                    source = self._placeholder(given.name, given, tensor)  # type: ignore
                if source is None:
                    continue
                found = self.flat.call_function(_aten._local_scalar_dense.default, (source,))
                found.meta["val"] = value
            else:
                continue
            self.numbers[symbol] = found
            return found
        raise self._refusal("data_dependent_control_flow", f"needs the number {symbol}")

    # ---- calls ----

    def take(self, node: torch.fx.Node) -> None:
        """Records the call of a node of Dynamo's graph."""
        self.origin = node
        if node.op == "get_attr":
            self._take_attribute(node)
        elif not modes.changes(node):
            self._check(node)
            if _indexes(node) or not self._take_one(node):
                self._take_several(node)

    def _take_attribute(self, node: torch.fx.Node) -> None:
        value = attribute(self.owner, node)
        if isinstance(value, torch.Tensor):
            made, fake = self._constant(value), value_of(node)
            if isinstance(fake, torch.Tensor):
                made.meta["val"] = value = fake
                self._track(fake, made)
        self.known[node] = value

    def _check(self, node: torch.fx.Node) -> None:
        target = node.target
        if takes_graphs(target):
            custom = target.name() == CUSTOM
            reason = "autograd_function" if custom else "unsupported_operator"
            raise self._refusal(reason, f"calls {readable_name(node)}")
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        if name in _RESHAPING:
            raise self._refusal(
                "unsupported_operator",
                f"calls {name}(), which changes sizes or strides of a tensor in place",
            )
        if name in _ATTRIBUTES:
            raise self._refusal(
                "unsupported_operator", f"sets or deletes {node.args[1]!r} of a tensor"
            )

    def _call(self, node: torch.fx.Node) -> Any:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self._known_value)
        self.data = node.target is private.get_data
        self._enter(modes.of(node))
        if self.data:
            return args[0].detach()
        self.last = None
        if node.op == "call_method":
            result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        return self._as_recorded(result)

    def _known_value(self, node: torch.fx.Node) -> Any:
        if node in self.known:
            return self.known[node]
        value = value_of(node)  # a number
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            if arithmetic.is_misjudged(value.node.expr):
                return self._opaque(node, value)
        return value

    def _as_recorded(self, result: Any) -> Any:
        """A fresh tensor may come back as another object if the first one is still referenced."""
        if isinstance(result, torch.Tensor) and id(result) not in self.nodes and self.last:
            value = self.last.meta["val"]
            if value.shape == result.shape and value.dtype == result.dtype:
                return value
        return result

    def _enter(self, wanted: modes.Modes) -> None:
        if torch.is_grad_enabled() is not wanted.grad:
            torch.set_grad_enabled(wanted.grad)
        dtype = dict(wanted.casts).get(self.device)
        if torch.is_autocast_enabled(self.device) is not (dtype is not None):
            torch.set_autocast_enabled(self.device, dtype is not None)
        if dtype is not None and torch.get_autocast_dtype(self.device) is not dtype:
            torch.set_autocast_dtype(self.device, dtype)

    def _take_one(self, node: torch.fx.Node) -> bool:
        """Tries a node as a call of one operator, or of none."""
        expected = value_of(node)
        n = len(self.flat.nodes)
        self.expected, self.steps = expected, 0
        self.before.clear()
        try:
            result = self._call(node)
        except Exception:  # the second try names the error
            result = _UNKNOWN
        finally:
            self.expected = _UNKNOWN
        if result is _UNKNOWN or not self._is_known(result):
            self._undo(n)
            return False
        self.known[node] = result
        return True

    def _undo(self, n: int) -> None:
        """Takes back the recorded nodes; numbers and constants may stay."""
        for key, known in reversed(self.before):
            if known is not None:
                self.nodes[key] = known
            elif self.nodes[key].meta.get(ORIGIN) is self.origin:
                del self.nodes[key]
        for made in list(self.flat.nodes)[n:][::-1]:
            if made.meta.get(ORIGIN) is self.origin and not made.users:
                self.flat.erase_node(made)

    def _is_known(self, result: Any) -> bool:
        leaves = private.pytree.tree_leaves(result)
        return all(id(x) in self.nodes for x in leaves if isinstance(x, torch.Tensor))

    def _take_several(self, node: torch.fx.Node) -> None:
        """Runs a node's function on fake tensors; its results are then those that Dynamo knows."""
        try:
            result = self._call(node)
        except CaptureError:
            raise
        except Exception as error:
            raise self._explained(error) from error
        if not self._is_known(result):
            raise self._refusal(
                "export_failed", f"{node.format_node()}: gives a tensor that no operator has made"
            )
        expected = value_of(node)
        found, wanted = private.pytree.tree_leaves(result), private.pytree.tree_leaves(expected)
        if len(found) != len(wanted):
            self.known[node] = result
            return
        for tensor, fake in zip(found, wanted, strict=True):
            if isinstance(tensor, torch.Tensor) and tensor is not fake:
                made = self.nodes[id(tensor)]
                if made.op != "placeholder":
                    made.meta["val"] = fake
                self._track(fake, made)
        self.known[node] = expected

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_autocast_enabled(self.device) and self._hides_casts(func, args, kwargs):
            with self:
                return rules.CELLS.get(func, func.decompose)(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            text = f"{func} takes a value out of the graph; keep it a tensor"
            raise self._refusal("data_dependent_control_flow", text)
        if func is _aten.lift_fresh.default:
            func = _aten.clone.default
        if func is _aten.as_strided.default and not _is_within(*args, **kwargs):
            text = "reads a tensor by the layout of its memory (as_strided)"
            raise self._refusal("memory_layout", text)
        if self.expected is _UNKNOWN or is_mutable(func):
            node = self._emit(func, args, kwargs)
            args, kwargs = self._as_fakes(args, kwargs)
            self.steps += 1
            with torch.no_grad():
                result = func(*args, **kwargs)
        elif self.steps or not _may_give(func, args, self.expected):
            raise _SeveralError
        else:
            self.steps += 1
            node = self._emit(func, args, kwargs)
            result = self.expected
        return self._keep(func, node, result)

    def __sym_dispatch__(self, func: Any, types: Any, args: tuple, kwargs: dict | None) -> Any:
        return func(*args, **(kwargs or {}))

    def _hides_casts(self, func: Any, args: tuple, kwargs: dict) -> bool:
        if func not in autocast.COMPOUND:
            return False
        private.pytree.tree_map(self._operand, (args, kwargs))  # constants become known
        dtype = torch.get_autocast_dtype(self.device)
        call = autocast.Call(func, *self._as_fakes(args, kwargs), self.device, dtype)
        return not call.has_casts() and call.hides_casts()

    def _as_fakes(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return private.pytree.tree_map_only(torch.Tensor, self._as_fake, (args, kwargs))

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        return self.nodes[id(tensor)].meta["val"]  # a constant

    def _emit(self, func: Any, args: tuple, kwargs: dict) -> torch.fx.Node:
        self.as_data, self.bounds = torch.Tag.pointwise in func.tags, func in _BOUNDED
        operands = private.pytree.tree_map(self._operand, (args, kwargs))
        node = self.flat.call_function(func, *operands)
        assert self.origin is not None
        node.meta = self._place()
        node.meta[ORIGIN] = self.origin
        node.meta[OFF] = not torch.is_grad_enabled()
        if modes.of(self.origin).inference:
            node.meta[INFERENCE] = True
        if self.data:
            node.meta[DATA] = True
        return node

    def _place(self) -> dict[str, Any]:
        """The source of the present node of Dynamo's graph, in the form that nodes use."""
        known = {} if self.origin is None else self.origin.meta
        return {k: known[k] for k in ("nn_module_stack", "stack_trace") if k in known}

    def _keep(self, func: Any, node: torch.fx.Node, result: Any) -> Any:
        node.meta["val"] = result
        if self.scalars:
            self._note_scalars(func, node, result)
        writes = is_mutable(func)
        if isinstance(result, torch.Tensor):
            self._refuse_unbacked(result)
            if writes or id(result) not in self.nodes:  # it may return its arguments
                self._track(result, node)
            self.last = node
            if torch.is_autocast_enabled(self.device):
                node.meta[_CAST] = torch.get_autocast_dtype(self.device)
            return result
        if isinstance(result, (list, tuple)):
            if func in LAYERS and torch.is_autocast_enabled(self.device):
                node.meta[_CAST] = torch.get_autocast_dtype(self.device)
            for i, item in enumerate(result):
                if isinstance(item, torch.Tensor) and (writes or id(item) not in self.nodes):
                    self._refuse_unbacked(item)
                    part = self.flat.call_function(operator.getitem, (node, i))
                    part.meta = {**node.meta, "val": item}
                    self._track(item, part)
        return result

    def _note_scalars(self, func: Any, node: torch.fx.Node, result: Any) -> None:
        """Notes where numbers that go in as data ought to be known to a plan."""
        self.late |= planned_numbers.symbols([result]) & self.scalars  # inside of y[:n] = 0
        if func not in _BOUNDED or _takes_all(node):
            return
        numbers = (n.meta["val"] for n in node.all_input_nodes)
        if any(
            isinstance(x, SYMBOLIC) and x.node.expr.free_symbols & self.scalars for x in numbers
        ):
            self.refused[node.meta[ORIGIN]] = self._refusal(
                "unsupported_operator",
                f"{func.overloadpacket.__name__} starts at a number that changes, and plans would "
                "differ in it alone",
            )

    def _refuse_unbacked(self, tensor: torch.Tensor) -> None:
        if free_unbacked_symbols(tensor.shape):
            text = "the number of results depends on data that is not known before the run"
            raise self._refusal("unsupported_operator", text)

    def _refusal(self, reason: str, text: str) -> CaptureError:
        where = "forward()" if self.origin is None else location_of(self.origin)
        return CaptureError(reason, f"{where}: {text}", self.origin)

    def _explained(self, error: Exception) -> CaptureError:
        if self.opaque and isinstance(error, GuardOnDataDependentSymNode):
            text = "has to know the remainder of a float that changes (x % 1)"
            return self._refusal("unsupported_operator", text)
        text = str(error).strip().splitlines()
        return self._refusal("export_failed", f"{type(error).__name__}: {' '.join(text[:1])[:300]}")

    # ---- end ----

    def finish(self, outputs: Sequence[torch.fx.Node]) -> None:
        """Adds the output and the casts of autocast, and records which inputs are written."""
        wanted = []
        for node in outputs:
            self.origin = node
            made = self.nodes.get(id(self._known_value(node)))
            if made is None:
                raise self._refusal("export_failed", "gives a tensor that no operator has made")
            wanted.append(made)
        self.flat.output(tuple(wanted))
        for node in list(self.flat.nodes):
            cast = node.meta.pop(_CAST, None)
            if cast is not None:
                self.origin = node.meta[ORIGIN]
                autocast.make_explicit(self.flat, node, self.device, cast)
        written = {s for n in self.flat.nodes for t in targets(n) for s in storages(t)}
        self.done.written = [
            i for i, node in enumerate(self.done.placeholders()) if storages(node) & written
        ]


def writers_of(done: Lowered, placeholder: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes of Dynamo's graph that write to an input."""
    own = storages(placeholder)
    found = (n for n in done.graph.nodes if any(storages(t) & own for t in targets(n)))
    return list(dict.fromkeys(n.meta[ORIGIN] for n in found))

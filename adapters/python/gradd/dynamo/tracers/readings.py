"""Numbers that code reads out of tensors while Dynamo traces it: `tolist()`, `item()`, `int()`.

Dynamo breaks its graph there. Where such a number follows from the arguments of the call alone, it
becomes an argument itself: see `derived.py`. So do results of functions that compute indices with
such numbers: those of `transformers.vision_utils`, which transformers asks to compute in front of a
trace, and the positions of its models for images with text. So do arguments of which a mask chooses
pictures (`pixels[used]`), and tensors in place of numbers: in slices, and as sizes.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from gradd.dynamo import derived, partition
from gradd.dynamo.derived import UnknownError
from gradd.dynamo.lower import SYMBOLIC, name_of, value_of
from gradd.dynamo.tracers import membership
from gradd.memory.watch import address

_READS = ("tolist", "item")
_FUNCTIONS = (int, bool)
_MOST = 64  # numbers that one reading has
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_SUBSCRIPTS = [dis.opmap[name] for name in ("BINARY_SUBSCR",) if name in dis.opmap]
_SLICES = [dis.opmap[name] for name in ("BUILD_SLICE", "BINARY_SLICE") if name in dis.opmap]
_PICTURE = 2  # axes that a row has at least; with fewer, rows keep their places (masked_rows.py)
# Of libraries, by module: functions whose results follow from their arguments.
_INDICES = {
    "transformers.vision_utils": (
        "get_vision_cu_seqlens",
        "get_vision_position_ids",
        "get_vision_window_index",
        "get_vision_interpolation_indices_and_weights",
        "get_vision_nearest_position_ids",
        "get_vision_merged_shape",
    )
}
_LIBRARY = "transformers."
_METHODS = ("get_rope_index",)  # of its models
_CHECK = "transformers.utils.import_utils", "torch_compilable_check"
# What may happen to numbers with a fraction on the way: where they are, and comparisons.
_PLAIN = frozenset(
    ("view", "reshape", "flatten", "contiguous", "getitem", "to", "type", "float", "squeeze")
    + ("unsqueeze", "transpose", "permute", "unbind", "expand", "detach")
)
# Methods whose numbers are sizes, and functions with as many operands in front of them.
_SIZED_METHODS = ("split", "view", "reshape", "expand", "repeat", "unflatten")
_SIZED = (
    *((torch.split, 1), (torch.reshape, 1), (torch.nn.functional.interpolate, 1)),
    *((torch.arange, 0), (torch.zeros, 0), (torch.ones, 0)),
)
_DRAWING = ("rand", "bernoulli", "multinomial", "normal", "dropout")


def substitute(wanted: Callable[[], bool]) -> None:
    """Has Dynamo trace such readings so where that is wanted at the time."""
    membership.trace_instead(wanted, _safely)
    for table in membership.tables():
        for code in _SUBSCRIPTS:
            table[code] = functools.partial(_subscript, wanted, table[code])
        for code in _SLICES:
            table[code] = functools.partial(_bounds, wanted, table[code])


def _subscript(wanted: Callable[[], bool], usual: Callable, tracer: Any, instruction: Any) -> None:
    """Runs `x[key]`."""
    x, key = tracer.stack[-2:]
    if wanted():
        try:
            found = _chosen(tracer, x, key)
        except Exception:  # the user's, or other names in another version of torch
            found = None
        if found is not None:
            tracer.popn(2)
            tracer.push(found)
            return
    usual(tracer, instruction)


def _chosen(tracer: Any, x: Any, key: Any) -> Any:
    """The pictures that a mask chooses; None = it is something else.

    Raises:
        UnknownError: They follow from something else than the arguments.
    """
    if not (_is_tensor(x) and _is_tensor(key)):
        return None
    nodes = x.realize().as_proxy().node, key.realize().as_proxy().node
    pictures, mask = map(value_of, nodes)
    if mask.dtype is not torch.bool or pictures.dim() - mask.dim() < _PICTURE:
        return None
    reader = _Reader(tracer)
    with derived.aside():
        operands = tuple(derived.At(reader.step(node)) for node in nodes)
        step = reader.add(derived.Call(operator.getitem, operands, {}))
        return reader.taken(step, reader.derived.result(step))


def _bounds(wanted: Callable[[], bool], usual: Callable, tracer: Any, instruction: Any) -> None:
    """Makes a slice, of numbers for tensors."""
    count = instruction.argval if instruction.opname == "BUILD_SLICE" else 2
    if wanted():
        with contextlib.suppress(Exception):  # other names in another version of torch
            if (made := _as_numbers(tracer, tracer.stack[-count:])) is not None:
                tracer.popn(count)
                for value in made:
                    tracer.push(value)
    usual(tracer, instruction)


def _as_numbers(tracer: Any, values: list[Any]) -> list[Any] | None:
    """Arguments with numbers for tensors of one whole number, in lists too; None = has none.

    Raises:
        UnknownError: One follows from something else than the arguments of the call.
    """
    made = []
    for value in values:
        known = value.realize()
        items = vars(known).get("items")
        if isinstance(items, (list, tuple)) and (inner := _as_numbers(tracer, list(items))):
            value = known.clone(items=inner)
        elif _is_tensor(known):
            fake = value_of(known.as_proxy().node)
            if fake.dim() == 0 and fake.dtype in _WHOLE:
                (value,) = _numbers(_Reader(tracer), known, False)[1]
        made.append(value)
    return None if all(x is y for x, y in zip(made, values, strict=True)) else made


def _safely(*call: Any) -> tuple[Any, list[Any], dict[str, Any]] | None:
    try:
        return _instead(*call)
    except Exception:  # the user's, or other names in another version of torch
        return None


def _instead(
    tracer: Any, fn: Any, args: list[Any], kwargs: dict[str, Any]
) -> tuple[Any, list[Any], dict[str, Any]] | None:
    """A call with the same result; None = this one stays.

    Raises:
        UnknownError: The result follows from something else than the arguments.
    """
    owner, name = membership.method(fn)
    if name in _READS and not args and not kwargs:
        return _numbers(_Reader(tracer), owner, name == "tolist")
    if name in _SIZED_METHODS and owner is not None and _is_tensor(owner):
        made = _as_numbers(tracer, args)
        return None if made is None else (fn, made, kwargs)
    value = membership.value_of(fn)
    for function, count in _SIZED:
        if value is function:
            return _sized(tracer, fn, args, kwargs, count)
    if any(value is f for f in _FUNCTIONS) and len(args) == 1 and _is_tensor(args[0]):
        _, numbers, _ = _numbers(_Reader(tracer), args[0], False)
        return fn, numbers, {}
    if isinstance(value, np.ufunc) or value is np.prod:
        return _of_numbers(tracer, fn, value, args) if len(args) == 1 and not kwargs else None
    if value is None or not hasattr(value, "__code__"):
        return None
    if value is getattr(sys.modules.get(_CHECK[0]), _CHECK[1], None):
        instead = check_count if args and _counts(args[0]) else check
        return type(fn.realize()).build(tracer, instead), args, kwargs
    if _gives_indices(value):
        return _results(_Reader(tracer), fn, args, kwargs)
    return None


def _of_numbers(tracer: Any, fn: Any, function: Any, args: list[Any]) -> Any:
    """For np.log(2.0) and np.prod(shape), of which Dynamo makes a tensor.

    Other libraries may take the result for a number of NumPy.
    """
    (x,) = args
    if not tracer.f_globals.get("__name__", "").startswith(_LIBRARY):
        return None
    build = type(fn.realize()).build
    if function is np.prod:
        return (build(tracer, product), args, {}) if _are_numbers(x) else None
    if not x.is_python_constant() or type(x.as_python_constant()) not in (int, float):
        return None
    found = function(x.as_python_constant())
    if not isinstance(found, np.float64):
        return None
    return build(tracer, number), [build(tracer, float(found))], {}


def _sized(
    tracer: Any, fn: Any, args: list[Any], kwargs: dict[str, Any], count: int
) -> tuple[Any, list[Any], dict[str, Any]] | None:
    given = [*args[count:], *kwargs.values()]
    made = _as_numbers(tracer, given)
    if made is None:
        return None
    rest = len(args) - count
    return fn, [*args[:count], *made[:rest]], dict(zip(kwargs, made[rest:], strict=True))


def _is_tensor(variable: Any) -> bool:
    proxy = vars(variable.realize()).get("proxy")
    return proxy is not None and isinstance(value_of(proxy.node), torch.Tensor)


def _counts(variable: Any) -> bool:
    """Whether it is a comparison of a number that depends on data."""
    proxy = vars(variable.realize()).get("proxy")
    value = None if proxy is None else value_of(proxy.node)
    return isinstance(value, SYMBOLIC) and bool(free_unbacked_symbols(value))


def _are_numbers(variable: Any) -> bool:
    """Whether it is a list of whole numbers, as a shape."""
    items = getattr(variable.realize(), "items", None)
    if not items or not isinstance(items, (list, tuple)):
        return False
    return all(x.python_type() is int for x in items)


def _gives_indices(function: Any) -> bool:
    module, name = function.__module__ or "", function.__name__
    if name in _METHODS:
        return module.startswith(_LIBRARY)
    return name in _INDICES.get(module, ())


# ---- what is traced in place of a call ----


def check(cond: Any, msg: Any, error_type: Any = ValueError) -> None:
    """torch_compilable_check() of transformers, with which Dynamo would break the graph."""
    if callable(cond):
        cond = cond()
    if isinstance(cond, torch.Tensor):
        assert cond.all(), "torch_compilable_check: inputs of the call do not fit together"
    elif not cond:
        raise error_type(msg() if callable(msg) else msg)


def check_count(cond: Any, msg: Any, error_type: Any = ValueError) -> None:
    """The same of how many rows a mask chooses; masked_rows.py makes an assertion of it."""
    assert cond, "torch_compilable_check: inputs of the call do not fit together"


def number(x: Any) -> Any:
    return x


def product(numbers: Any) -> Any:
    found = 1
    for x in numbers:
        found = found * x
    return found


def rows(shape: tuple[int, ...], *numbers: Any) -> Any:
    size, *inner = shape
    if not inner:
        return list(numbers)
    step = len(numbers) // size if size else 0
    return [rows(tuple(inner), *numbers[i * step : (i + 1) * step]) for i in range(size)]


def together(*values: Any) -> Any:
    return values


def _numbers(reader: _Reader, tensor: Any, nested: bool) -> Any:
    """For `tolist()`, or `item()`."""
    tensor = tensor.realize()
    if not _is_tensor(tensor):
        raise UnknownError
    fake = value_of(tensor.as_proxy().node)
    if fake.is_floating_point() or fake.is_complex():
        raise UnknownError
    if fake.dtype is torch.bool and fake.dim():  # each choice would have a graph
        raise UnknownError
    with derived.aside():
        step = reader.step(tensor.as_proxy().node)
        shape = tuple(reader.derived.result(step).shape)
    if torch.Size(shape).numel() > _MOST or (not nested and torch.Size(shape).numel() != 1):
        raise UnknownError
    found = reader.variables(step, shape)
    if not nested or not shape:
        return reader.build(number), found, {}
    return reader.build(rows), [reader.build(shape), *found], {}


def _results(reader: _Reader, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """For a function of indices: its results, computed from the real arguments."""
    fn = fn.realize()
    target = fn.fn
    if (owner := vars(fn).get("obj")) is not None:
        target = getattr(reader.constant(owner), target.__name__)
    given = [reader.operand(x) for x in args]
    named = {name: reader.operand(x) for name, x in kwargs.items()}
    with derived.aside():
        step = reader.add(derived.Call(target, tuple(given), named))
        found = reader.derived.result(step)
        if not isinstance(found, tuple):
            return reader.build(number), [reader.taken(step, found)], {}
        parts = []
        for i, part in enumerate(found):
            inner = reader.add(derived.Call(_item, (derived.At(step), i), {}))
            parts.append(reader.taken(inner, part))
    return reader.build(together), parts, {}


def _item(values: Any, at: int) -> Any:
    return values[at]


def after_calls(base: torch.Tensor, calls: tuple[tuple[Any, tuple, dict], ...]) -> torch.Tensor:
    """A copy of a tensor, of which these calls have taken a view each, and the last has written."""
    found = view = base.clone()
    for target, args, kwargs in calls:
        function = getattr(type(view), target) if isinstance(target, str) else target
        view = function(view, *args, **kwargs)
    return found


def _memory(node: Any) -> set[int]:
    """The memory of a node's tensors."""
    value = value_of(node)
    parts = value if isinstance(value, (tuple, list)) else [value]
    return {address(x) for x in parts if isinstance(x, torch.Tensor)}


def _viewed(node: torch.fx.Node) -> bool:
    """Whether a node shares the memory of an operand."""
    return any(_memory(node) & _memory(x) for x in node.all_input_nodes)


def _written(node: torch.fx.Node) -> torch.fx.Node:
    """What a function writes to: its first operand.

    Raises:
        UnknownError: Something else.
    """
    first = node.args[0] if node.args else None
    if not isinstance(first, torch.fx.Node) or not _memory(first) or "out" in node.kwargs:
        raise UnknownError
    return first


def _of_view(node: torch.fx.Node) -> torch.fx.Node:
    """What a node is a view of: its first operand; what writes in place returns one too.

    Raises:
        UnknownError: Of something else, or of nothing.
    """
    first = _written(node)
    if not _memory(node) & _memory(first):
        raise UnknownError
    return first


def _refuse(node: torch.fx.Node) -> Any:
    raise UnknownError


class _Reader:
    """Notes how a value follows from the arguments of the call that is traced."""

    def __init__(self, tracer: Any) -> None:
        self.tracer = tracer
        self.root = tracer.output.root_tx
        found = self.root.f_locals.get(derived.ARGUMENT)
        if not isinstance(found, derived.Derived):
            raise UnknownError
        self._own = self.root.symbolic_locals[derived.ARGUMENT].realize()
        self.derived = found
        self.add = found.derivation.add
        self._graph = list(self._graphs())
        self._at = {node: i for graph in self._graph for i, node in enumerate(graph.nodes)}
        self._writes = [n for n in self._at if partition.computes(n) and partition.is_write(n)]

    # ---- variables of Dynamo for values ----

    def build(self, value: Any) -> Any:
        return type(self._own).build(self.tracer, value)

    def variables(self, step: int, shape: tuple[int, ...] | None) -> list[Any]:
        value = self.derived.derivation.value(step, shape)
        names = self.derived.give(value)
        return [membership.attribute(self.tracer, self._own, name) for name in names]

    def taken(self, step: int, value: Any) -> Any:
        """A tensor, or a whole number, that a function has returned."""
        if type(value) is torch.Tensor and value.device.type == "cpu":
            return self.variables(step, None)[0]
        if isinstance(value, int):
            return self.variables(step, ())[0]
        raise UnknownError

    # ---- steps for variables of Dynamo ----

    def constant(self, variable: Any) -> Any:
        """A module, or an object of the user's, that a variable stands for."""
        found = membership.value_of(variable)
        if found is None:
            found = vars(variable.realize()).get("value")
        if found is None or isinstance(found, torch.Tensor):
            raise UnknownError
        return found

    def operand(self, variable: Any) -> Any:
        """What stands in a step for the argument of a function."""
        variable = variable.realize()
        if variable.is_python_constant():
            return variable.as_python_constant()
        proxy = vars(variable).get("proxy")
        if proxy is not None:
            return derived.At(self.step(proxy.node))
        items = getattr(variable, "items", None)
        if isinstance(items, (list, tuple)):
            return tuple(map(self.operand, items))
        if isinstance(items, dict):  # keyword arguments that a function passes on
            found = {key.vt.as_python_constant(): self.operand(x) for key, x in items.items()}
            if not found.keys() & _PRECOMPUTED:
                return None
        raise UnknownError

    def step(self, node: torch.fx.Node, end: float = math.inf) -> int:
        """The number of the step that computes a node as what lies at `end` in the graph reads it.

        Raises:
            UnknownError: It follows from something else than the arguments.
        """
        value = value_of(node)
        if isinstance(value, torch.Tensor) and (value.requires_grad or value.device.type != "cpu"):
            raise UnknownError
        if node in self._writes:  # its result is what it has written to
            return self.step(_of_view(node), end)
        found = self._given(node) if node.op == "placeholder" else self._computed(node, end)
        return found if _viewed(node) else self._after_writes(node, found, end)

    def _graphs(self) -> Iterator[torch.fx.Graph]:
        """The graph that is traced, and those around it."""
        here = self.tracer.output.current_tracer
        while here is not None:
            yield here.graph
            here = getattr(here, "parent", None)

    def _computed(self, node: torch.fx.Node, end: float) -> int:
        name, value = name_of(node), value_of(node)
        if node.op not in ("call_function", "call_method") or name.startswith(_DRAWING):
            raise UnknownError
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        if floats and name not in _PLAIN:
            raise UnknownError
        memory = _memory(node)

        def one(operand: torch.fx.Node) -> Any:
            shared = memory & _memory(operand)  # a view shows what is written to it later
            return derived.At(self.step(operand, end if shared else self._at[node]))

        args, kwargs = _mapped(node.args, one), _mapped(node.kwargs, one)
        return self.add(derived.Call(node.target, args, kwargs))

    def _after_writes(self, node: torch.fx.Node, step: int, end: float) -> int:
        """The step that makes what writes in front of `end` have made of a node's memory."""
        for write in self._writes:
            if not _memory(_written(write)) & _memory(node):
                continue
            if write.graph is not node.graph or value_of(node).is_floating_point():
                raise UnknownError
            if self._at[write] < end:
                step = self._after_write(node, step, write)
        return step

    def _after_write(self, node: torch.fx.Node, step: int, write: torch.fx.Node) -> int:
        views: list[Any] = []
        target = _written(write)
        while target is not node:
            if target not in self._writes:
                args, kwargs = _mapped(target.args[1:], _refuse), _mapped(target.kwargs, _refuse)
                views.insert(0, (target.target, args, kwargs))
            target = _of_view(target)

        def one(operand: torch.fx.Node) -> Any:
            return derived.At(self.step(operand, self._at[write]))

        args, kwargs = _mapped(write.args[1:], one), _mapped(write.kwargs, one)
        last = (write.target, args, kwargs)
        return self.add(derived.Call(after_calls, (derived.At(step), (*views, last)), {}))

    def _given(self, node: torch.fx.Node) -> int:
        found = node.meta.get("grapharg")
        if found is None:
            for outer in self._outside(node):
                return self.step(outer)
            raise UnknownError
        place = derived.place(str(found.source.name))
        if place is None:
            raise UnknownError
        return self.add(place)

    def _outside(self, node: torch.fx.Node) -> Iterator[torch.fx.Node]:
        """The node that a placeholder of a graph within the graph stands for."""
        here = self.tracer.output.current_tracer
        while getattr(here, "parent", None) is not None:
            for outer, inner in here.lifted_freevars.items():
                if inner.node is node:
                    yield outer.node
            here = here.parent


# What transformers takes in place of a result.
_PRECOMPUTED = {
    *("cu_seqlens", "position_ids", "window_index", "cu_window_seqlens", "interp_indices"),
    *("interp_weights", "merged_shape"),
}


def _mapped(operand: Any, one: Callable[[torch.fx.Node], Any]) -> Any:
    """Operands of a node with something else for each node in them."""
    if isinstance(operand, torch.fx.Node):
        return one(operand)
    if isinstance(operand, slice):
        return slice(*(_mapped(x, one) for x in (operand.start, operand.stop, operand.step)))
    if isinstance(operand, (tuple, list)):
        made = [_mapped(x, one) for x in operand]
        return made if isinstance(operand, list) else tuple(made)
    if isinstance(operand, dict):
        return {name: _mapped(x, one) for name, x in operand.items()}
    if isinstance(operand, SYMBOLIC):
        raise UnknownError
    return operand

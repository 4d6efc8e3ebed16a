"""Rows that a mask chooses keep their places, and the mask goes with them.

    F.cross_entropy(h[m], y[m])      h[m].mean()      x[m] = f(x[m])

How many rows `h[m]` has depends on data, so no plan could be made for it. In a graph of Dynamo that
records such sizes, this pass lets `h[m]` be all rows of `h`, of which those that are not chosen
repeat a chosen one: what a row-wise function makes of them is as finite as what it makes of that.
Where rows meet (in a sum, a mean, a loss) the mask takes the others out, in a loss over classes as
ignored labels; an assignment puts them back. Gradients go to chosen rows alone.

Where another operand says how many rows are chosen, as v does in `h[m] + v` and in `h[m] = v`, they
are gathered, and put back by their numbers; another number of them is an index out of range.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import sympy
import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from gradd.dynamo import modes, partition, row_functions
from gradd.dynamo.lower import SYMBOLIC, name_of, value_of
from gradd.dynamo.rewriting import RewriteError, Rewriter
from gradd.graph.locations import location_of
from gradd.spec import CaptureError

Node = torch.fx.Node
_NOWHERE = 1 << 40  # behind the last row of any tensor
_COMPARING = ("ge", "le", "gt", "lt", "eq", "ne", "_assert_scalar")
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "neg", "truediv")},
    "sym_float": torch.Tensor.double,
    "sym_max": torch.clamp_min,
}


class AgainError(Exception):
    """A call has to be traced again, before anything of it has run."""


def has_choices(graph: torch.fx.Graph) -> bool:
    """Whether a graph of Dynamo has tensors whose sizes depend on data, or rows that it chooses."""
    return any(_is_open(node) or _mask_of(node) is not None for node in graph.nodes)


def keep_places(graph: torch.fx.Graph) -> CaptureError | None:
    """Replaces the choice of rows in a graph of Dynamo, in place.

    Returns:
        Why that cannot be, and the graph is of no use; None = no size depends on data any more.
    """
    modes.mark(graph, modes.now())
    try:
        _Walk(graph).run()
    except RewriteError as error:
        return _refusal(error.node)
    left = next(filter(_is_open, graph.nodes), None)
    return None if left is None else _refusal(left)


def _refusal(node: Node) -> CaptureError:
    return CaptureError(
        "graph_break",
        f"no graph has {name_of(node)} in {location_of(node)} (the number of its results, or of "
        "its operands, depends on data)",
    )


def _is_open(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and bool(free_unbacked_symbols(value.shape))


def _is_only_counted(node: Node) -> bool:
    """Whether nothing but the number of its rows is asked for."""
    one = isinstance(value_of(node), torch.Tensor) and value_of(node).dim() == 1
    names = ("sym_size.int", "size", *(["numel"] if one else []))
    return node.target is operator.getitem and all(name_of(user) in names for user in node.users)


def _mask_of(node: Node) -> Node | None:
    """The mask in x[mask], x[mask, :] and assignments to these."""
    if node.target not in (operator.getitem, operator.setitem):
        return None
    mask = node.args[1]
    if isinstance(mask, (tuple, list)) and mask:
        mask = mask[0] if all(part == slice(None, None, None) for part in mask[1:]) else None
    value = value_of(mask) if isinstance(mask, Node) else None
    found = isinstance(value, torch.Tensor) and value.dtype is torch.bool and value.dim() > 0
    return mask if found else None  # type: ignore[return-value]


class _Mask(NamedTuple):
    """A mask of rows."""

    key: Any  # equal for masks with the same values
    given: Node  # the tensor of booleans
    flat: Node  # the same, of rank 1
    count: Node  # how many rows it chooses, int64 of rank 0
    first: Node  # the number of the first of them, of rank 1; of none 0
    any: Node  # whether there is one, of rank 1


class _Walk(Rewriter):
    """One walk over the nodes of a graph, in order.

    Attributes:
        rows: What stands for chosen rows, all of them, and their mask.
        numbers: What stands for a number that depends on the mask: a tensor of rank 0.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        super().__init__(graph)
        self.rows: dict[Node, tuple[Node, _Mask]] = {}
        self.numbers: dict[Node, Node] = {}
        self.masks: dict[Any, _Mask] = {}
        self.over: dict[tuple[Node, int], Node] = {}
        self.writes: dict[Node, int] = {}  # in front of each node
        self.asserted: set[tuple] = set()
        self.gone: list[Node] = []

    def run(self) -> None:
        count = 0
        for node in self.graph.nodes:
            self.writes[node] = count
            count += partition.computes(node) and partition.is_write(node)
        for node in list(self.graph.nodes):
            if any(n in self.rows or n in self.numbers for n in node.all_input_nodes):
                self.at = node
                self._take(node)
            elif _is_open(node):
                self.at = node
                self.rows[node] = self._chosen(node)
                self.gone.append(node)
            elif (mask := _mask_of(node)) is not None and _is_only_counted(node):
                self.at = node
                with contextlib.suppress(RewriteError):
                    self.numbers[node] = self._mask(mask).count
                    self.gone.append(node)
            elif mask is not None:
                self.at = node
                with contextlib.suppress(RewriteError):  # then it stays as it is
                    self._counted(node, mask)
                    self.gone.append(node)
        for node in reversed(self.gone):
            if not node.users:
                self.graph.erase_node(node)

    def _call(self, target: Any, /, *args: Any, **kwargs: Any) -> Node:
        """A call in front of the present node; what torch refuses of all rows is open."""
        node = self.call(target, *args, **kwargs)
        self.writes[node] = self.writes[self.at]  # type: ignore[index]
        return node

    # ---- the choice ----

    def _chosen(self, node: Node) -> tuple[Node, _Mask]:
        """All rows, for x[mask], masked_select() of a mask of the same sizes."""
        x, given = self._source(node)
        value = value_of(x)
        axes = value_of(given).dim()
        if 0 in value.shape[:axes]:
            raise RewriteError(node)
        mask = self._mask(given)
        flat = x if axes == 1 else self._call("flatten", x, 0, axes - 1)
        row = self._call(torch.index_select, flat, 0, mask.first)
        rank = value.dim() - axes + 1
        if value.is_floating_point():  # of none at all: a number that most functions take
            row = self._call(torch.where, self._over(mask.any, rank), row, 1.0)
        row = self._call("detach", row)
        return self._call(torch.where, self._over(mask.flat, rank), flat, row), mask

    def _counted(self, node: Node, given: Node) -> None:
        """x[mask], x[mask] = rows, where it is known how many rows there are."""
        x, told = node.args[0], node if node.target is operator.getitem else node.args[2]
        if not isinstance(x, Node) or not isinstance(told, Node):
            raise RewriteError(node)
        rows, chosen, value = map(value_of, (told, given, x))
        if not isinstance(rows, torch.Tensor) or not isinstance(value, torch.Tensor):
            raise RewriteError(node)
        rank = value.dim() - chosen.dim() + 1
        if rows.dim() != rank or 0 in value.shape or value.is_complex():
            raise RewriteError(node)
        if isinstance(rows.shape[0], int) and rows.shape[0] < 2:  # of one, all may be copies
            raise RewriteError(node)
        mask = self._mask(given)
        count = self._number(rows.shape[0])
        before = self._call("sub", self._call("cumsum", self._call("long", mask.flat), 0), 1)
        other = self._call("mul", self._call("ne", mask.count, count), _NOWHERE)
        if node.target is operator.setitem:
            at = self._call("add", self._call("clamp_min", before, 0), other)
            self._put(x, given, self._call(torch.index_select, node.args[2], 0, at))
            return
        flat = x if chosen.dim() == 1 else self._call("flatten", x, 0, chosen.dim() - 1)
        # One place more takes those that are not chosen.
        slots = self._call(torch.where, mask.flat, before, count)
        slots = self._call("add", slots, other)
        own = {"dtype": torch.int64, "device": chosen.device}
        numbers = self._call(torch.arange, self._sizes(mask.flat)[0], **own)
        places = self._call(torch.zeros, self._call(operator.add, count, 1), **own)
        places = self._call(torch.scatter, places, 0, slots, numbers)
        places = self._call(torch.narrow, places, 0, 0, count)
        self._stand_in(node, self._call(torch.index_select, flat, 0, places))

    def _number(self, size: Any) -> Any:
        """A node that tells a size in front of the present one, or the number itself."""
        return size if isinstance(size, int) else self._computed(size.node.expr)

    def _computed(self, size: sympy.Expr) -> Any:
        """The same for sums and products of sizes."""
        if size.is_Integer:
            return int(size)
        for node in self.graph.nodes:
            if node is self.at:
                break
            value = value_of(node)
            if isinstance(value, torch.SymInt) and value.node.expr == size:
                return node
            if isinstance(value, torch.Tensor) and node not in self.rows:
                for axis, known in enumerate(value.shape):
                    if not isinstance(known, int) and known.node.expr == size:
                        return self._call(torch.ops.aten.sym_size.int, node, axis)
        function = operator.add if size.is_Add else operator.mul
        if not (size.is_Add or size.is_Mul):
            raise RewriteError(self.at)  # type: ignore[arg-type]
        return functools.reduce(
            functools.partial(self._call, function), map(self._computed, size.args)
        )

    def _source(self, node: Node) -> tuple[Node, Node]:
        name = name_of(node)
        x = node.args[0] if node.args else None
        mask = _mask_of(node)
        if name == "masked_select" and len(node.args) > 1:
            mask = node.args[1]  # type: ignore[assignment]
        if not isinstance(x, Node) or not isinstance(mask, Node):
            raise RewriteError(node)
        value, chosen = value_of(x), value_of(mask)
        if not isinstance(value, torch.Tensor) or chosen.dtype is not torch.bool:
            raise RewriteError(node)
        if name == "masked_select" and list(value.shape) != list(chosen.shape):
            mask = self._call("expand_as", mask, x)
        if chosen.dim() == 0 or value.is_complex():
            raise RewriteError(node)
        return x, mask

    def _mask(self, given: Node) -> _Mask:
        key = self._key(given)
        found = self.masks.get(key)
        if found is None:
            flat = given if value_of(given).dim() == 1 else self._call("flatten", given)
            numbers = self._call("int", flat)
            first = self._call("reshape", self._call("argmax", numbers), 1)
            found = _Mask(
                key,
                given,
                flat,
                self._call("sum", flat),
                first,
                self._call(torch.index_select, flat, 0, first),
            )
            self.masks[key] = found
        return found

    def _key(self, value: Any) -> Any:
        """Equal for nodes that compute the same: `y != 2`, twice."""
        if isinstance(value, (tuple, list)):
            return tuple(map(self._key, value))
        if isinstance(value, slice):
            return ("slice", *map(self._key, (value.start, value.stop, value.step)))
        if not isinstance(value, Node):
            return type(value).__name__, value
        kinds = (*row_functions.ELEMENTWISE, "getitem", "and_", "or_", "invert", "__and__")
        pure = name_of(value) in kinds and name_of(value) != "dropout"
        if not value.op.startswith("call") or not pure:
            return value
        operands = self._key(value.args), self._key(tuple(sorted(value.kwargs.items())))
        return str(value.target), operands, self.writes[value]

    def _over(self, mask: Node, rank: int) -> Node:
        """A mask of rank 1 shaped to meet rows of that rank."""
        if rank == 1:
            return mask
        if (mask, rank) not in self.over:
            self.over[mask, rank] = self._call("reshape", mask, -1, *[1] * (rank - 1))
        return self.over[mask, rank]

    # ---- its readers ----

    def _take(self, node: Node) -> None:
        if node.op == "output" or not node.op.startswith("call"):
            raise RewriteError(self._first(node))
        self.gone.append(node)
        name = name_of(node)
        rows = [n for n in node.all_input_nodes if n in self.rows]
        if not isinstance(value_of(node), torch.Tensor) and node.target is not operator.setitem:
            self._take_number(node, name, rows)
            return
        masks = {self.rows[n][1].key: self.rows[n][1] for n in rows}
        if len(masks) > 1:
            raise RewriteError(node)
        mask = next(iter(masks.values()), None)
        if mask is None:  # a tensor by a number
            self._stand_in(node, self._repeated(node))
        elif node.target is operator.setitem:
            self._assign(node, mask)
        elif _is_open(node):
            self.rows[node] = self._row_wise(node, rows, name), mask
        else:
            self._stand_in(node, self._total(node, name, mask))

    def _first(self, node: Node) -> Node:
        return next(n for n in node.all_input_nodes if n in self.rows or n in self.numbers)

    def _take_number(self, node: Node, name: str, rows: list[Node]) -> None:
        """Sizes, what is computed of them, and Dynamo's assertions about them, which hold."""
        first = node.args[0] if node.args else None
        if rows or (first in self.numbers and isinstance(value_of(first), torch.Tensor)):
            axis = node.args[1] if len(node.args) > 1 else None
            if axis != 0 and (name != "numel" or value_of(first).dim() > 1):  # type: ignore[arg-type]
                raise RewriteError(node)
            if name not in ("sym_size.int", "size", "numel") or node.all_input_nodes != [first]:
                raise RewriteError(node)
            self.numbers[node] = self.rows[first][1].count if rows else self.numbers[first]  # type: ignore[index]
        elif name.partition(".")[0] in _COMPARING:
            both = {self.numbers[n] for n in node.all_input_nodes if n in self.numbers}
            readers = {name_of(user).partition(".")[0] for user in node.users}
            if len(both) > 1 or readers - {"_assert_scalar"}:
                raise RewriteError(node)
            self.numbers[node] = next(iter(both))
            if name == "eq":
                self._assert(node)
        elif name in _ARITHMETIC and isinstance(value_of(node), SYMBOLIC):
            args = torch.fx.map_arg(node.args, lambda n: self.numbers.get(n, n))
            if name == "sym_max" and not isinstance(args[0], Node):
                args = args[::-1]
            self.numbers[node] = self._call(_ARITHMETIC[name], *args)
        else:
            raise RewriteError(node)

    def _assert(self, node: Node) -> None:
        """That a number of rows equals one that does not depend on data."""
        known = [self.numbers.get(n, n) if isinstance(n, Node) else n for n in node.args]
        others = [n for n in node.args if n not in self.numbers]
        if not others or (key := (known[0], known[1])) in self.asserted:
            return
        self.asserted.add(key)
        equal = self._call("eq", *known[:: 1 if node.args[0] in self.numbers else -1])
        self._call(torch.ops.aten._assert_async, equal, "as many rows under a mask as elsewhere")

    def _repeated(self, node: Node) -> Node:
        """The same call, of all rows and of numbers that are tensors."""
        known = {n: self.rows[n][0] for n in node.all_input_nodes if n in self.rows}
        known |= {n: self.numbers[n] for n in node.all_input_nodes if n in self.numbers}
        if name_of(node) not in row_functions.ELEMENTWISE and any(n in self.numbers for n in known):
            raise RewriteError(node)
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: known.get(n, n))
        made = self._call(node.target, *args, **kwargs)
        self._check(node, made)
        return made

    def _check(self, node: Node, made: Node) -> None:
        """What stands for a node has its type, and its sizes but for the rows."""
        old, new = value_of(node), value_of(made)
        first = int(_is_open(node))
        same = [str(n) for n in old.shape[first:]] == [str(n) for n in new.shape[first:]]
        if old.dtype is not new.dtype or old.dim() != new.dim() or not same:
            raise RewriteError(node)

    def _row_wise(self, node: Node, rows: list[Node], name: str) -> Node:
        if name in row_functions.IN_PLACE and node.args[0] in rows:
            return self._written(node, rows, row_functions.IN_PLACE[name])
        if not row_functions.is_row_wise(node, rows, value_of(rows[0]).dim()):
            raise RewriteError(node)
        return self._repeated(node)

    def _written(self, node: Node, rows: list[Node], function: Any) -> Node:
        """A write into chosen rows, which are a copy: nothing reads them as they were."""
        own = node.args[0]
        order = list(self.graph.nodes)
        behind = set(order[order.index(node) + 1 :])
        if any(user in behind for user in own.users) or node.kwargs:  # type: ignore[union-attr]
            raise RewriteError(node)
        known = {n: self.rows[n][0] for n in rows}
        others = (n for n in node.all_input_nodes if n not in rows)
        if any(getattr(value_of(n), "ndim", 0) >= value_of(node).dim() for n in others):
            raise RewriteError(node)
        made = self._call(function, *torch.fx.map_arg(node.args, lambda n: known.get(n, n)))
        if value_of(made).dtype is not value_of(node).dtype:
            made = self._call("to", made, value_of(node).dtype)
        self._check(node, made)
        return made

    def _stand_in(self, node: Node, made: Node) -> None:
        self._check(node, made)
        node.replace_all_uses_with(made)

    # ---- where rows meet ----

    def _total(self, node: Node, name: str, mask: _Mask) -> Node:
        if name in row_functions.LOSSES:
            return self._loss(node, name, mask)
        first = node.args[0] if node.args else None
        if name not in ("sum", "mean") or first not in self.rows:
            raise RewriteError(node)
        keepdim = row_functions.argument(node, "keepdim", 2, False)
        axes = row_functions.axes_of(node, value_of(first).dim())  # type: ignore[arg-type]
        if (axes is not None and 0 not in axes) or not isinstance(keepdim, bool):
            raise RewriteError(node)
        how = (axes, keepdim, value_of(node).dtype)
        return self._added(self.rows[first][0], mask, name == "mean", how)  # type: ignore[index]

    def _added(self, rows: Node, mask: _Mask, mean: bool, how: tuple) -> Node:
        """The sum of chosen rows along axes, the first one among them, or their mean."""
        axes, keepdim, dtype = how
        value = value_of(rows)
        kept = self._call(torch.where, self._over(mask.flat, value.dim()), rows, 0)
        wide = torch.float32 if mean and dtype in (torch.bfloat16, torch.float16) else dtype
        given = {} if axes is None else {"dim": axes, "keepdim": keepdim}
        total = self._call(torch.sum, kept, dtype=wide, **given)
        if not mean:
            return total
        count = mask.count
        for axis in range(1, value.dim()):
            if axes is None or axis in axes:
                size = self._call(torch.ops.aten.sym_size.int, rows, axis)
                count = self._call(torch.mul, count, size)
        total = self._call(torch.div, total, count)
        return total if wide is dtype else self._call("to", total, dtype)

    def _loss(self, node: Node, name: str, mask: _Mask) -> Node:
        """A loss over chosen rows; over classes, where the labels of the others are ignored."""
        given = row_functions.of_loss(node)
        reduction = given.get("reduction")
        first, target = given.get("input"), given.get("target")
        legacy = given.get("size_average"), given.get("reduce")
        if reduction not in ("mean", "sum", "batchmean") or legacy != (None, None):
            raise RewriteError(node)
        if first not in self.rows or target not in self.rows:
            raise RewriteError(node)
        known = {n: self.rows[n][0] for n in (first, target)}
        if given.get("weight") in self.rows:
            known[given["weight"]] = self.rows[given["weight"]][0]
        if any(n in self.rows and n not in known for n in node.all_input_nodes):
            raise RewriteError(node)
        if name in ("cross_entropy", "nll_loss") and not value_of(target).is_floating_point():
            over = self._over(mask.flat, value_of(target).dim())
            labels = self._call(torch.where, over, known[target], given["ignore_index"])
            return self._call(node.target, **{**given, "input": known[first], "target": labels})
        given = {k: known.get(v, v) if isinstance(v, Node) else v for k, v in given.items()}
        sizes = [list(map(str, value_of(n).shape[1:])) for n in (first, target)]
        if name != "cross_entropy" and sizes[0] != sizes[1]:
            raise RewriteError(node)
        rows = self._call(node.target, **{**given, "reduction": "none"})
        if reduction == "batchmean":
            total = self._added(rows, mask, False, (None, False, value_of(node).dtype))
            return self._call(torch.div, total, mask.count)
        return self._added(rows, mask, reduction == "mean", (None, False, value_of(node).dtype))

    def _assign(self, node: Node, mask: _Mask) -> None:
        """x[mask] = rows chosen by the same mask."""
        x, _, source = node.args
        index = _mask_of(node)
        if index is None or x in self.rows or source not in self.rows:
            raise RewriteError(node)
        if self._key(index) != mask.key:
            raise RewriteError(node)
        self._put(x, index, self.rows[source][0])  # type: ignore[arg-type,index]

    def _put(self, x: Node, index: Node, rows: Node) -> None:
        """x[index] = what stands in its places, of all rows."""
        node, value = self.at, value_of(x)
        assert node is not None
        rank = value.dim()
        if value_of(rows).dim() != rank - value_of(index).dim() + 1:
            raise RewriteError(node)
        if value_of(rows).dtype is not value.dtype:
            rows = self._call("to", rows, value.dtype)
        rows = self._call("reshape", rows, *self._sizes(x))
        over = index
        if value_of(index).dim() < rank:
            over = self._call(
                "reshape", index, *self._sizes(index), *[1] * (rank - value_of(index).dim())
            )
        self._call(operator.setitem, x, Ellipsis, self._call(torch.where, over, rows, x))

    def _sizes(self, x: Node) -> list[Any]:
        found: list[Any] = []
        for axis, size in enumerate(value_of(x).shape):
            made = size
            if not isinstance(size, int):
                made = self._call(torch.ops.aten.sym_size.int, x, axis)
            found.append(made)
        return found

"""Complex numbers of a graph of Dynamo as pairs of real ones, in a last axis of size 2.

    z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))      a rotary embedding
    y = torch.view_as_real(z * torch.polar(one, angles)).flatten(3)

Views, products, sums and conversions of complex tensors get a form over pairs; what reads real
numbers of them (view_as_real(), .real, abs()) then reads pairs. Complex arguments are viewed as
pairs by PyTorch, which computes nothing. What has no such form stays as it is, and so do its
operands: PyTorch runs it, by name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from gradd.dynamo import modes
from gradd.dynamo.lower import name_of, value_of
from gradd.dynamo.rewriting import RewriteError, Rewriter

Node = torch.fx.Node
VIEWED = "gradd_viewed"  # mark of nodes: an argument as pairs, which PyTorch views
_SAME = ("contiguous", "clone", "detach", "resolve_conj", "resolve_neg", "cuda", "cpu")


def replace(graph: torch.fx.Graph) -> bool:
    """Replaces what has a form over pairs, in place; whether there are complex numbers."""
    if not any(map(_is_complex, graph.nodes)):
        return False
    modes.mark(graph, modes.now())
    _Walk(graph).run()
    return True


def _is_complex(node: Any) -> bool:
    value = value_of(node) if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.is_complex()


class _Walk(Rewriter):
    """One walk over the nodes of a graph, in order."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        super().__init__(graph)
        self.pairs: dict[Node, Node] = {}

    def run(self) -> None:
        before = list(self.graph.nodes)
        behind = dict(zip(before, before[1:], strict=False))
        for node in before:
            if node.op in ("placeholder", "get_attr"):
                if _is_complex(node) and not value_of(node).is_conj():
                    self._view(node, behind)
            elif node.op.startswith("call") and any(
                map(_is_complex, (node, *node.all_input_nodes))
            ):
                self.at = node
                self._take(node)
        kept = {n for n in before if not _is_complex(n) or n.op in ("placeholder", "get_attr")}
        made = set(self.graph.nodes) - set(before)
        for node in reversed(list(self.graph.nodes)):  # what nothing reads any more
            if not node.users and (node in made or node not in kept):
                self.graph.erase_node(node)

    def _view(self, node: Node, behind: dict[Node, Node]) -> None:
        """The pairs of an argument; nodes of the graph's own begin behind all arguments."""
        at = node
        while at.op in ("placeholder", "get_attr") and at in behind:
            at = behind[at]
        self.at = at
        try:
            self.pairs[node] = self.call(torch.view_as_real, node)
        except RewriteError:
            return
        self.pairs[node].meta[VIEWED] = True

    def _take(self, node: Node) -> None:
        """Finds the form of a node, if there is one."""
        if any(_is_complex(n) and n not in self.pairs for n in node.all_input_nodes):
            return
        try:
            made = self._form(node)
        except RewriteError:
            return
        if made is None:
            return
        old, new = value_of(node), value_of(made)
        if _is_complex(node):
            wanted = [*map(str, old.shape), "2"]
            if [*map(str, new.shape)] == wanted and new.dtype is old.dtype.to_real():
                self.pairs[node] = made
        elif [*map(str, new.shape)] == [*map(str, old.shape)] and new.dtype is old.dtype:
            node.replace_all_uses_with(made)
            self.graph.erase_node(node)

    def _form(self, node: Node) -> Node | None:
        name = name_of(node).partition(".")[0]
        if node.target is getattr:
            name = str(node.args[1])
        form = _FORMS.get(name)
        if form is not None and not (node.kwargs.keys() - {"dim"}):
            return form(self, node)
        if name in _SAME and _is_complex(node):
            return self.call(node.target, self.pair(node.args[0]), *node.args[1:], **node.kwargs)
        return None

    # ---- parts ----

    def pair(self, value: Any) -> Node:
        return self.pairs[value]

    def part(self, value: Any, place: int) -> Node:
        return self.call("select", self.pair(value), -1, place)

    def joined(self, real: Node, imaginary: Node) -> Node:
        return self.call(torch.stack, [real, imaginary], dim=-1)

    def beside(self, value: Any) -> Any:
        """A real operand shaped to meet pairs; a number as it is."""
        if isinstance(value, Node) and isinstance(value_of(value), torch.Tensor):
            return self.call("unsqueeze", value, -1) if value_of(value).dim() else value
        return value


def _polar(walk: _Walk, node: Node) -> Node:
    """The gradient of a length is that of its absolute value, as PyTorch has it."""
    length, angle = node.args
    if value_of(length).requires_grad:
        size = walk.call(torch.abs, length)
        twice = walk.call(torch.mul, walk.call("detach", size), 2)
        negative = walk.call(torch.lt, length, 0)
        length = walk.call(torch.where, negative, walk.call(torch.sub, size, twice), size)
    parts = (walk.call(f, angle) for f in (torch.cos, torch.sin))
    return walk.joined(*(walk.call(torch.mul, length, part) for part in parts))


def _product(walk: _Walk, node: Node) -> Node | None:
    a, b = node.args
    if isinstance(a, complex) or isinstance(b, complex):
        return None
    if _is_complex(a) and _is_complex(b):
        (p, q), (r, s) = ([walk.part(x, i) for i in range(2)] for x in (a, b))
        mul = torch.mul
        real = walk.call(torch.sub, walk.call(mul, p, r), walk.call(mul, q, s))
        return walk.joined(real, walk.call(torch.add, walk.call(mul, p, s), walk.call(mul, q, r)))
    z, other = (a, b) if _is_complex(a) else (b, a)
    return walk.call(torch.mul, walk.pair(z), walk.beside(other))


def _quotient(walk: _Walk, node: Node) -> Node | None:
    a, b = node.args
    if not _is_complex(a) or _is_complex(b) or isinstance(b, complex):
        return None
    return walk.call(torch.div, walk.pair(a), walk.beside(b))


def _sum_of_two(function: Callable) -> Callable:
    def form(walk: _Walk, node: Node) -> Node | None:
        a, b = node.args
        if not (_is_complex(a) and _is_complex(b)):
            return None
        return walk.call(function, walk.pair(a), walk.pair(b))

    return form


def _conjugate(walk: _Walk, node: Node) -> Node:
    z = node.args[0]
    return walk.joined(walk.part(z, 0), walk.call(torch.neg, walk.part(z, 1)))


def _length(walk: _Walk, node: Node) -> Node:
    return walk.call(torch.linalg.vector_norm, walk.pair(node.args[0]), dim=-1)


def _indexed(walk: _Walk, node: Node) -> Node:
    z, index = node.args
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in parts):
        parts.append(slice(None))
    return walk.call(operator.getitem, walk.pair(z), tuple(parts))


def _moved(walk: _Walk, node: Node) -> Node | None:
    z, *rest = node.args
    if not all(isinstance(part, (torch.device, str)) for part in rest):
        return None
    return walk.call("to", walk.pair(z), *rest)


def _inner(dim: Any) -> Any:
    """An axis of a complex tensor among those of pairs."""
    return dim - 1 if dim < 0 else dim


def _along(walk: _Walk, node: Node) -> Node | None:
    """What takes axes in place of the tensor's: transpose(), unsqueeze(), flatten()."""
    z, *dims = node.args
    dims += [node.kwargs["dim"]] if "dim" in node.kwargs else []
    if name_of(node) == "flatten":
        dims = [*(dims or [0]), -1][:2]
    if not dims or not all(type(d) is int for d in dims):
        return None
    return walk.call(node.target, walk.pair(z), *map(_inner, dims))


def _sizes(node: Node) -> list[Any]:
    given = node.args[1:]
    return list(given[0] if len(given) == 1 and isinstance(given[0], Sequence) else given)


def _shaped(last: int) -> Callable:
    def form(walk: _Walk, node: Node) -> Node:
        return walk.call(node.target, walk.pair(node.args[0]), (*_sizes(node), last))

    return form


def _permuted(walk: _Walk, node: Node) -> Node:
    rank = value_of(node).dim()
    dims = [d % rank for d in _sizes(node)]
    return walk.call("permute", walk.pair(node.args[0]), (*dims, rank))


def _collected(walk: _Walk, node: Node) -> Node | None:
    parts, *rest = node.args
    dim = rest[0] if rest else node.kwargs.get("dim", 0)
    if not all(map(_is_complex, parts)):
        return None
    return walk.call(node.target, [walk.pair(z) for z in parts], dim=_inner(dim))


def _added(walk: _Walk, node: Node) -> Node | None:
    """sum() and mean(), over all or along axes."""
    z, *rest = node.args
    rank = value_of(z).dim()
    dim = rest[0] if rest else node.kwargs.get("dim")
    dims = list(range(rank)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if len(rest) > 1 or not dims:
        return None
    return walk.call(node.target, walk.pair(z), [d % rank for d in dims])


_FORMS: dict[str, Callable[[_Walk, Node], Any]] = {
    "view_as_complex": lambda walk, node: node.args[0],
    "view_as_real": lambda walk, node: walk.pair(node.args[0]),
    "polar": _polar,
    "complex": lambda walk, node: walk.joined(*node.args),
    **dict.fromkeys(("mul", "multiply"), _product),
    **dict.fromkeys(("div", "truediv", "true_divide"), _quotient),
    "add": _sum_of_two(torch.add),
    "sub": _sum_of_two(torch.sub),
    "neg": lambda walk, node: walk.call(torch.neg, walk.pair(node.args[0])),
    **dict.fromkeys(("conj", "conj_physical"), _conjugate),
    "real": lambda walk, node: walk.part(node.args[0], 0),
    "imag": lambda walk, node: walk.part(node.args[0], 1),
    **dict.fromkeys(("abs", "absolute"), _length),
    "getitem": _indexed,
    **dict.fromkeys(("unsqueeze", "transpose", "flatten", "swapaxes"), _along),
    **dict.fromkeys(("view", "reshape"), _shaped(2)),
    "expand": _shaped(-1),
    "repeat": _shaped(1),
    "permute": _permuted,
    "to": _moved,
    **dict.fromkeys(("cat", "stack", "concat"), _collected),
    **dict.fromkeys(("sum", "mean"), _added),
}

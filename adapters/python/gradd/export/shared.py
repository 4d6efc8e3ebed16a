"""Result leaves that share memory with each other, or with what the caller has.

Outputs of a graph are tensors of their own. Where forward() returns an object twice, a view or a
detached alias of another result, or of an argument, parameter or buffer, a later write to one must
reach the other. Such leaves are no outputs: the bridge makes them from their source, under torch's
autograd. Which leaves share memory, and which are one object, the observed forward says; how a
view lies in its source, and whether its history was cut, the trace says, for all sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from gradd.calls.watch import untyped_storage
from gradd.export import dims
from gradd.export.nodes import DATA, MAY_COPY, OFF, is_mutable, packet, storages
from gradd.spec import CaptureError, SharedSpec

_WAYS = ("view", "no_grad", "detach", "data")  # from the weakest
# They give back their operand where they have nothing to do; the tracer may not know it.
_MAY_BE_NOTHING = frozenset(
    {"alpha_dropout", "contiguous", "dropout", "feature_alpha_dropout", "feature_dropout", "to"}
)
_DETACH = frozenset({"detach", "detach_"})


@dataclass
class Handed:
    """What one eager forward handed out.

    Attributes:
        leaves: The tensor leaves of its result.
        owners: What the caller has (or copies that stood in for it), by kind and source as in
            SharedSpec.
    """

    leaves: list[torch.Tensor] = field(default_factory=list)
    owners: dict[tuple[str, Any], torch.Tensor] = field(default_factory=dict)

    def add(self, kind: str, source: Any, tensor: Any) -> None:
        """Something that the caller has."""
        if isinstance(tensor, torch.Tensor):
            self.owners.setdefault((kind, source), tensor)

    def add_state(self, module: torch.nn.Module, buffers: dict[str, Any]) -> None:
        """Parameters, and buffers (as observed) that still stand in their place."""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self.add("state", name, parameter)
        for name, seen in buffers.items():
            if not seen.replaced and seen.after.grad_fn is None:
                self.add("state", name, seen.after)


def find(handed: Handed, traced: Any, leaves: list, outside: Any) -> tuple[SharedSpec, ...]:
    """The leaves that are no outputs, in an order in which they can be made.

    Args:
        handed: What the observed forward handed out.
        traced: The trace, its regions inlined and nothing else rewritten.
        leaves: Of the call.
        outside: What forward() read from outside (guards/outside.py), or None.

    Raises:
        CaptureError: "unsupported_output_type" or "memory_layout": leaves share memory in a way
            that cannot be made.
    """
    nodes = _nodes(traced)
    if len(nodes) != len(handed.leaves) or not all(isinstance(n, torch.fx.Node) for n in nodes):
        return ()
    for source in outside.sources() if outside is not None else ():
        handed.add("outside", source, source.get())
    return _Finder(handed, traced, leaves, outside).run()


def depends_on_layout(shared: tuple[SharedSpec, ...], traced: Any) -> bool:
    """Whether arguments that lie otherwise in memory may give other views, or copies."""
    found = {spec.leaf: spec for spec in shared}
    for leaf, node in enumerate(_nodes(traced)):
        spec = found.get(leaf)
        if not isinstance(node, torch.fx.Node):
            continue
        if spec is None:
            source = _behind(node, MAY_COPY)
            if source.op == "placeholder" and source is not node:
                return True
        elif spec.kind == "argument" and _behind(node, _DETACH).op != "placeholder":
            return True
    return False


def _nodes(traced: Any) -> tuple[torch.fx.Node, ...]:
    (nodes,) = traced.program.graph.output_node().args
    return nodes


def _behind(node: torch.fx.Node, moves: frozenset[str]) -> torch.fx.Node:
    while packet(node) in moves:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _storage(tensor: torch.Tensor) -> int | None:
    """Where the memory begins; an array's tensors have a storage each."""
    try:
        return untyped_storage(tensor).data_ptr() if tensor.numel() else None
    except (NotImplementedError, RuntimeError):  # sparse, functional
        return None


def _aliased(node: torch.fx.Node, own: set[int]) -> torch.fx.Node | None:
    """The operand that a node, as far as its memory is `own`, is an alias of."""
    for operand in node.all_input_nodes:
        if own & storages(operand):
            return operand
    return node.all_input_nodes[0] if packet(node) in _MAY_BE_NOTHING else None


def _makes_a_view(node: torch.fx.Node) -> bool:
    if node.target is operator.getitem:  # the list was made by a node of its own
        return False
    return not is_mutable(node.target) and packet(node) not in _MAY_BE_NOTHING


@dataclass(frozen=True)
class _Origin:
    """Where an alias comes from.

    Attributes:
        node: What made the memory, or a placeholder.
        way: Index in _WAYS.
        steps: How many views lie between.
    """

    node: torch.fx.Node
    way: int
    steps: int


def _origin(node: torch.fx.Node) -> _Origin:
    way = steps = 0
    own = storages(node)  # one of several, behind an operator with several results
    while (source := _aliased(node, own)) is not None:
        if node.meta.get(DATA):
            way = max(way, _WAYS.index("data"))
        elif packet(node) in _DETACH:
            way = max(way, _WAYS.index("detach"))
        elif node.meta.get(OFF) and _makes_a_view(node):
            way = max(way, _WAYS.index("no_grad"))
        steps += _makes_a_view(node)
        node = source
        own = own & storages(node) or storages(node)
    return _Origin(node, way, steps)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors over one storage have an element in common."""
    if a.dtype is not b.dtype:
        return True
    first = [t.storage_offset() for t in (a, b)]
    last = [_last(t) for t in (a, b)]
    low, high = max(first), min(last)
    if low > high or _form_of(a) == _form_of(b):
        return low <= high
    start = min(first)
    seen = torch.zeros(max(last) - start + 1, dtype=torch.bool)
    seen.as_strided(a.shape, a.stride(), first[0] - start).fill_(True)
    return bool(seen.as_strided(b.shape, b.stride(), first[1] - start).any())


def _last(tensor: torch.Tensor) -> int:
    steps = ((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.storage_offset() + sum(steps)


def _form_of(tensor: torch.Tensor) -> tuple:
    """Sizes, strides and offset; symbols as text."""
    offset = tensor.storage_offset()
    return tuple(map(_text, tensor.shape)), tuple(map(_text, tensor.stride())), _text(offset)


def _text(number: Any) -> int | str:
    return number if isinstance(number, int) else str(number)


class _Finder:
    """One search; see find()."""

    def __init__(self, handed: Handed, traced: Any, leaves: list, outside: Any) -> None:
        self.tensors = handed.leaves
        self.owners = handed.owners
        self.nodes = _nodes(traced)
        self.paths = traced.result.paths
        self.leaves = leaves
        self.symbols = dims.symbols(traced.rules, leaves)
        signature = traced.program.graph_signature
        user = [s.arg.name for s in signature.input_specs if s.kind.name == "USER_INPUT"]
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        constants = signature.inputs_to_lifted_tensor_constants
        inputs = outside.inputs if outside is not None else {}
        self.placeholders: dict[str, tuple[str, Any]] = {
            **{n: ("argument", leaf) for n, leaf in zip(user, traced.leaf_numbers, strict=True)},
            **{n: ("state", fqn) for n, fqn in names.items()},
            **{n: ("outside", inputs[c]) for n, c in constants.items() if c in inputs},
        }

    def run(self) -> tuple[SharedSpec, ...]:
        objects = {id(t): key for key, t in reversed(self.owners.items())}
        owned = {_storage(t) for t in self.owners.values()}
        first = {id(t): i for i, t in self._ordered()}
        found: list[SharedSpec] = []
        again: list[SharedSpec] = []
        groups: dict[int, list[int]] = {}
        for leaf, tensor in enumerate(self.tensors):
            storage = _storage(tensor)
            if id(tensor) in objects:
                found.append(SharedSpec(leaf, *objects[id(tensor)]))
            elif first[id(tensor)] != leaf:
                again.append(SharedSpec(leaf, "output", first[id(tensor)]))
            elif storage in owned and storage is not None:
                found.append(self._of_owner(leaf))
            elif storage is not None:
                groups.setdefault(storage, []).append(leaf)
        for group in groups.values():
            for part in self._overlapping(group):
                found += self._of_each_other(part)
        return (*found, *again)

    def _ordered(self) -> list[tuple[int, torch.Tensor]]:
        """The leaves; of an object that is several of them, the one that is the output is last."""
        leaves = list(enumerate(self.tensors))
        return sorted(leaves, key=lambda x: (self.paths[x[0]][-1:] == ("loss",), -x[0]))

    def _of_owner(self, leaf: int) -> SharedSpec:
        """A view of what the caller has."""
        origin = _origin(self.nodes[leaf])
        key = self.placeholders.get(origin.node.name)
        owner = self.owners.get(key) if key is not None else None
        if key is None or owner is None or _storage(owner) != _storage(self.tensors[leaf]):
            raise self._refusal(leaf, "what it was made from cannot be told")
        form = self._form(leaf, owner, origin.node)
        if form is None:
            strides = None
        elif key[0] != "argument":
            strides = tuple(owner.stride())
        elif self.leaves[key[1]].is_contiguous():
            strides = None
        else:
            raise CaptureError(
                "memory_layout",
                f"forward() returns {self._where(leaf)} a view of an argument of shape "
                f"{list(owner.shape)} that is not contiguous: pass x.contiguous()",
            )
        return SharedSpec(leaf, *key, False, _WAYS[origin.way], form, strides)

    def _overlapping(self, group: list[int]) -> Iterator[list[int]]:
        """The leaves of one storage in parts without a common element."""
        parts: list[list[int]] = []
        for leaf in group:
            meets = [
                p for p in parts if any(_overlap(self.tensors[leaf], self.tensors[o]) for o in p)
            ]
            parts = [p for p in parts if p not in meets]
            parts.append(sorted([leaf, *(o for p in meets for o in p)]))
        return (p for p in parts if len(p) > 1)

    def _of_each_other(self, part: list[int]) -> list[SharedSpec]:
        """Leaves that overlap: one of them is an output, of which the others are views.

        It has a history if one of them has, and is as close as may be to what made the memory.
        """
        origins = {leaf: _origin(self.nodes[leaf]) for leaf in part}
        if len({o.node for o in origins.values()}) > 1:
            raise self._refusal(part[1], "what they were made from cannot be told")
        least = min(o.way for o in origins.values())
        order = sorted((o.steps, leaf) for leaf, o in origins.items() if o.way == least)
        for _, base in order:
            others = [leaf for leaf in part if leaf != base]
            if all(self._is_within(leaf, base) for leaf in others):
                break
        else:
            raise self._refusal(part[1], "none of them is contiguous and holds the others")
        specs = []
        for leaf in others:
            way = 0 if origins[leaf].way == least else origins[leaf].way
            form = self._form(leaf, self.tensors[base], self.nodes[base])
            specs.append(SharedSpec(leaf, "output", base, False, _WAYS[way], form))
        return specs

    def _is_within(self, leaf: int, base: int) -> bool:
        one, whole = self.tensors[leaf], self.tensors[base]
        if one.dtype is not whole.dtype:
            return False
        if _form_of(one) == _form_of(whole):
            return whole.is_contiguous() or self._same_form(self.nodes[leaf], self.nodes[base])
        first, last = whole.storage_offset(), _last(whole)
        return whole.is_contiguous() and first <= one.storage_offset() and _last(one) <= last

    @staticmethod
    def _same_form(a: torch.fx.Node, b: torch.fx.Node) -> bool:
        return _form_of(a.meta["val"]) == _form_of(b.meta["val"])

    def _form(self, leaf: int, source: torch.Tensor, node: torch.fx.Node) -> Any:
        """SharedSpec.form of a leaf in a source, which `node` stands for in the trace."""
        tensor = self.tensors[leaf]
        if tensor.dtype is not source.dtype:
            raise self._refusal(leaf, "they have different types")
        value, whole = self.nodes[leaf].meta["val"], node.meta["val"]
        if self._same_form(self.nodes[leaf], node):
            return None
        sizes, strides, _ = _form_of(value)
        form = (sizes, strides, _text(value.storage_offset() - whole.storage_offset()))
        offset = tensor.storage_offset() - source.storage_offset()
        try:
            numbers = dims.form(form, self.symbols)
        except (NameError, TypeError, ZeroDivisionError):
            raise self._refusal(leaf, "its sizes depend on values") from None
        if not _same_numbers(numbers, (tuple(tensor.shape), tensor.stride(), offset)):
            raise self._refusal(leaf, "the trace shows another view")
        return form

    def _where(self, leaf: int) -> str:
        return f"at {'.'.join(self.paths[leaf]) or 'the top'}"

    def _refusal(self, leaf: int, why: str) -> CaptureError:
        return CaptureError(
            "unsupported_output_type",
            f"forward() returns a tensor {self._where(leaf)} that shares memory with another "
            f"result, an argument or a parameter, and {why}; return a clone()",
        )


def _same_numbers(a: tuple, b: tuple) -> bool:
    """Strides along axes without a step do not count."""
    steps = [
        [(n, s) for n, s in zip(sizes, strides, strict=True) if n > 1]
        for sizes, strides, _ in (a, b)
    ]
    return a[0] == b[0] and steps[0] == steps[1] and a[2] == b[2]

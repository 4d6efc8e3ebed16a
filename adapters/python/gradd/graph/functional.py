"""Turns in-place writes into values: later reads of the memory read the result of the write.

torch does this as well, but only while it decomposes the whole program, which takes several times
as long as the translation. Here a write to x[1:] becomes the functional operator, and the memory's
next value is the previous one with that part replaced; views are made again from the current value
where they are read. The last value of a buffer becomes an output. Batch norms write to running
statistics, which their schema does not say: they become operators that return them. Instance norms,
which torch composes of batch norms, become norms of groups of one channel. torch handles inputs
that share memory, writes of several tensors and parts that no operator puts back.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx
from torch.export import graph_signature as signatures

from gradd import private
from gradd.graph import refused_types
from gradd.graph.nodes import Operator, argument, rename_outputs, storages, targets

_aten = torch.ops.aten
Node = torch.fx.Node
# Operators that put the part that a view shows back into the whole, with the same arguments.
_SCATTER = {
    _aten.slice.Tensor: _aten.slice_scatter.default,
    _aten.select.int: _aten.select_scatter.default,
}
# Inverses of views of all elements.
_BACK = {
    _aten.transpose.int: _aten.transpose.int,
    _aten.t.default: _aten.t.default,
    _aten.unsqueeze.default: _aten.squeeze.dim,
}
# Views of all elements in their order: the sizes are those of the whole again.
_RESHAPED = frozenset({
    *(_aten.reshape.default, _aten.view.default, _aten.flatten.using_ints, _aten.unflatten.int),
    *(_aten.squeeze.default, _aten.squeeze.dim),
})  # fmt: skip
_VIEWS = {_aten.alias.default, *_SCATTER, *_BACK, *_RESHAPED, _aten.permute.default}
# Norms that write to running statistics, where the flag is set.
_NORMS = {_aten.batch_norm.default: "training", _aten.instance_norm.default: "use_input_stats"}


def make_functional(graph: torch.fx.Graph, signature: Any) -> None:
    """Replaces all writes of a graph, or none where one of them cannot be.

    Args:
        graph: It is changed.
        signature: Follows its outputs.
    """
    norms, of_instances = (graph.find_nodes(op="call_function", target=t) for t in _NORMS)
    for node in (*norms, *of_instances):
        refused_types.check(node)
    for node in of_instances:
        _normalise_instances(node)
    if norms or any(map(targets, graph.nodes)):
        walk = _Walk(graph, signature)
        if walk.can_run():
            walk.run()


def _normalise_instances(node: Node) -> None:
    """An instance norm without statistics to remember becomes a norm of groups of one channel."""
    names = ("input", "weight", "bias", "running_mean", "running_var", "eps")
    x, weight, bias, mean, variance, eps = (argument(node, name) for name in names)
    if not argument(node, "use_input_stats"):
        node.target = _aten.batch_norm.default
        rest = (False, argument(node, "momentum"), eps, argument(node, "cudnn_enabled"))
        node.args, node.kwargs = (x, weight, bias, mean, variance, *rest), {}
    elif mean is None:
        node.target = _aten.group_norm.default
        node.args, node.kwargs = (x, x.meta["val"].shape[1], weight, bias, eps), {}


def moves_statistics(node: Node) -> bool:
    """Whether a norm of batches writes to running statistics, which its schema does not say."""
    return bool(_statistics(node))


def _statistics(node: Node) -> list[Node]:
    """The running statistics to which a norm writes."""
    flag = _NORMS.get(node.target)  # type: ignore[arg-type]
    if flag is None or not argument(node, flag):
        return []
    statistics = [argument(node, name) for name in ("running_mean", "running_var")]
    return [] if statistics[0] is None else statistics


def counterpart(target: Operator) -> Operator | None:
    """The operator that returns the values that this one writes; None = there is none."""
    name, _, overload = str(target).removeprefix("aten.").partition(".")
    if target.namespace != "aten" or not name.endswith("_"):
        return None
    # __iand__ writes the result of __and__.
    name = name.replace("__i", "__", 1) if name.startswith("__i") else name.removesuffix("_")
    # normal() itself has its mean or deviation in a tensor.
    packet = getattr(_aten, "normal_functional" if name == "normal" else name, None)
    if packet is None:
        return None
    kinds = _kinds(target)
    same = [getattr(packet, o) for o in sorted(packet.overloads(), key=overload.__ne__)]
    return next((one for one in same if _kinds(one) == kinds), None)


def result_of(node: Node) -> Any:
    """What an operator gives for its operands: a tensor without values."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with node.args[0].meta["val"].fake_mode, torch.no_grad():  # type: ignore[union-attr]
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _kinds(target: Operator) -> list[tuple[str, str]]:
    """pow_.Scalar writes what pow.Tensor_Scalar returns; pow.Scalar has a number first."""
    return [(a.name, str(a.type)) for a in private.schema(target).arguments]


class _Walk:
    """One walk in the order of execution.

    Attributes:
        writes: The nodes that write, in order.
        moved: The running statistics to which norms write.
        buffers: Names of buffers, by their placeholders.
        memory: The part of the written memory that each node shows.
        sources: The operands whose memory nodes show.
        operands: Of nodes, before the walk.
        version: How often memory was written so far.
        present: Its whole value now.
        values: What stands for an alias, and the version that it is of.
    """

    def __init__(self, graph: torch.fx.Graph, signature: Any) -> None:
        self.graph = graph
        self.signature = signature
        self.writes = {n: None for n in graph.nodes if targets(n)}
        self.moved = {n: found for n in graph.nodes if (found := _statistics(n))}
        self.buffers = self._buffers()
        written = {s for n in self.writes for s in storages(n)}
        written |= {s for found in self.moved.values() for p in found for s in storages(p)}
        self.memory = {n: storages(n) & written for n in graph.nodes}
        self.version = dict.fromkeys(written, 0)
        self.present: dict[int, Node] = {}
        self.values: dict[Node, tuple[Node, int]] = {}
        # As the graph has them: operands are replaced on the way.
        self.sources = {n: self._source(n) for n in graph.nodes}
        self.operands = {n: (n.args, n.kwargs) for n in graph.nodes}

    def _buffers(self) -> dict[Node, str]:
        names = self.signature.inputs_to_buffers
        given = self.graph.find_nodes(op="placeholder")
        return {n: names[n.name] for n in given if n.name in names}

    def _source(self, node: Node) -> Node | None:
        """The operand whose written memory a node shows; None = it has memory of its own."""
        shared = self.memory[node]
        return next((n for n in node.all_input_nodes if shared & self.memory[n]), None)

    # ---- what can be replaced ----

    def can_run(self) -> bool:
        """Whether all writes can be replaced, and no node shows memory of several tensors."""
        if any(len(memory) > 1 for memory in self.memory.values()):
            return False
        given = [self.memory[n] for n in self.memory if n.op == "placeholder" and self.memory[n]]
        if sum(map(len, given)) > len(set().union(*given)):
            return False  # placeholders share memory
        for node, statistics in self.moved.items():
            if node.target is not _aten.batch_norm.default:
                return False
            if not self.buffers.keys() >= set(statistics):
                return False
        return all(map(self._can_replace, self.writes))

    def _can_replace(self, node: Node) -> bool:
        """Whether a write has a functional operator, and its part can be put back."""
        target = node.target
        assert isinstance(target, Operator)
        if counterpart(target) is None:
            return False
        if targets(node) != [node.args[0]] or not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        one: Node | None = node.args[0]  # type: ignore[assignment]
        while one is not None:
            if one.op != "call_function" and one not in self.buffers:
                return False
            if not isinstance(one.meta.get("val"), torch.Tensor):
                return False
            source = self.sources[one]
            if source is not None and one not in self.writes and one.target not in _VIEWS:
                return False
            one = source
        return True

    # ---- the walk ----

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node in self.writes:
                self._write(node)
            elif node.op != "placeholder":
                self._read(node)
                if node.target is _aten.batch_norm.default:
                    self._normalise(node)
            elif self.memory[node]:
                self._show(node)
        for node in reversed(self.writes):
            self.graph.erase_node(node)
        self._return_buffers()

    def _show(self, node: Node) -> None:
        """Notes a node whose memory is written somewhere."""
        for storage in self.memory[node]:
            self.present.setdefault(storage, node)
            self.values[node] = node, self.version[storage]

    def _read(self, node: Node) -> None:
        with self.graph.inserting_before(node):
            for operand in node.all_input_nodes:
                value = self._now(operand)
                if value is not operand:
                    node.replace_input_with(operand, value)
                    if node.op == "output":
                        rename_outputs(self.signature, operand.name, value.name)
        if node.op == "call_function":
            self._show(node)

    def _now(self, node: Node) -> Node:
        """The node that stands for a node's value at this place."""
        known = self.values.get(node)
        if known is None:
            return node
        (storage,) = self.memory[node]
        value, version = known
        if version != self.version[storage]:
            source = self.sources[node]
            if source is None:
                value = self.present[storage]
            elif node in self.writes:
                value = self._now(source)
            else:
                value = self._call(node.target, *self._operands(node), like=node)
            self.values[node] = value, self.version[storage]
        return value

    def _operands(self, node: Node) -> tuple[Any, Any]:
        return torch.fx.map_arg(self.operands[node], self._now)

    def _call(self, target: Any, args: Any, kwargs: Any = None, *, like: Node) -> Node:
        made = self.graph.call_function(target, tuple(args), kwargs or {})
        made.meta = dict(like.meta)
        return made

    def _write(self, node: Node) -> None:
        target = node.args[0]
        (storage,) = self.memory[node]
        with self.graph.inserting_before(node):
            value = whole = self._result(node)
            part: Any = target
            while (source := self.sources[part]) is not None:
                if part not in self.writes:
                    whole = self._put_back(part, source, whole)
                part = source
        self.version[storage] += 1
        self.present[storage] = whole
        for alias in (target, node):
            self.values[alias] = value, self.version[storage]  # type: ignore[index]

    def _normalise(self, node: Node) -> None:
        """A batch norm becomes an operator that returns the new statistics, if there are any."""
        names = ("input", "weight", "bias", "running_mean", "running_var")
        operands: list[Any] = [argument(node, name) for name in names]
        rest = [argument(node, "momentum"), argument(node, "eps")]
        if not argument(node, "training"):
            target = _aten._native_batch_norm_legit_no_training.default
        elif node in self.moved:
            target = _aten._native_batch_norm_legit_functional.default
            operands.append(True)
        else:
            target = _aten._native_batch_norm_legit.no_stats
            operands[3:] = [True]
        with self.graph.inserting_before(node):
            made = self._call(target, [*operands, *rest], like=node)
            made.meta["val"] = result_of(made)
            for position, buffer in enumerate(self.moved.get(node, ()), start=3):
                value = self._call(operator.getitem, (made, position), like=node)
                value.meta["val"] = buffer.meta["val"]
                (storage,) = self.memory[buffer]
                self.version[storage] += 1
                self.present[storage] = value
                self.values[buffer] = value, self.version[storage]
        node.target, node.args, node.kwargs = operator.getitem, (made, 0), {}

    def _return_buffers(self) -> None:
        """What is written to buffers becomes the first outputs, as torch has them."""
        changed = {
            buffer: self.present[storage]
            for buffer in self.buffers
            for storage in self.memory[buffer]
            if self.version[storage]
        }
        output = self.graph.output_node()
        output.args = ((*changed.values(), *output.args[0]),)  # type: ignore[misc]
        kind = signatures.OutputKind.BUFFER_MUTATION
        self.signature.output_specs[:0] = [
            signatures.OutputSpec(kind, signatures.TensorArgument(value.name), self.buffers[buffer])
            for buffer, value in changed.items()
        ]

    def _result(self, node: Node) -> Node:
        """The result of a write, in the type of its target."""
        args, kwargs = self._operands(node)
        value = self._call(counterpart(node.target), args, kwargs, like=node)  # type: ignore[arg-type]
        known = node.meta["val"]
        value.meta["val"] = result_of(value)
        if value.meta["val"].dtype is known.dtype:
            return value
        return self._call(_aten._to_copy.default, (value,), {"dtype": known.dtype}, like=node)

    def _sizes(self, node: Node) -> list[Any]:
        """Numbers, or nodes that compute them."""
        found: list[Any] = list(node.meta["val"].shape)
        for axis, size in enumerate(found):
            if not isinstance(size, int):
                found[axis] = self.graph.call_function(_aten.sym_size.int, (node, axis))
                found[axis].meta["val"] = size
        return found

    def _put_back(self, view: Node, source: Node, value: Node) -> Node:
        """The value of the memory behind a view, with the view's value in its place."""
        if view.target is _aten.alias.default:
            return value
        (whole, *rest), kwargs = self._operands(view)
        if view.target in _BACK:
            return self._call(_BACK[view.target], (value, *rest), kwargs, like=source)
        if view.target in _RESHAPED:
            return self._call(_aten.reshape.default, (value, self._sizes(whole)), like=source)
        if view.target is _aten.permute.default:
            n = source.meta["val"].dim()
            back = sorted(range(n), key=[axis % n for axis in rest[0]].__getitem__)
            return self._call(view.target, (value, back), like=source)
        return self._call(_SCATTER[view.target], (whole, value, *rest), kwargs, like=source)

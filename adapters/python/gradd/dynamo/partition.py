"""Decides which nodes of a graph of Dynamo run in the daemon, and in which pieces.

A node that the daemon cannot run is cut out and runs in PyTorch. The nodes between such nodes form
pieces, in the order of the graph. A result that shares memory with an argument or another result is
no output of a piece: PyTorch makes it from its base, so that histories, version counters and the
rules for in-place writes are PyTorch's.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.fx

from gradd import private
from gradd.dynamo import modes
from gradd.dynamo.lower import name_of, value_of
from gradd.dynamo.sizes import is_number
from gradd.graph.nodes import is_mutable
from gradd.memory.watch import address

Node = torch.fx.Node
_WRITING = frozenset(
    getattr(operator, f"i{name}")
    for name in ("add", "and", "concat", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow")
    + ("rshift", "sub", "truediv", "xor")
)
_CONVERSIONS = ("contiguous", "to", "float", "double", "half", "bfloat16", "type", "type_as", "cpu")
_HOOKING = re.compile(r"\.(register_\w*hook|retain_grad)\(")
_SIZES = ("size", "numel", "dim", "stride")
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")
_DROPOUTS += ("feature_alpha_dropout", "feature_dropout")


@dataclass
class Part:
    """Nodes that run one after the other in the same place, the daemon or PyTorch.

    Attributes:
        daemon: They run in the daemon.
        nodes: In order.
        inputs: Values that they read from others.
        outputs: Values that others read from them; for a piece its bases alone.
        after: Nodes that PyTorch runs behind a piece: views of its bases.
        same: Of these, nodes that return another node's tensor, often one that they have written.
    """

    daemon: bool
    nodes: list[Node] = field(default_factory=list)
    inputs: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    after: list[Node] = field(default_factory=list)
    same: dict[Node, Node] = field(default_factory=dict)


def computes(node: Node) -> bool:
    """Whether a node is one of those that parts are made of."""
    if node.op in ("placeholder", "output", "get_attr") or modes.changes(node):
        return False
    return not is_number(node)


def assertions(graph: torch.fx.Graph, torchs: Collection[Node]) -> tuple[list[Node], list[Node]]:
    """Nodes that raise where a tensor is false: those with a write behind them, and the others.

    What PyTorch runs anyway, as between the ends of a vmap, has its place.
    """
    nodes = list(graph.nodes)
    found = [n for n in nodes if name_of(n) == "_assert_async" and n not in torchs]
    if not found:
        return [], []
    last = max((i for i, n in enumerate(nodes) if computes(n) and is_write(n)), default=0)
    before = set(nodes[:last])
    return [n for n in found if n in before], [n for n in found if n not in before]


def split(
    graph: torch.fx.Graph, torchs: Collection[Node], ends: Collection[Node] = ()
) -> list[Part]:
    """Parts in the order in which they run.

    PyTorch runs assertions as well: behind all else, so that they cut nothing, if no write would be
    behind a failing one otherwise.

    Args:
        graph: Of Dynamo.
        torchs: Nodes that PyTorch runs.
        ends: Nodes behind which another part begins.
    """
    before, behind = assertions(graph, torchs)
    torchs = {*torchs, *before}
    last = Part(False, behind)
    parts: list[Part] = []
    of: dict[Node, Part] = dict.fromkeys(behind, last)
    ended = True
    for node in filter(computes, graph.nodes):
        if node in of:
            continue
        source = of.get(node.args[0]) if takes_one(node) else None  # type: ignore[arg-type]
        if source is None:
            daemon = node not in torchs
            if ended or parts[-1].daemon is not daemon:
                parts.append(Part(daemon))
            source = parts[-1]
            ended = False
        source.nodes.append(node)
        of[node] = source
        ended = ended or node in ends
    results = list(
        private.pytree.tree_leaves(torch.fx.map_arg(graph.output_node().args[0], lambda n: n))
    )
    wanted = dict.fromkeys(n for n in results if isinstance(n, Node))
    if behind:
        parts.append(last)
    for part in parts:
        find_ends(part, wanted)
        if part.daemon and not part.outputs and not any(map(is_write, part.nodes)):
            part.daemon, part.nodes = False, part.after  # at most views of its arguments
            find_ends(part, wanted)
    return [part for part in parts if part.nodes]


def hooked(module: torch.fx.GraphModule) -> set[Node]:
    """Nodes whose results get a hook, or retain_grad(), in a graph or at the break behind it.

    A hook gets the gradient of all that reads a tensor. What reads it before the hook is there has
    to be in a later part: between the results of one part no gradient flows. At a break all results
    may get one.
    """
    nodes = list(module.graph.nodes)
    memory = _Memory(nodes)
    found: set[Node] = set()
    for at, node in enumerate(nodes):
        tensor = node.args[0] if name_of(node) == "register_hook" and node.args else None
        if isinstance(tensor, Node):
            own = memory.of(tensor)
            for other in reversed(nodes[:at]):
                if (
                    other is tensor
                    or computes(other)
                    and is_write(other)
                    and own & memory.of(other)
                ):
                    found.add(other)
                    break
    end: Any = module.compile_subgraph_reason
    if end.graph_break and any(_HOOKING.search(frame.line or "") for frame in end.user_stack):
        results = torch.fx.map_arg(nodes[-1].args[0], lambda n: n)
        found.update(n for n in private.pytree.tree_leaves(results) if isinstance(n, Node))
    return found


def read_before(graph: torch.fx.Graph, torchs: Collection[Node]) -> dict[Node, Node]:
    """Nodes for the daemon whose backward would miss a write of PyTorch, each with the write.

    PyTorch's backward takes what it kept as it is then. A write through .data, beside an alias by
    .data, or in inference mode changes that and no version; any other one is an error there.
    """
    if not any(map(is_write, torchs)):
        return {}
    nodes = list(graph.nodes)
    memory = _Memory(nodes)
    data = {s for n in nodes if n.target is private.get_data for s in memory.of(n)}
    found: dict[Node, Node] = {}
    for at, node in enumerate(nodes):
        if node not in torchs or not is_write(node):
            continue
        targets = [n for n in (*node.args[:1], node.kwargs.get("out")) if isinstance(n, Node)]
        written = {s for n in (node, *targets) for s in memory.of(n)}
        if not modes.of(node).inference:
            written &= data
        for other in nodes[:at] if written else ():
            if computes(other) and other not in torchs and other.target is not private.get_data:
                if any(written & memory.of(n) for n in (other, *other.all_input_nodes)):
                    found.setdefault(other, node)
    return found


def takes_one(node: Node) -> bool:
    """Whether a node selects one tensor of a list that another node returns."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, Node) and not isinstance(value_of(source), torch.Tensor)


def is_write(node: Node) -> bool:
    name = name_of(node)
    # a.fill(2), np.add(a, 1, a) of NumPy
    if type(node.target).__module__.startswith("torch._dynamo."):
        return name != "wrapped_getitem"
    if node.target in _WRITING or name in ("setitem", "__setitem__") or "out" in node.kwargs:
        return True
    if name.endswith("_") and not name.endswith("__") or _is_inplace(node):
        return True
    overloads = getattr(node.target, "overloads", None)  # of an operator of torch.ops
    names = [n for n in overloads() if "out" not in n] if overloads else []
    found = [getattr(node.target, n) for n in names] if overloads else [node.target]
    return any(map(is_mutable, found))


def _is_inplace(node: Node) -> bool:
    """Whether a function of torch.nn gets a true `inplace`, as F.relu(x, True) does."""
    if "inplace" in node.kwargs:
        return bool(node.kwargs["inplace"])
    at = _place_of_inplace(node.target)
    return at is not None and len(node.args) > at and bool(node.args[at])


@cache
def _place_of_inplace(function: Any) -> int | None:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # one of C, or a method's name
        return None
    return names.index("inplace") if "inplace" in names else None


def _tensors(node: Node) -> list[torch.Tensor]:
    return [x for x in private.pytree.tree_leaves(value_of(node)) if isinstance(x, torch.Tensor)]


class _Memory:
    """Which memory the values of nodes are in, one number for each."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._same: dict[int, int] = {}
        for node in nodes:
            if _does_nothing(node):
                (own,), (source,) = self.of(node), self.of(node.args[0])  # type: ignore[arg-type]
                if own != source:
                    self._same[own] = source

    def of(self, node: Node) -> set[int]:
        found = set()
        for tensor in _tensors(node):
            try:
                storage = address(tensor)
            except NotImplementedError:  # within a vmap, which PyTorch runs
                storage = id(tensor)
            while storage in self._same:
                storage = self._same[storage]
            found.add(storage)
        return found


def _does_nothing(node: Node) -> bool:
    """Whether PyTorch returns the operand itself, where a fake tensor may be another object."""
    source = node.args[0] if node.args else None
    name = name_of(node)
    if not isinstance(source, Node) or name not in (*_CONVERSIONS, *_DROPOUTS):
        return False
    a, b = value_of(source), value_of(node)
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype is b.dtype):
        return False
    if name in _DROPOUTS:
        given = [*node.args[1:], *node.kwargs.values()]
        return any(x is False for x in given[:2]) or 0.0 in [x for x in given if type(x) is float]
    return not node.kwargs.get("copy") and a.stride() == b.stride()


def find_ends(part: Part, wanted: Collection[Node]) -> None:
    """Finds the values that a part reads, and those that `wanted` or nodes outside read of it."""
    own = set(part.nodes)
    inputs: dict[Node, None] = {}
    for node in part.nodes:
        for operand in node.all_input_nodes:
            if operand not in own and not is_number(operand) and not modes.changes(operand):
                if operand.op != "get_attr" or not part.daemon:
                    inputs.setdefault(operand)
    part.inputs = list(inputs)
    read = [n for n in part.nodes if n in wanted or any(map(partial(_reads, own), n.users))]
    read = [n for n in read if _tensors(n)]
    if part.daemon:  # of a list the elements
        read = [n for n in read if isinstance(value_of(n), torch.Tensor) or n in wanted]
    if part.daemon:
        bases, part.after = _bases(part, read)
        order = {node: i for i, node in enumerate(wanted)}  # as the graph gives them
        part.outputs = sorted(bases, key=lambda n: order.get(n, len(order)))
    else:
        part.outputs, part.after, part.same = read, [], {}


def _reads(own: Collection[Node], user: Node) -> bool:
    """Whether a node outside reads a tensor, and not its size, which is known without it.

    Sizes are nodes in the bodies of checkpoints.
    """
    return user not in own and not (is_number(user) and name_of(user) in _SIZES)


def _bases(part: Part, read: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """Outputs of a piece, and the values that PyTorch makes of them and of its inputs."""
    memory = _Memory(part.nodes)
    given = {s for n in part.inputs for s in memory.of(n)}
    count: dict[int, set[int]] = {}
    for node in read:
        # In torch 2.14 the fake tensor of what does nothing is that of its operand.
        own = [node] if _does_nothing(node) else _tensors(node)
        for storage in memory.of(node):
            count.setdefault(storage, set()).update(map(id, own))
    bases: dict[Node, None] = {}
    after: set[Node] = set()
    for node in read:
        several = not isinstance(value_of(node), torch.Tensor)  # a list of tensors
        shared = any(s in given or len(count[s]) > 1 for s in memory.of(node))
        if not shared and not several:
            bases.setdefault(node)
            continue
        _follow(node, part, memory, bases, after)
    return list(bases), [n for n in part.nodes if n in after]


def _follow(
    node: Node, part: Part, memory: _Memory, bases: dict[Node, None], after: set[Node]
) -> None:
    """Finds the base of a view, the nodes between, and the other operands of those."""
    own = set(part.nodes)
    at = node
    while True:
        source = _aliased(at, memory)
        if source is None or _makes_several(source, own, memory):
            bases.setdefault(at)
            return
        if value_of(source) is value_of(at):
            part.same[at] = source
        after.add(at)
        for other in at.all_input_nodes:  # a size that is a tensor
            if other in own and other is not source and _tensors(other):
                _follow(other, part, memory, bases, after)
        if source not in own:
            return  # an argument
        at = source


def _makes_several(node: Node, own: Collection[Node], memory: _Memory) -> bool:
    """Whether a node of a part has results of their own memory, as a recurrent layer."""
    several = not isinstance(value_of(node), torch.Tensor)
    return several and node in own and _aliased(node, memory) is None


def _aliased(node: Node, memory: _Memory) -> Node | None:
    """The operand whose memory a node's value is a part of."""
    mine = memory.of(node)
    for operand in node.all_input_nodes:
        if mine & memory.of(operand):
            return operand
    return None

"""Helpers for FX graphs of exported programs, and gradd's own operators in such graphs.

gradd::stop_gradient(x) has the values of x and no history; it becomes com.gradd::StopGradient.
gradd::straight_through(value, x) has the values of `value` and the history of x; it becomes
com.gradd::StraightThrough. gradd::check_index(x, limit) has the values of x, which must be within
[0, limit); it becomes com.gradd::CheckIndex. The results of all three have memory of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor

from gradd import private
from gradd.memory.watch import address

_library = torch.library.Library("gradd", "FRAGMENT")
_library.define("stop_gradient(Tensor x) -> Tensor")
_library.impl("stop_gradient", lambda x: x.detach().clone(), "CompositeExplicitAutograd")
_library.define("straight_through(Tensor value, Tensor x) -> Tensor")
_library.impl(
    "straight_through", lambda value, x: value.detach().clone(), "CompositeExplicitAutograd"
)
_library.define("check_index(Tensor x, SymInt limit) -> Tensor")
_library.impl("check_index", lambda x, limit: x.clone(), "CompositeExplicitAutograd")

# They give a view where the layout of their operand allows it, else a copy.
MAY_COPY = frozenset({"contiguous", "flatten", "ravel", "reshape", "reshape_as"})
_ASSERTIONS = frozenset({
    *("_assert_async", "_assert_scalar", "_assert_tensor", "_assert_tensor_metadata"),
    *("sym_constrain_range", "sym_constrain_range_for_size"),
})  # fmt: skip
DETACH = frozenset({"aten::detach", "aten::detach_"})
OFF = "gradd_no_grad"  # mark of nodes that ran without gradients
DATA = "gradd_data"  # mark of detach() that stands for Tensor.data
INFERENCE = "gradd_inference"  # mark of nodes that ran in inference mode


Operator = type(torch.ops.aten.add.Tensor)


def takes_graphs(target: Any, names: Collection[str] = ()) -> bool:
    """True for an operator (of these names) whose arguments are graphs, such as a checkpoint."""
    is_one = getattr(target, "namespace", "") == "higher_order"
    return is_one and (not names or target.name() in names)


def fake_mode(values: Iterable[Any]) -> Any:
    """The mode of the first fake tensor among values; None = there is none."""
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)


def is_float(node: torch.fx.Node) -> bool:
    """True if the node's value is one tensor of floats."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def is_mutable(target: Any) -> bool:
    """True if the operator writes to one of its arguments."""
    return isinstance(target, Operator) and private.schema(target).is_mutable


def targets(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The operands that a node writes to (detach_() writes no data)."""
    if node.op != "call_function" or not is_mutable(node.target) or is_detach(node):
        return []
    found: list[torch.fx.Node] = []
    for i, given in enumerate(private.schema(node.target).arguments):
        if given.alias_info is not None and given.alias_info.is_write:
            value = node.kwargs.get(given.name, node.args[i] if i < len(node.args) else None)
            found += [v for v in private.pytree.tree_leaves(value) if isinstance(v, torch.fx.Node)]
    return found


def is_detach(node: torch.fx.Node) -> bool:
    return isinstance(node.target, Operator) and node.target.name() in DETACH


def is_assertion(target: Any) -> bool:
    """True if the operator does nothing but raise errors."""
    return isinstance(target, Operator) and target.overloadpacket.__name__ in _ASSERTIONS


def drop_assertions(graph: torch.fx.Graph) -> None:
    """Removes them where nothing reads what they return."""
    for node in [n for n in graph.nodes if is_assertion(n.target) and not n.users]:
        graph.erase_node(node)


def argument(node: torch.fx.Node, name: str) -> Any:
    """An argument of an operator's call by its name in the schema; None if it is not given."""
    if name in node.kwargs:
        return node.kwargs[name]
    names = [a.name for a in private.schema(node.target).arguments]
    position = names.index(name)
    return node.args[position] if position < len(node.args) else None


def packet(node: torch.fx.Node) -> str:
    """Name of a node's operator without its overload: "reshape"."""
    found = getattr(node.target, "overloadpacket", None)
    return "" if found is None else found.__name__


def storages(node: torch.fx.Node) -> set[int]:
    """Addresses of the storages of a node's values; they are equal for tensors that share memory.

    The trace's tensors hold them, so an address stands for one storage only.
    """
    value = node.meta.get("val")
    values = [value] if isinstance(value, torch.Tensor) else private.pytree.tree_leaves(value)
    return {address(v) for v in values if isinstance(v, torch.Tensor)}


def stop(graph: torch.fx.Graph, source: torch.fx.Node) -> torch.fx.Node:
    """A stop_gradient of `source`, at the graph's point of insertion."""
    node = graph.call_function(torch.ops.gradd.stop_gradient.default, (source,))
    node.meta = {k: v for k, v in source.meta.items() if k not in (OFF, DATA)}
    node.meta["val"] = own(node.meta["val"])
    return node


def own(value: torch.Tensor) -> torch.Tensor:
    """A tensor of a trace like another one, with memory of its own."""
    with getattr(value, "fake_mode", None) or contextlib.nullcontext(), torch.no_grad():
        return value.clone()


def replace(old: torch.fx.Node, new: torch.fx.Node, signature: Any) -> None:
    """`new` takes the place of `old` for all readers but `new` itself and its operands."""
    made_of = {new, *new.all_input_nodes}
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in made_of)
    rename_outputs(signature, old.name, new.name)


def replace_call(graph: torch.fx.Graph, node: torch.fx.Node, results: Any, signature: Any) -> None:
    if isinstance(results, torch.fx.Node):
        replace(node, results, signature)
    else:
        for user in list(node.users):
            replace(user, results[user.args[1]], signature)
            graph.erase_node(user)
    graph.erase_node(node)


def rename_outputs(signature: Any, old: str, new: str) -> None:
    for spec in signature.output_specs:
        if getattr(spec.arg, "name", None) == old:
            spec.arg.name = new

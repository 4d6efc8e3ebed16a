"""Makes in-place writes that autograd does not see explicit in the exported program.

PyTorch keeps data and history apart. A write under no_grad(), or through a detached alias, changes
the data of every tensor over that memory, but no tensor's history: gradients flow as if it had not
happened. A functional program does not separate the two, so such a write becomes

    fresh = stop_gradient(target); fresh.write_(...); target.copy_(straight_through(fresh, target))

which has the values of the write and the gradient of the target before it. Aliases stay aliases
here: torch's functionalisation, which comes later, carries each write to all of them. The storages
of the trace's tensors show which nodes share memory.

A write that autograd sees and that reads nothing of what it overwrites (zero_(), copy_()) ends the
history of its target in a functional program. In PyTorch the target keeps its history, and zeros
flow through it: the nodes that computed it get a gradient of zeros, which an optimizer treats
differently from no gradient. So such a write becomes a where() that selects all of its values and
none of the target's.

Detached aliases of memory that is written, and views of it that were made under no_grad(), become
plain aliases whose every read goes through a stop_gradient of its own, at the time of the read.
fx.py handles memory that is never written.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from gradd.graph import locations
from gradd.graph.nodes import (
    DATA,
    INFERENCE,
    MAY_COPY,
    OFF,
    is_detach,
    is_float,
    own,
    packet,
    rename_outputs,
    replace,
    stop,
    storages,
    targets,
)
from gradd.spec import CaptureError

_aten = torch.ops.aten


def make_explicit(graph: torch.fx.Graph, signature: Any) -> None:
    """Rewrites all writes of a flat graph (regions inlined), in place.

    Args:
        graph: Of an exported program; nodes that ran without gradients have the mark OFF.
        signature: The program's.

    Raises:
        CaptureError: "unsupported_operator" for a write whose gradient cannot be expressed.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        if node.args[0] is node.args[1]:  # it would end the history that it copies
            replace(node, node.args[0], signature)
            graph.erase_node(node)
    written = {s for node in graph.nodes for t in targets(node) for s in storages(t)}
    if written:
        _keep_copies(graph, written)
        _Pass(graph, signature, written).run()


# Writes that read nothing of their target.
_OVERWRITING = frozenset(
    {
        *("bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_"),
        *("normal_", "random_", "uniform_", "zero_"),
    }
)
# Their backward does not need their result.
_FORGET = frozenset(
    {
        *("add", "addmm", "baddbmm", "bmm", "cat", "clone", "div", "embedding", "layer_norm"),
        *("linear", "matmul", "mm", "mul", "neg", "rsub", "stack", "sub", "sum", "where"),
    }
)


def _is_whole(view: torch.fx.Node, source: torch.fx.Node) -> bool:
    """True if a view surely has all elements of its base."""
    a, b = view.meta.get("val"), source.meta.get("val")
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return statically_known_true(a.numel() == b.numel())


def _keep_copies(graph: torch.fx.Graph, written: set[int]) -> None:
    """A reshape() that copied, for the layout of its operand, and whose result is written.

    What replaces the operand here is contiguous: the reshape would be a view of it.
    """
    for node in graph.nodes:
        source = node.args[0] if packet(node) in MAY_COPY else None
        if source is None or not storages(node) & written or storages(node) & storages(source):
            continue
        with graph.inserting_before(node):
            copy = graph.call_function(
                _aten.clone.default, (source,), {"memory_format": torch.contiguous_format}
            )
        value = node.meta["val"].view(source.meta["val"].shape)
        copy.meta = {**node.meta, "val": value}
        node.replace_input_with(source, copy)


def _without_gradient(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Nodes that give no floats, or floats that only such nodes read, as distances for argmin()."""
    lost: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        value = node.meta.get("val")
        whole = isinstance(value, torch.Tensor) and not value.is_floating_point()
        ends = node.op == "call_function" and not targets(node)
        if ends and (whole or is_detach(node) or all(map(lost.__contains__, node.users))):
            lost.add(node)
    return lost


def _differentiated(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Operands, without those of which a node reads size and type alone."""
    name = packet(node)
    if name == "type_as":
        return node.all_input_nodes[:1]
    return [] if name.endswith("_like") or name.startswith("new_") else node.all_input_nodes


class _Pass:
    """One walk in the order of execution.

    Attributes:
        written: Storages that are written somewhere.
        with_history: Nodes through which gradients may flow to a parameter or an input.
        history_storages: Written storages of which some alias has a history so far.
        stopped: Aliases over written storages that have no history of their own.
        through_data: Those of them that come from Tensor.data.
        partial: Aliases of a part of the tensor that they are views of.
        kept: Written storages that a node with a backward has read so far, or made and may have
            kept: what that backward sees then, a graph cannot say.
        kept_data: The same for reads of aliases that come from Tensor.data.
        lost: Nodes that no gradient can reach.
    """

    def __init__(self, graph: torch.fx.Graph, signature: Any, written: set[int]) -> None:
        self.graph = graph
        self.signature = signature
        self.written = written
        self.with_history: set[torch.fx.Node] = set()
        self.history_storages: set[int] = set()
        self.stopped: set[torch.fx.Node] = set()
        self.through_data: set[torch.fx.Node] = set()
        self.partial: set[torch.fx.Node] = set()
        self.kept: set[int] = set()
        self.kept_data: set[int] = set()
        self.lost = _without_gradient(graph)

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                self._add(node, self._has_history(node))
            elif node.op == "output":
                self._stop_reads(node, set())
            elif written := targets(node):
                self._write(node, written)
            elif node.op == "call_function" and (source := self._aliased(node)) is not None:
                self._alias(node, source)
            else:
                self._compute(node)

    def _has_history(self, node: torch.fx.Node) -> bool:
        if not is_float(node):
            return False
        name = node.name
        if name in self.signature.inputs_to_buffers:
            return False
        return name in self.signature.inputs_to_parameters or node.meta["val"].requires_grad

    def _add(self, node: torch.fx.Node, history: bool) -> None:
        if history:
            self.with_history.add(node)
            self.history_storages |= storages(node) & self.written

    def _aliased(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """The operand that a node is an alias of, if that memory is written."""
        shared = storages(node) & self.written
        return next((n for n in node.all_input_nodes if shared & storages(n)), None)

    # ---- reads ----

    def _stop_reads(self, node: torch.fx.Node, spared: set[torch.fx.Node]) -> None:
        """Operands without a history of their own are read through a stop."""
        for operand in node.all_input_nodes:
            if operand not in self.stopped or operand in spared or not is_float(operand):
                continue
            with self.graph.inserting_before(node):
                stopped = stop(self.graph, operand)
            node.replace_input_with(operand, stopped)
            if node.op == "output":
                rename_outputs(self.signature, operand.name, stopped.name)

    def _compute(self, node: torch.fx.Node) -> None:
        """A node that makes memory of its own."""
        off = bool(node.meta.get(OFF))
        reads = not (off or is_detach(node))
        history = reads and node not in self.lost
        history = history and any(map(self._carries_history, _differentiated(node)))
        if off and is_float(node) and storages(node) & self.written:
            # Later writes must go to this memory, not to a copy for some readers.
            node.meta[OFF] = False
            with self.graph.inserting_after(node):
                stopped = stop(self.graph, node)
            node.meta["val"], stopped.meta["val"] = stopped.meta["val"], node.meta["val"]
            node.replace_all_uses_with(stopped, delete_user_cb=lambda user: user is not stopped)
            rename_outputs(self.signature, node.name, stopped.name)
            return
        if history:
            self._keep(node)
        if not off:
            self._stop_reads(node, set())
        self._add(node, history)
        if history and packet(node) not in _FORGET:
            self.kept |= storages(node) & self.written

    def _keep(self, node: torch.fx.Node) -> None:
        """The backward of this node may need its operands."""
        for operand in node.all_input_nodes:
            shared = storages(operand) & self.written
            self.kept |= shared
            if operand in self.through_data:
                self.kept_data |= shared

    def _carries_history(self, node: torch.fx.Node) -> bool:
        """A history written to one alias belongs to all aliases that have one."""
        if node in self.stopped:
            return False
        return node in self.with_history or bool(storages(node) & self.history_storages)

    # ---- aliases ----

    def _alias(self, node: torch.fx.Node, source: torch.fx.Node) -> None:
        """A view, a detached alias, or an element of a list of views."""
        if source in self.stopped or is_detach(node) or node.meta.get(OFF):
            self.stopped.add(node)
        elif self._carries_history(source):
            self.with_history.add(node)
        if source in self.through_data or node.meta.get(DATA):
            self.through_data.add(node)
        if source in self.partial or not _is_whole(node, source):
            self.partial.add(node)
        if is_detach(node):
            node.target = _aten.alias.default
        node.meta[OFF] = False

    # ---- writes ----

    def _write(self, node: torch.fx.Node, targets: list[torch.fx.Node]) -> None:
        target = targets[0]
        unseen = bool(node.meta.get(OFF)) or target in self.stopped
        others = [n for n in node.all_input_nodes if n not in targets]
        arriving = not node.meta.get(OFF) and any(self._carries_history(n) for n in others)
        shared_history = bool(storages(target) & self.history_storages)
        self._check_versions(node, target)
        if arriving or not unseen and self._carries_history(target):
            self._keep(node)
        if target in self.stopped:
            self.stopped.add(node)
        if target in self.through_data:
            self.through_data.add(node)
        if not is_float(target) or not unseen:
            history = is_float(target) and self._carries_history(target)
            self._stop_reads(node, set(targets))
            if history and packet(node) in _OVERWRITING and target not in self.partial:
                node = self._keep_history(node, target)
            self._add(node, is_float(target) and (arriving or history))
        elif arriving:
            raise _refusal(
                node, "a value with a gradient to a detached alias", "write to a clone()"
            )
        elif shared_history:
            self._straighten(node, targets)
        else:
            for other in others:
                self._stop_operand(node, other)
        node.meta[OFF] = False

    def _check_versions(self, node: torch.fx.Node, target: torch.fx.Node) -> None:
        """Refuses a write to what a backward may need, where torch would not notice it either.

        Tensor.data has versions of its own, and inference mode counts none; a backward would
        then use the new values. Any other such write is an error in torch's backward.
        """
        shared = storages(target)
        unnoticed = target in self.through_data or node.meta.get(INFERENCE)
        if shared & self.kept_data or unnoticed and shared & self.kept:
            how = "in inference mode" if node.meta.get(INFERENCE) else "beside or through .data"
            raise _refusal(
                node, f"{how} to a tensor that a backward may need", "use torch.no_grad()"
            )

    def _stop_operand(self, node: torch.fx.Node, operand: torch.fx.Node) -> None:
        if is_float(operand):
            with self.graph.inserting_before(node):
                node.replace_input_with(operand, stop(self.graph, operand))

    def _straighten(self, node: torch.fx.Node, targets: list[torch.fx.Node]) -> None:
        """The form at the top of this file."""
        target = targets[0]
        if len(targets) > 1 or not isinstance(node.meta.get("val"), torch.Tensor):
            raise _refusal(node, "several tensors without their gradients", "write one by one")
        for other in [n for n in node.all_input_nodes if n is not target]:
            self._stop_operand(node, other)
        fresh = self._write_beside(node, target)
        with self.graph.inserting_after(node):
            straight = self.graph.call_function(
                torch.ops.gradd.straight_through.default, (fresh, target)
            )
        self._write_back(node, target, straight)

    def _keep_history(self, node: torch.fx.Node, target: torch.fx.Node) -> torch.fx.Node:
        """The where() at the top of this file; returns the substitute for the result."""
        fresh = self._write_beside(node, target)
        with self.graph.inserting_after(node):
            mask = self.graph.call_function(
                _aten.ones_like.default, (fresh,), {"dtype": torch.bool}
            )
        mask.meta = {**node.meta, "val": torch.ones_like(target.meta["val"], dtype=torch.bool)}
        with self.graph.inserting_after(mask):
            joined = self.graph.call_function(_aten.where.self, (mask, fresh, target))
        return self._write_back(node, target, joined)

    def _write_beside(self, node: torch.fx.Node, target: torch.fx.Node) -> torch.fx.Node:
        """Has a write go to a copy without history, which is returned."""
        with self.graph.inserting_before(node):
            fresh = stop(self.graph, target)
        node.replace_input_with(target, fresh)
        node.meta["val"] = fresh.meta["val"]
        return fresh

    def _write_back(
        self, node: torch.fx.Node, target: torch.fx.Node, value: torch.fx.Node
    ) -> torch.fx.Node:
        with self.graph.inserting_after(value):
            done = self.graph.call_function(_aten.copy_.default, (target, value))
        for new in (value, done):
            new.meta = {k: v for k, v in node.meta.items() if k != OFF}
        value.meta["val"], done.meta["val"] = own(node.meta["val"]), target.meta["val"]
        replace(node, done, self.signature)
        self._follow(target, done)
        return done

    def _follow(self, target: torch.fx.Node, done: torch.fx.Node) -> None:
        """The result of a write is the tensor that was written."""
        for table in (self.with_history, self.stopped, self.through_data):
            if target in table:
                table.add(done)


def _refusal(node: torch.fx.Node, what: str, advice: str) -> CaptureError:
    where = locations.location_of(node)
    return CaptureError(
        "unsupported_operator",
        f"{where}: {node.target} writes {what}, which a graph cannot hold; {advice}",
    )

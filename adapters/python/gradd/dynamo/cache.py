"""Caches captures by their graphs: an equal graph is translated once, see disk_cache.py.

So is a graph that has no translation: the reason is kept.

A failed guard makes Dynamo recompile, though the operators are often the same (a config field was
filled in, parameters were frozen, another instance of the class). Symbols are numbered in order of
appearance, because each compilation has symbols of its own.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from gradd.dynamo import disk_cache, lower
from gradd.graph.locations import location_of
from gradd.graph.nodes import DATA, INFERENCE, OFF, is_mutable
from gradd.spec import Capture, CaptureError

_KEPT = 256
_MARKS = (OFF, DATA, INFERENCE)
_TRANSIENT = "export_failed"  # an error that nothing expects: memory, for one, may be there later
_captures: OrderedDict[bytes, Capture | CaptureError] = OrderedDict()
_lock = threading.Lock()


def find(
    key: bytes, make: Callable[[], Capture], decided: Callable[[], int] = lambda: 0
) -> tuple[Capture, bool]:
    """The capture under a key, made if there is none; and whether it was there.

    Args:
        key: Of `key_of`.
        make: Translates.
        decided: How much has been decided about sizes so far. A capture that decides something is
            not kept: with other sizes the same graph is translated in another way.

    Raises:
        CaptureError: It cannot be translated.
    """
    with _lock:
        known = _captures.get(key)
        if known is not None:
            _captures.move_to_end(key)
    if known is not None:
        return _taken(known), True
    found = disk_cache.load(key)
    if found is None:
        before = decided()
        try:
            found = make()
        except CaptureError as error:
            if decided() != before or not _is_lasting(error):
                raise
            found = copy.copy(error)  # without its frames, which hold tensors
        if decided() != before:
            return _taken(found), False
        disk_cache.store(key, found)
    with _lock:
        _captures[key] = found
        if len(_captures) > _KEPT:
            _captures.popitem(last=False)
    return _taken(found), False


def _is_lasting(error: CaptureError) -> bool:
    """Whether another translation of an equal graph fails in the same way.

    One that names a node of this graph is not kept: it is raised before anything is translated.
    """
    return error.reason != _TRANSIENT and error.node is None


def _taken(found: Capture | CaptureError) -> Capture:
    if isinstance(found, CaptureError):
        raise copy.copy(found)
    return found


def key_of(done: lower.Lowered, inputs: Sequence[Any], names: Sequence[str], more: Any) -> bytes:
    """Equal for graphs that are translated to the same.

    Args:
        done: The graph, before anything is rewritten.
        inputs: Of its placeholders: names, positions, and what they are.
        names: Of its outputs.
        more: Everything else that the capture depends on.
    """
    digest = hashlib.sha256()
    # Which parameters are frozen is a matter of plans, but for what may be written.
    describe = _Describe(any(is_mutable(node.target) for node in done.graph.nodes))
    for node in done.graph.nodes:
        digest.update(describe.node(node).encode())
    for given, source in zip(inputs, done.inputs, strict=True):
        is_parameter = isinstance(given.tensor, torch.nn.Parameter)
        digest.update(repr((given.name, given.position, given.bound, is_parameter)).encode())
        if isinstance(source, torch.Tensor):
            digest.update(_bytes_of(source))
    digest.update(repr((list(names), done.written, more)).encode())
    return digest.digest()


class _Describe:
    """Text for the nodes of one graph."""

    def __init__(self, grads: bool) -> None:
        self._grads = grads
        self._numbers: dict[torch.fx.Node, int] = {}
        self._symbols: dict[str, str] = {}
        self._texts: dict[Any, str] = {}  # of expressions: graphs have few different ones

    def node(self, node: torch.fx.Node) -> str:
        """All that a translation reads of a node."""
        self._numbers[node] = len(self._numbers)
        operands = torch.fx.map_arg((node.args, node.kwargs), lambda n: f"%{self._numbers[n]}")
        marks = [m for m in _MARKS if node.meta.get(m)]
        value = self._value(node.meta.get("val"))
        location = location_of(node) if node.op == "call_function" else node.name
        return f"{node.op}|{node.target}|{operands!r}|{marks}|{value}|{location}\n"

    def _value(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            sizes = [self._number(n) for n in (*value.shape, *value.stride())]
            return f"{value.dtype}{sizes}{self._grads and value.requires_grad}"
        if isinstance(value, (list, tuple)):
            return str([self._value(v) for v in value])
        return self._number(value)

    def _number(self, value: Any) -> str:
        if not isinstance(value, lower.SYMBOLIC):
            return repr(value)
        expression = value.node.expr
        if expression in self._texts:
            return self._texts[expression]
        known = {}
        for symbol in sorted(expression.free_symbols, key=lambda s: s.name):
            name = self._symbols.setdefault(symbol.name, f"d{len(self._symbols)}")
            known[symbol] = type(symbol)(name, **symbol.assumptions0)
        text = self._texts[expression] = str(expression.xreplace(known))
        return text


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()

"""Autocast: its state around a call, and its casts as nodes of the graph.

torch's autocast kernels show, operator by operator, which operands they cast, so there is no list
of them here. A compound operator that hides such operators would lose their casts: the known ones
are traced as their parts, any other is refused. Equal casts are merged later, when the graph has no
writes.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradd.graph.nodes import Operator, fake_mode
from gradd.memory import devices
from gradd.spec import CaptureError

_aten = torch.ops.aten
_DEVICE = "cpu"
_TYPES = (torch.bfloat16, torch.float16)
COMPOUND = (
    *(_aten.einsum.default, _aten.tensordot.default, _aten.inner.default, _aten.bilinear.default),
    *(_aten.linalg_matmul.default, _aten.linalg_multi_dot.default, _aten.chain_matmul.default),
    *(_aten.nll_loss_nd.default, _aten.concat.default, _aten.concatenate.default),
    *(_aten.hstack.default, _aten.vstack.default, _aten.dstack.default),
    *(_aten.column_stack.default, _aten.row_stack.default),
)


def state() -> tuple[tuple[str, torch.dtype], ...]:
    """The device types with autocast enabled around the caller, and their element types."""
    return tuple(
        (device, torch.get_autocast_dtype(device))
        for device in devices.types()
        if torch.is_autocast_enabled(device)
    )


def ambient() -> torch.dtype | None:
    """The element type of the autocast around the caller; None if there is none.

    Raises:
        CaptureError: "autocast" for another device or element type than the daemon computes in.
    """
    found = None
    for device, dtype in state():
        check(device, dtype, "around the call")
        found = dtype
    return found


def check(device: str, dtype: torch.dtype, where: str) -> None:
    """Raises CaptureError for an autocast that the daemon does not compute in."""
    if device != _DEVICE or dtype not in _TYPES:
        raise CaptureError(
            "autocast",
            f"torch.autocast({device!r}, {dtype}) is active {where}; the daemon computes in "
            "torch.bfloat16 and torch.float16 on the CPU",
        )


def make_explicit(graph: torch.fx.Graph, node: torch.fx.Node, dtype: torch.dtype) -> None:
    """Inserts in front of a node the casts that autocast to `dtype` makes, in place.

    Raises:
        CaptureError: "autocast" for a compound operator that hides its casts.
    """
    if not isinstance(node.target, Operator):
        return
    if _has_kernel(node.target, "AutocastCPU"):
        _cast_operands(graph, node, dtype)
    elif _has_kernel(node.target, "CompositeImplicitAutograd") and _hides_casts(node, dtype):
        raise CaptureError(
            "autocast",
            f"{node.target.name()} changes its operands' types under autocast in a way that is "
            "not captured; call it inside torch.autocast('cpu', enabled=False)",
        )


@functools.lru_cache(maxsize=1024)
def _has_kernel(target: Any, key: str) -> bool:
    return target.has_kernel_for_dispatch_key(key)


class _Enough(Exception):
    """The operator itself has been reached: all its casts are known."""


class _Probe(TorchDispatchMode):
    """Notes the casts in front of an operator and keeps it from running; or all casts in it."""

    def __init__(self, run: bool) -> None:
        super().__init__()
        self.run = run
        self.types: dict[int, torch.dtype] = {}  # id of a cast tensor -> its new type
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten._to_copy.default:
            self.count += 1
            self.types[id(args[0])] = kwargs.get("dtype") or args[0].dtype
        elif not self.run and func.namespace != "prim":  # those only read sizes and devices
            raise _Enough
        return func(*args, **kwargs)


def _probe(node: torch.fx.Node, dtype: torch.dtype | None, run: bool) -> _Probe:
    """Calls a node's operator with the values of its trace, under autocast or without."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    probe = _Probe(run)
    values = [n.meta["val"] for n in node.all_input_nodes]
    with (
        torch.no_grad(),
        fake_mode(values)
        or contextlib.nullcontext(),  # numbers that become tensors in the operator
        torch.autocast(_DEVICE, dtype, enabled=dtype is not None, cache_enabled=False),
        contextlib.suppress(_Enough),
        probe,
    ):
        node.target(*args, **kwargs)  # type: ignore[operator]
    return probe


def _hides_casts(node: torch.fx.Node, dtype: torch.dtype) -> bool:
    """True if something inside a compound operator casts under autocast."""
    values = [n.meta.get("val") for n in node.all_input_nodes]
    if not any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values):
        return False
    return _probe(node, dtype, True).count != _probe(node, None, True).count


def _own_casts(node: torch.fx.Node) -> dict[int, torch.dtype]:
    """Those that a compound operator begins with by itself (attention of three dimensions)."""
    try:
        return _probe(node, None, False).types
    except RuntimeError:  # operands of different types, which only autocast makes one of
        return {}


def _cast_operands(graph: torch.fx.Graph, node: torch.fx.Node, dtype: torch.dtype) -> None:
    """Inserts in front of an operator the casts that autocast makes of its operands."""
    types = _probe(node, dtype, False).types
    own = _own_casts(node) if types else {}
    types = {at: wanted for at, wanted in types.items() if own.get(at) is not wanted}
    for source in node.all_input_nodes:
        wanted = types.get(id(source.meta.get("val")))
        if wanted is not None and wanted is not source.meta["val"].dtype:
            node.replace_input_with(source, _cast(graph, source, wanted, node))


def _cast(
    graph: torch.fx.Graph, source: torch.fx.Node, dtype: torch.dtype, user: torch.fx.Node
) -> torch.fx.Node:
    with graph.inserting_before(user):
        node = graph.call_function(_aten.to.dtype, (source, dtype))
    node.meta = {k: v for k, v in user.meta.items() if k in ("nn_module_stack", "stack_trace")}
    with torch.no_grad():
        node.meta["val"] = source.meta["val"].to(dtype)
    return node

"""Autocast: its state around a call, and its casts as nodes of the graph.

Each type of device has autocast kernels of its own, which act on its tensors alone. They show,
operator by operator, which operands they cast, so there is no list of them here. Where a kernel
asks its operator for a type of result instead, as that of sum() on a GPU does, a cast of the
operand gives the same. A compound operator that hides such operators would lose their casts: the
known ones are traced as their parts, any other is refused. Equal casts are merged later, when the
graph has no writes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradd import private
from gradd.graph import recurrent
from gradd.graph.nodes import Operator, fake_mode, is_float
from gradd.memory import devices
from gradd.spec import CaptureError

_aten = torch.ops.aten
_TYPES = (torch.bfloat16, torch.float16)
_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_OTHERS = "AutocastPrivateUse1"  # key of devices that torch is told of at run time
COMPOUND = (  # to be traced as their parts where these cast
    *(_aten.einsum.default, _aten.tensordot.default, _aten.inner.default, _aten.bilinear.default),
    *(_aten.linalg_matmul.default, _aten.linalg_multi_dot.default, _aten.chain_matmul.default),
    *(_aten.nll_loss_nd.default, _aten.concat.default, _aten.concatenate.default),
    *(_aten.hstack.default, _aten.vstack.default, _aten.dstack.default),
    *(_aten.column_stack.default, _aten.row_stack.default),
    *(_aten.cross_entropy_loss.default, _aten.square.default, _aten.linalg_norm.default),
    *(_aten.pairwise_distance.default, _aten.special_softmax.default),
    *(_aten.special_log_softmax.default, _aten.special_logsumexp.default),
    *(_aten.special_log1p.default, _aten.special_expm1.default),
    *(_aten.gru_cell.default, _aten.rnn_tanh_cell.default, _aten.rnn_relu_cell.default),
)
Active = frozenset[tuple[str, torch.dtype]]


def state() -> Active:
    """The device types with autocast enabled around the caller, and their element types."""
    return frozenset(
        (device, torch.get_autocast_dtype(device))
        for device in devices.types()
        if torch.is_autocast_enabled(device)
    )


def ambient() -> Active:
    """The same.

    Raises:
        CaptureError: "autocast" for another element type than the daemon computes in.
    """
    found = state()
    for device, dtype in found:
        check(device, dtype, "around the call")
    return found


def check(device: str, dtype: torch.dtype, where: str) -> None:
    """Raises CaptureError for an autocast that the daemon does not compute in."""
    if dtype not in _TYPES:
        raise CaptureError(
            "autocast",
            f"torch.autocast({device!r}, {dtype}) is active {where}; the daemon computes in "
            "torch.bfloat16 and torch.float16",
        )


@contextlib.contextmanager
def entered(active: Active) -> Iterator[None]:
    """Autocast for these devices and no other."""
    wanted = dict(active)
    with contextlib.ExitStack() as stack:
        for device in devices.types():
            on = device in wanted
            if on or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, wanted.get(device), enabled=on))
        yield


class Call(NamedTuple):
    """A call of an operator under autocast."""

    target: Any  # the operator
    args: tuple  # its arguments; tensors without values
    kwargs: dict  # the same
    device: str  # the type of device whose autocast is on
    dtype: torch.dtype  # its element type

    def has_casts(self) -> bool:
        """Whether autocast has a kernel of its own for the operator."""
        return _has_kernel(self.target, _KEYS.get(self.device, _OTHERS))

    def hides_casts(self) -> bool:
        """Whether something inside a compound operator computes in another type under autocast."""
        if not any(t.is_floating_point() for t in self._tensors()):
            return False
        try:
            plain = self.probe(False, run=True).steps
        except RuntimeError:  # operands of different types, which only autocast makes one of
            return True
        return self.probe(True, run=True).steps != plain

    def probe(self, on: bool, run: bool) -> _Probe:
        """Calls the operator, under autocast or without."""
        probe = _Probe(run)
        with (
            torch.no_grad(),
            fake_mode(self._tensors())
            or contextlib.nullcontext(),  # numbers that become tensors in the operator
            torch.autocast(self.device, self.dtype, enabled=on, cache_enabled=False),
            contextlib.suppress(_Enough),
            probe,
        ):
            probe.result = self.target(*self.args, **self.kwargs)
        return probe

    def _tensors(self) -> list[torch.Tensor]:
        leaves = private.pytree.tree_leaves((self.args, self.kwargs))
        return [x for x in leaves if isinstance(x, torch.Tensor)]


def make_explicit(
    graph: torch.fx.Graph, node: torch.fx.Node, device: str, dtype: torch.dtype
) -> None:
    """Inserts in front of a node the casts that autocast to `dtype` makes, in place.

    Raises:
        CaptureError: "autocast" for a compound operator that hides its casts.
    """
    if not isinstance(node.target, Operator):
        return
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    call = Call(node.target, args, kwargs, device, dtype)
    if node.target in recurrent.LAYERS:
        _cast_layer(graph, node, dtype)
    elif call.has_casts():
        _cast_operands(graph, node, call)
    elif _has_kernel(node.target, "CompositeImplicitAutograd") and call.hides_casts():
        raise CaptureError(
            "autocast",
            f"{node.target.name()} changes its operands' types under autocast in a way that is "
            f"not captured; call it inside torch.autocast({device!r}, enabled=False)",
        )


@functools.lru_cache(maxsize=1024)
def _has_kernel(target: Any, key: str) -> bool:
    return target.has_kernel_for_dispatch_key(key)


class _Enough(Exception):
    """The operator itself has been reached: all its casts are known."""


class _Probe(TorchDispatchMode):
    """Notes the casts in front of an operator and keeps it from running; or all steps in it."""

    def __init__(self, run: bool) -> None:
        super().__init__()
        self.run = run
        self.types: dict[int, torch.dtype] = {}  # id of a cast tensor -> its new type
        self.steps: list[Any] = []  # operators, and the types that each reads and is asked for
        self.result: Any = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # reads sizes and devices
            return func(*args, **kwargs)
        if func is _aten._to_copy.default:
            self.types[id(args[0])] = kwargs.get("dtype") or args[0].dtype
        elif not self.run:
            raise _Enough
        read = [x.dtype for x in private.pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        self.steps.append((func, read, kwargs.get("dtype")))
        return func(*args, **kwargs)


def _own_casts(call: Call) -> dict[int, torch.dtype]:
    """Those that a compound operator begins with by itself (attention of three dimensions)."""
    try:
        return call.probe(False, run=False).types
    except RuntimeError:  # as above
        return {}


def _cast_operands(graph: torch.fx.Graph, node: torch.fx.Node, call: Call) -> None:
    """Inserts in front of an operator the casts that autocast makes of its operands."""
    types = call.probe(True, run=False).types
    own = _own_casts(call) if types else {}
    types = {at: wanted for at, wanted in types.items() if own.get(at) is not wanted}
    types = types or _asked_for(node, call)
    for source in node.all_input_nodes:
        wanted = types.get(id(source.meta.get("val")))
        if wanted is not None and wanted is not source.meta["val"].dtype:
            node.replace_input_with(source, _cast(graph, source, wanted, node))


def _cast_layer(graph: torch.fx.Graph, node: torch.fx.Node, dtype: torch.dtype) -> None:
    """A recurrent layer's products are autocast's: here it computes in that type altogether.

    Where torch keeps a state in f32 between the products, as in a GRU, it is rounded here.
    """
    for source in node.all_input_nodes:
        if is_float(source) and source.meta["val"].dtype not in (dtype, torch.float64):
            node.replace_input_with(source, _cast(graph, source, dtype, node))
    if any(source.meta["val"].dtype is torch.float64 for source in node.all_input_nodes):
        return
    for part in list(node.users):
        value = part.meta["val"]
        if value.dtype is not dtype:
            users = list(part.users)
            with torch.no_grad():
                part.meta["val"] = value.to(dtype)
            for user in users:
                user.replace_input_with(part, _cast(graph, part, value.dtype, user))
    with torch.no_grad():
        node.meta["val"] = tuple(value.to(dtype) for value in node.meta["val"])


def _asked_for(node: torch.fx.Node, call: Call) -> dict[int, torch.dtype]:
    """A cast of the operand to the type that autocast asks the operator for, if it does."""
    floats = [n.meta["val"] for n in node.all_input_nodes if is_float(n)]
    if not is_float(node) or len(floats) != 1:
        return {}
    wanted = node.meta["val"].dtype
    if floats[0].dtype is wanted or call.probe(False, run=True).result.dtype is wanted:
        return {}
    return {id(floats[0]): wanted}


def _cast(
    graph: torch.fx.Graph, source: torch.fx.Node, dtype: torch.dtype, user: torch.fx.Node
) -> torch.fx.Node:
    with graph.inserting_before(user):
        node = graph.call_function(_aten.to.dtype, (source, dtype))
    node.meta = {k: v for k, v in user.meta.items() if k in ("nn_module_stack", "stack_trace")}
    with torch.no_grad():
        node.meta["val"] = source.meta["val"].to(dtype)
    return node

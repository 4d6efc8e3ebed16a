"""Operands of types that PyTorch refuses, though FakeTensor lets them pass.

Without a refusal the daemon would compute what raises an error in PyTorch. Such an operator is cut
out, and PyTorch raises its own error in the call. A combination that some release of torch takes
runs in PyTorch, then.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx

from gradd import private
from gradd.graph.locations import location_of
from gradd.graph.nodes import Operator, packet
from gradd.spec import CaptureError

_HALVES = (torch.float16, torch.bfloat16)
# Their floating operands have one type.
_ALIKE = frozenset(
    {
        *("linear", "matmul", "mm", "mv", "bmm", "dot", "vdot", "inner", "bilinear", "cdist"),
        *("addmm", "addmv", "addbmm", "baddbmm", "addr", "grid_sampler", "embedding_bag"),
        *("convolution", "conv1d", "conv2d", "conv3d", "heaviside", "_weight_norm"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("huber_loss", "binary_cross_entropy", "multi_margin_loss", "nll_loss", "nll_loss_nd"),
        *("cross_entropy_loss", "nll_loss2d"),
        "soft_margin_loss",  # it takes them, and gives another type than FakeTensor says
        *("layer_norm", "group_norm", "batch_norm", "instance_norm"),
    }
)
_NORMS = ("layer_norm", "group_norm", "batch_norm", "instance_norm")
_WEIGHTED = ("layer_norm", "group_norm")  # without a weight they take no other bias
# An operand that may have another type: a target of probabilities, say.
_OWN_TYPE = {"cross_entropy_loss": "target", "binary_cross_entropy": "weight"}
_LONG = (torch.int64, torch.uint8)
_INDEX = (torch.int64, torch.int32)
# The types of their indices. uint8 among the indices of index_put() is a mask.
_INDICES = {
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"), _LONG),
    **dict.fromkeys(("multi_margin_loss", "index_fill", "index_copy", "scatter_reduce"), _LONG[:1]),
    **dict.fromkeys(("index_select", "index_add"), _INDEX),
    "index_put": (*_INDEX, torch.bool),
}
_PLACES = ("target", "index", "indices")


def check(node: torch.fx.Node) -> None:
    """Checks the operands of one operator of aten.

    Raises:
        CaptureError: PyTorch refuses them.
    """
    name = packet(node)
    if name not in _ALIKE and name not in _INDICES or not isinstance(node.target, Operator):
        return
    given = list(_operands(node))
    wrong = [x.dtype for at, x in given if at in _PLACES and x.dtype not in _taken(name, x)]
    if wrong:
        raise _refusal(node, f"{name} with indices of {wrong[0]}", "int64")
    own = _OWN_TYPE.get(name)
    floats = {at: x.dtype for at, x in given if x.is_floating_point() and at != own}
    if name in _ALIKE and len(set(floats.values())) > 1 and not _is_norm_of_halves(name, floats):
        kinds = " and ".join(dict.fromkeys(map(str, floats.values())))
        raise _refusal(node, f"{name} of {kinds}", "one type")


def _operands(node: torch.fx.Node) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among the operands, with the names of their parameters."""
    names = [a.name for a in private.schema(node.target).arguments]
    for at, operand in (*zip(names, node.args, strict=False), *node.kwargs.items()):
        for one in operand if isinstance(operand, (list, tuple)) else (operand,):
            value = one.meta.get("val") if isinstance(one, torch.fx.Node) else None
            if isinstance(value, torch.Tensor):
                yield at, value


def _taken(name: str, index: torch.Tensor) -> tuple[torch.dtype, ...]:
    known = _INDICES.get(name)
    return (index.dtype,) if known is None or index.is_floating_point() else known


def _is_norm_of_halves(name: str, floats: dict[str, torch.dtype]) -> bool:
    """Norms take halves with parameters and statistics of f32, as under autocast."""
    own, *others = floats.values()
    known = name not in _WEIGHTED or "weight" in floats
    return name in _NORMS and own in _HALVES and set(others) == {torch.float32} and known


def _refusal(node: torch.fx.Node, what: str, remedy: str) -> CaptureError:
    text = f"{location_of(node)}: {what}, which PyTorch may refuse; cast to {remedy}"
    return CaptureError("unsupported_operator", text)

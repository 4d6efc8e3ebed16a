"""Nodes that run in PyTorch because of their kind, before any translation is tried."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.fx

from gradd.dynamo import lower, sizes
from gradd.dynamo.complex_pairs import VIEWED
from gradd.dynamo.tracers import leaves
from gradd.graph.locations import location_of
from gradd.spec import CaptureError

Node = torch.fx.Node
_META = torch.device("meta")
_SETTINGS = ("set_autocast", "set_default_")
MAX_RANK = 8  # of a tensor in the daemon: GRADD_MAX_RANK


def nodes(graph: torch.fx.Graph, device: torch.device | None) -> dict[Node, Exception]:
    """Those of a graph of Dynamo, and why.

    Args:
        graph: The graph.
        device: Where the daemon computes; None = it does not matter.
    """
    found: dict[Node, Exception] = {}
    for node in graph.nodes:
        if node.meta.get(VIEWED):
            continue
        error = read(node) if sizes.is_read(node) else None
        error = _elsewhere(node, device) or _complex(node) or _rank(node) or _hooks(node) or error
        if error is not None:
            found[node] = error
            found |= dict.fromkeys(filter(_is_unknown, node.all_input_nodes), error)
    return found


class MistracedError(CaptureError):
    """A graph computes something else than its function, which runs as it is written then."""


def check_trace(graph: torch.fx.Graph) -> None:
    """Finds what Dynamo does not trace as Python runs it.

    Raises:
        MistracedError: The graph draws from Python's `random`: of a generator that the user made,
            Dynamo restores the state of the trace in each call, so each call draws the same
            numbers. Or (torch 2.11) it has lost a hook on a leaf that forward() makes.
    """
    if any(n.name.startswith("random_value") for n in graph.find_nodes(op="placeholder")):
        raise MistracedError(
            "python_random",
            "forward() draws from Python's random; draw with torch, or outside of forward()",
        )
    lost = next(filter(leaves.has_lost_hook, graph.nodes), None)
    if lost is not None:
        text = f"{location_of(lost)}: a tensor that forward() has made a leaf of has a hook"
        raise MistracedError("graph_break", text)


def check_settings(graph: torch.fx.Graph) -> None:
    """Settings count for the nodes that come later, which parts of a graph do not keep to.

    Raises:
        CaptureError: The graph changes one, as a call and not as a `with`.
    """
    for node in graph.nodes:
        name = str(getattr(node.target, "__name__", ""))
        if node.op == "call_function" and name.startswith(_SETTINGS):
            raise CaptureError(
                "unsupported_operator",
                f"{location_of(node)}: forward() calls {name}(), which changes what later "
                "operators compute; call it outside of forward(), or use a with statement",
            )


def _is_unknown(node: Node) -> bool:
    """Whether Dynamo has recorded no value: tolist() picks elements so, for item()."""
    return node.op.startswith("call_") and lower.value_of(node) is None


def check_numbers(given: sizes.Sizes, inputs: Iterable[Node], nodes: Iterable[Node]) -> None:
    """A piece reads no number that only PyTorch can find: it takes it out of some argument.

    Args:
        given: What a call gives.
        inputs: Numbers and tensors that the piece takes.
        nodes: Of the piece.

    Raises:
        UnknownNumberError: One is unknown; with `nodes`, an error for each node that reads one.
    """
    unknown = {name for n in inputs for name in given.missing(n)}
    if not unknown:
        return
    found: dict[Node, CaptureError] = {}
    for node in nodes:
        names = {name for n in node.all_input_nodes for name in given.missing(n)}
        if names:
            found[node] = sizes.UnknownNumberError(min(names), node)
    error = next(iter(found.values()), sizes.UnknownNumberError(min(unknown)))
    error.nodes = found  # type: ignore[attr-defined]
    raise error


def read(node: Node) -> CaptureError:
    """For a node that returns the value of a tensor as a number."""
    return CaptureError(
        "data_dependent_control_flow",
        f"{location_of(node)}: forward() needs the value of a tensor as a number; keep it a tensor",
    )


def _elsewhere(node: Node, device: torch.device | None) -> CaptureError | None:
    """Why a node cannot run in the daemon: it returns or reads tensors of another device.

    A number in a tensor of the CPU may be an operand of others, as in PyTorch.
    """
    own = [lower.value_of(node)]
    read_ = [x for x in map(lower.value_of, node.all_input_nodes) if getattr(x, "ndim", 0)]
    values = [x for x in (*own, *read_) if isinstance(x, torch.Tensor)]
    found = [x.device for x in values if x.device not in (device, _META)]
    if device is None or not found or node.op in ("placeholder", "output"):
        return None
    return CaptureError(
        "device",
        f"{location_of(node)}: {lower.readable_name(node)} has tensors on {found[0]}, and the "
        f"daemon computes on {device}",
    )


def _complex(node: Node) -> CaptureError | None:
    """Why a node cannot run in the daemon: it returns or reads complex numbers."""
    values = [lower.value_of(n) for n in (node, *node.all_input_nodes)]
    found = [x.dtype for x in values if isinstance(x, torch.Tensor) and x.is_complex()]
    if not found or node.op in ("placeholder", "output"):
        return None
    return CaptureError(
        "unsupported_operator",
        f"{location_of(node)}: {lower.readable_name(node)} computes with {found[0]}, which the "
        "daemon does not have",
    )


def _rank(node: Node) -> CaptureError | None:
    """Why a node cannot run in the daemon: it returns or reads tensors of too many axes."""
    values = [lower.value_of(n) for n in (node, *node.all_input_nodes)]
    rank = max((x.dim() for x in values if isinstance(x, torch.Tensor)), default=0)
    if rank <= MAX_RANK or node.op in ("placeholder", "output"):
        return None
    return CaptureError(
        "unsupported_operator",
        f"{location_of(node)}: {lower.readable_name(node)} has a tensor of rank {rank}, and those "
        f"of the daemon have at most {MAX_RANK}",
    )


def _hooks(node: Node) -> CaptureError | None:
    """Why a hook on a tensor, or a leaf that others read, is PyTorch's: between the results of a
    piece no gradient flows.
    """
    name = lower.name_of(node)
    if name not in ("register_hook", leaves.MARK):
        return None
    return CaptureError("unsupported_operator", f"{location_of(node)}: calls {name}")

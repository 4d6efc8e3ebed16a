"""Finds where in the user's modules each node of a captured graph comes from.

The exporter keeps the FX node of every node that it translates, and with it module and Python line.
Rewrites make nodes without one: such a node takes the place of its operands, or else of its
readers.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from gradd.graph import locations


def sources_of(graph: ir.Graph) -> tuple[tuple[str, str], ...]:
    """(node name, "module.path @ file:line") of every node that has a known neighbour."""
    known: dict[ir.Node, str] = {}
    for node in graph:
        text = locations.source_of(node) or _first(known, _producers(node))
        if text:
            known[node] = text
    for node in reversed(graph):
        if node not in known:
            text = _first(known, _readers(node))
            if text:
                known[node] = text
    return tuple((node.name, known[node]) for node in graph if node in known)


def _producers(node: ir.Node) -> list[Any]:
    return [v.producer() for v in node.inputs if v is not None]


def _readers(node: ir.Node) -> list[Any]:
    return [user for v in node.outputs for user, _ in v.uses()]


def _first(known: dict[ir.Node, str], nodes: list[Any]) -> str | None:
    return next((known[n] for n in nodes if n in known), None)

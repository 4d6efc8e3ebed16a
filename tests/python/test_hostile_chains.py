"""Models made of chains, on which matchers of patterns would walk for minutes."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Daemon
from hostile import F32, Balance, Raw, compile_graph
from hostile_models import N, graph, info

SHAPE = (1, 1, 2, 2)


def attention_above(chain: str, steps: int, reads: int) -> bytes:
    """Products with softmax of ever later values of a chain of one operator."""
    nodes = [N(*link) for link in _links(chain, steps)]
    last = "x"
    for i in range(reads):
        nodes.append(N("Softmax", [f"v{steps - i}"], [f"s{i}"]))
        nodes.append(N("MatMul", [f"s{i}", "x"], [f"m{i}"]))
        nodes.append(N("Add", [f"m{i}", last], [f"a{i}"]))
        last = f"a{i}"
    return graph(nodes, {"c": np.float32(0.5)}, [info("x", SHAPE)], [last]).SerializeToString()


def _links(op: str, steps: int) -> list[tuple]:
    names = ["x", *(f"v{i + 1}" for i in range(steps))]
    more = ["c"] if op in ("Mul", "Div") else []
    return [(op, [names[i], *more], [names[i + 1]]) for i in range(steps)]


@pytest.mark.parametrize("op", ["Mul", "Div"])
def test_attention_above_a_chain_of_factors(daemon: Daemon, op: str) -> None:
    """No pass walks to its end for each of them."""
    model = attention_above(op, 60_000, 25_000)
    with Raw(daemon.directory).open() as session:
        before = Balance(daemon.pid(), session).cpu_ms()
        reply = compile_graph(session, model, [[F32, list(SHAPE)]])
        assert reply["ok"], reply
        assert Balance(daemon.pid(), session).cpu_ms() - before < 10_000

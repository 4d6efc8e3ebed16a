"""Models made of chains, on which matchers of patterns would walk for minutes."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Daemon

from helpers.hostile.graphs import N, graph, info
from helpers.hostile.raw_client import F32, Balance, Raw, compile_graph

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
    compiles_in_time(daemon, attention_above(op, 60_000, 25_000), SHAPE)


def compiles_in_time(daemon: Daemon, model: bytes, shape: tuple[int, ...]) -> None:
    with Raw(daemon.directory).open() as session:
        before = Balance(daemon.pid(), session).cpu_ms()
        reply = compile_graph(session, model, [[F32, list(shape)]])
        assert reply["ok"], reply
        assert Balance(daemon.pid(), session).cpu_ms() - before < 10_000


def flat_attention(name: str, scores: str, v: str = "x") -> list:
    return [
        N("Softmax", [scores], [f"{name}p"]),
        N("MatMul", [f"{name}p", v], [f"{name}y"]),
    ]


def test_attention_above_a_chain_of_reshapes(daemon: Daemon) -> None:
    """From three dimensions to four and back: as deep as the list is long."""
    steps, nodes = 60_000, [N("MatMul", ["x", "x"], ["v0"])]
    for i in range(steps):
        nodes.append(N("Reshape", [f"v{i}", "flat" if i % 2 else "split"], [f"v{i + 1}"]))
    nodes += flat_attention("a", f"v{steps}")
    sizes = {"flat": np.array([6, 2, 2], np.int64), "split": np.array([2, 3, 2, 2], np.int64)}
    model = graph(nodes, sizes, [info("x", (6, 2, 2))], ["ay"]).SerializeToString()
    compiles_in_time(daemon, model, (6, 2, 2))


def test_attentions_that_split_their_batch_in_turns(daemon: Daemon) -> None:
    nodes, last = [], "x"
    for i in range(4_000):
        nodes.append(N("MatMul", ["x", last], [f"s{i}"]))
        if i % 2:
            nodes.append(N("Reshape", [f"s{i}", "split"], [f"r{i}"]))
            nodes.append(N("Softmax", [f"r{i}"], [f"w{i}"]))
            nodes.append(N("Reshape", [f"w{i}", "flat"], [f"{i}p"]))
            nodes.append(N("MatMul", [f"{i}p", "x"], [f"{i}y"]))
        else:
            nodes += flat_attention(str(i), f"s{i}")
        last = f"{i}y"
    sizes = {"flat": np.array([6, 2, 2], np.int64), "split": np.array([2, 3, 2, 2], np.int64)}
    model = graph(nodes, sizes, [info("x", (6, 2, 2))], [last]).SerializeToString()
    compiles_in_time(daemon, model, (6, 2, 2))


@pytest.mark.parametrize("form", ["chain", "row", "apart"])
def test_thousands_of_attentions_over_the_same_keys(daemon: Daemon, form: str) -> None:
    """Values made of the attention before cannot stand beside it."""
    nodes, last = [N("Transpose", ["x"], ["k"], perm=[0, 1, 3, 2])], "x"
    for i in range(5_000):
        scale = f"c{i}" if form == "apart" else "c"
        nodes.append(N("MatMul", ["x", "k"], [f"s{i}"]))
        nodes.append(N("Mul", [f"s{i}", scale], [f"t{i}"]))
        nodes.append(N("Mul", ["x" if form == "row" else last, f"c{i}"], [f"v{i}"]))
        nodes += flat_attention(str(i), f"t{i}", f"v{i}")
        nodes.append(N("Add", [f"{i}y", last], [f"a{i}"]))
        last = f"a{i}"
    sizes = {"c": np.float32(0.5)} | {f"c{i}": np.float32(i + 1) for i in range(5_000)}
    model = graph(nodes, sizes, [info("x", (1, 1, 2, 2))], [last]).SerializeToString()
    compiles_in_time(daemon, model, (1, 1, 2, 2))


def test_losses_above_a_chain_of_reshapes(daemon: Daemon) -> None:
    steps, losses, nodes = 60_000, 30_000, []
    for i in range(steps):
        last = f"v{i}" if i else "x"
        nodes.append(N("Reshape", [last, "flat" if i % 2 else "deep"], [f"v{i + 1}"]))
    for i in range(losses):
        ends = [f"v{steps}", "labels"]
        nodes.append(N("SoftmaxCrossEntropyLoss", ends, [f"l{i}"], ignore_index=-1 - i))
    nodes.append(N("Identity", ["l0"], ["y"]))
    known = {"flat": np.array([2, 3], np.int64), "deep": np.array([1, 2, 3], np.int64)}
    known["labels"] = np.array([0, 1], np.int64)
    model = graph(nodes, known, [info("x", (2, 3))], ["y"]).SerializeToString()
    compiles_in_time(daemon, model, (2, 3))

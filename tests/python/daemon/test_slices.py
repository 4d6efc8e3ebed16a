"""A long request makes way between two launches: others do not wait, and no bit changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from gradd.memory.shm import Segment
from helpers.hostile.raw_client import F32, Raw, many, put, tensor, types
from helpers.waiting import until

SIDE = 512  # of matrices, of which a product takes some milliseconds
BYTES = 4 * SIDE * SIDE


def products(n: int) -> bytes:
    """y = x w w ... w."""
    nodes = [
        helper.make_node("MatMul", [f"p{i}" if i else "x", "w"], [f"p{i + 1}"]) for i in range(n)
    ]
    square = [SIDE, SIDE]
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, square) for name in ("x", "w")],
        [helper.make_tensor_value_info(f"p{n}", TensorProto.FLOAT, square)],
    )
    opset = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()


class Long(Raw):
    """A session whose forward is many products."""

    def prepare_products(self, n: int) -> Long:
        """Its segment, graph and plan."""
        self.attach()
        self.segment = Segment(1, 4 * BYTES)
        reply = self.control({"v": "segment", "id": 1, "bytes": 4 * BYTES}, [self.segment.fd])
        assert reply["ok"], f"a good segment was refused: {reply}"
        random = np.random.default_rng(0)
        for at in (0, BYTES):
            self.at(at, (SIDE, SIDE))[:] = random.standard_normal((SIDE, SIDE)) / SIDE**0.5
        square = [F32, [SIDE, SIDE]]
        planned = self.call({
            "v": "graph.plan", "graph": put(self, products(n))["graph"], "plan": 1,
            "in": types(square, square), "out": [0], "grad": [], "bound": [], "gmask": [],
        })  # fmt: skip
        assert planned["ok"], f"a good plan was refused: {planned}"
        return self

    def begin(self) -> None:
        """Sends its forward."""
        self.q += 1
        places = [tensor(at * BYTES, (SIDE, SIDE)) for at in range(3)]
        self.send({
            "v": "forward", "q": self.q, "t": self.token, "plan": 1, "run": 1, "seed": 0,
            "flags": 0, "in": many(*places[:2]), "out": many(places[2]),
        })  # fmt: skip

    def result(self) -> bytes:
        """Waits for its reply: the bytes of the product."""
        reply = self.receive()
        assert reply["ok"], f"a good forward failed: {reply}"
        got = self.at(2 * BYTES, (SIDE, SIDE)).tobytes()
        self.at(2 * BYTES, (SIDE, SIDE))[:] = 0
        return got


def _runs(daemon: object, s: Raw) -> bool:
    return any(
        other["state"] == "running" for other in daemon.ps()["sessions"]
    ) and not s.dealer.poll(0)


def test_a_short_request_does_not_wait_for_a_long_one(daemon: object) -> None:
    path = daemon.directory
    with Long(path).prepare_products(120) as long, Raw(path).open() as short:
        expected = short.step()
        long.begin()
        alone = long.result()
        long.begin()
        until(lambda: _runs(daemon, long), "the long request runs")
        for _ in range(5):
            assert short.step() == expected
        assert not long.dealer.poll(0), "the short requests waited for the long one"
        assert long.result() == alone


def test_two_long_requests_go_on_in_turn(daemon: object) -> None:
    path = daemon.directory
    with Long(path).prepare_products(40) as one, Long(path).prepare_products(40) as other:
        one.begin()
        alone = one.result()
        for _ in range(2):
            one.begin()
            other.begin()
            assert one.result() == other.result() == alone


@pytest.mark.parametrize("shared", [False, True])
def test_what_a_dead_client_has_begun_ends(daemon: object, shared: bool) -> None:
    """Minutes of work, whether it runs or was put aside."""
    path = daemon.directory
    with Raw(path).open() as short:
        expected = short.step()
        with Long(path).prepare_products(20000) as long:
            long.begin()
            until(lambda: _runs(daemon, long), "the long request runs")
            for _ in range(5 * shared):
                assert short.step() == expected
        until(lambda: len(daemon.ps()["sessions"]) == 1, "its session ends")
        assert short.step() == expected


_KILLED = """
import os, sys, time
from pathlib import Path
from test_slices import Long
long = Long(Path(sys.argv[1])).prepare_products(20000)
long.begin()
child = os.fork()  # it holds the sockets, as a worker of a DataLoader does
if child:
    print(child, flush=True)
time.sleep(600)
"""


def test_what_a_killed_client_has_begun_ends(daemon: object) -> None:
    """Also if a process that it has forked lives on."""
    path = daemon.directory
    with Raw(path).open() as short:
        expected = short.step()
        command = [sys.executable, "-c", _KILLED, str(path)]
        here = str(Path(__file__).parent)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *sys.path])}
        client = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
        child = int(client.stdout.readline())
        try:
            until(lambda: _runs(daemon, short), "the long request runs")
            client.kill()
            client.wait()
            until(lambda: len(daemon.ps()["sessions"]) == 1, "its session ends")
            assert short.step() == expected
        finally:
            client.kill()
            os.kill(child, signal.SIGKILL)


def sums(n: int) -> bytes:
    """y = x + x + ... + x, a graph that takes a while to plan."""
    nodes = [helper.make_node("Add", [f"s{i}" if i else "x", "x"], [f"s{i + 1}"]) for i in range(n)]
    graph = helper.make_graph(
        nodes,
        "sums",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info(f"s{n}", TensorProto.FLOAT, [4])],
    )
    opset = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()


def _ask_for_plan(s: Raw, graph: bytes, number: int) -> None:
    s.q += 1
    s.send({
        "v": "graph.plan", "q": s.q, "t": s.token, "graph": graph, "plan": number,
        "in": types([F32, [4]]), "out": [0], "grad": [0], "bound": [], "gmask": [0],
    })  # fmt: skip


def test_a_plan_that_is_being_made_holds_no_other_session(daemon: object) -> None:
    """Two sessions ask for one plan and get it; a third one's requests come first."""
    path = daemon.directory
    with Raw(path).open() as short, Raw(path).attach() as one, Raw(path).attach() as other:
        expected = short.step()
        onnx = sums(20000)
        graph = put(one, onnx)["graph"]
        assert put(other, onnx)["graph"] == graph
        _ask_for_plan(one, graph, 1)
        _ask_for_plan(other, graph, 2)
        assert short.step() == expected
        assert not one.dealer.poll(0), "a short request waited for a plan"
        for s in (one, other):
            planned = s.receive()
            assert planned["ok"], f"a good plan was refused: {planned}"
        assert daemon.ps()["counters"]["compiled"] == 2  # with that of `short`


def test_a_plan_of_a_dead_client_is_forgotten(daemon: object) -> None:
    path = daemon.directory
    with Raw(path).open() as short:
        expected = short.step()
        with Raw(path).attach() as gone:
            _ask_for_plan(gone, put(gone, sums(20000))["graph"], 1)
        until(lambda: len(daemon.ps()["sessions"]) == 1, "its session ends")
        assert short.step() == expected
        with Raw(path).attach() as s:
            _ask_for_plan(s, put(s, sums(300))["graph"], 1)
            assert s.receive()["ok"]


def test_a_plan_that_cannot_be_made_says_why(daemon: object) -> None:
    with Raw(daemon.directory).attach() as s:
        graph = put(s, sums(3))["graph"]
        refused = s.call({
            "v": "graph.plan", "graph": graph, "plan": 1, "in": types([F32, [5]]), "out": [0],
            "grad": [], "bound": [], "gmask": [],
        })  # fmt: skip
        assert not refused["ok"]
        assert "'x'" in refused["what"] and "5" in refused["what"]
        assert refused["session"] == "alive"

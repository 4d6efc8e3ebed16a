"""A client that may say anything, and the proof that saying it changed nothing.

`Raw` speaks the protocol without the adapter's care: every field of every message can be wrong, of
another type, or missing. `good(verb)` gives a request that works; rows of the tables change one
thing in it. `Neighbour` is an honest session next to it: its step must give the same bits whatever
the other one does. `Balance` compares what the daemon holds before and after.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq
from onnx import TensorProto, helper

from gradd.memory.shm import Segment
from gradd.session import control

F32, U8, I64, F64, BF16 = 1, 2, 7, 11, 16
DROP = object()  # as the value of a field: leave it out
WAIT_MS = 20000

# Where things lie in segment 1 (offset); see `model`.
X, IDS, W, Y, LOSS, GO, GX, GW, M, V = (i * 1024 for i in range(10))
JOURNAL = 64 << 10
JOURNAL_BYTES = 4096 + 3 * 4 * (128 << 10)
SEGMENT = 2 << 20
ROWS, TABLE = 2, 10
GROUPS = {
    "lr": [1e-2], "beta1": [0.9], "beta2": [0.999], "eps": [1e-8], "weight_decay": [0.0],
    "mode": [1], "bias_correction": [True], "t": [1],
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One bad input.

    Attributes:
        name: The mistake, distinct over all tables.
        code: The code of the answer.
        parts: Texts that the message must contain: names, the expected value, the one that came.
        send: Sends it to a session and returns the answer.
        session: What the answer says about the session.
        cpu_ms: Processor time that the daemon may spend on it.
    """

    name: str
    code: str
    parts: tuple[str, ...]
    send: Callable[[Raw], dict[str, Any]] = field(compare=False)
    session: str | None = "alive"
    cpu_ms: int = 200


def tensor(offset: int, dims: Sequence[int], dtype: int = F32, segment: int = 1) -> list:
    """A tensor, as `single` and `many` take it."""
    return [segment, offset, dtype, list(dims)]


def single(one: list) -> dict[str, Any]:
    """A field that is one tensor."""
    return dict(zip(("segment", "offset", "dtype", "dims"), one, strict=True))


def many(*listed: list, at: list | None = None) -> dict[str, Any]:
    """A field that is a list of tensors."""
    names = ("segments", "offsets", "dtypes", "dims")
    table: dict[str, Any] = {name: [one[k] for one in listed] for k, name in enumerate(names)}
    return table if at is None else {**table, "at": at}


def types(*listed: list) -> dict[str, Any]:
    """A field that is a list of types, each [dtype, dims]."""
    return {"dtypes": [dtype for dtype, _ in listed], "dims": [dims for _, dims in listed]}


def model() -> bytes:
    """y = x * w[ids], loss = sum(y)."""
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["w", "ids"], ["e"], name="lookup"),
            helper.make_node("Mul", ["x", "e"], ["y"], name="scale"),
            helper.make_node("ReduceSum", ["y"], ["loss"], name="total", keepdims=0),
        ],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4]),
            helper.make_tensor_value_info("ids", TensorProto.INT64, ["N"]),
            helper.make_tensor_value_info("w", TensorProto.FLOAT, [TABLE, 4]),
        ],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("loss", TensorProto.FLOAT, None),
        ],
    )
    opset = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()


class Raw:
    """One connection: control socket and DEALER, nothing checked on this side."""

    def __init__(self, path: Path, greet: bool = True) -> None:
        self.path = path
        self.ctl = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ctl.settimeout(WAIT_MS / 1000)
        self.ctl.connect(str(path / "ctl.sock"))
        self.dealer = control._zmq_context().socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.LINGER, 0)
        self.dealer.connect(f"ipc://{path}/cmd.sock")
        self.q = 0
        self.said: Any = None  # the last message
        self.token: bytes | None = None
        self.nonce = b""
        self.graph = b""
        self.segment: Segment | None = None
        self.fresh = itertools.count(1000)  # ids that were never used
        if greet:
            self.nonce = self.control({"v": "hello", "proto": [2, 2]})["nonce"]

    def close(self) -> None:
        """Hangs up."""
        self.dealer.close(linger=0)
        self.ctl.close()
        if self.segment is not None:
            self.segment.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- talking ----

    def control(self, fields: Any, fds: Sequence[int] = ()) -> dict[str, Any]:
        """One packet on the control socket; `fields` may be bytes."""
        packet = fields if isinstance(fields, bytes) else msgpack.packb(fields)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        self.ctl.sendmsg([packet], ancillary)
        reply = self.ctl.recv(65536)
        return msgpack.unpackb(reply) if reply else {"ok": 0, "code": "HUNG UP", "what": ""}

    def send(self, envelope: Any, frames: Sequence[bytes] = ()) -> None:
        """One message as it is; `envelope` may be bytes."""
        self.said = envelope
        packed = envelope if isinstance(envelope, bytes) else msgpack.packb(envelope)
        self.dealer.send_multipart([packed, *frames])

    def receive(self) -> dict[str, Any]:
        """The next reply."""
        assert self.dealer.poll(WAIT_MS), (
            f"no reply in {WAIT_MS / 1000:.0f} s to {repr(self.said)[:200]}: the daemon has died, "
            f"hangs, or has dropped it; its log and `gradd ps --dir {self.path}` tell which"
        )
        return msgpack.unpackb(self.dealer.recv_multipart()[0])

    def call(self, envelope: Any, frames: Sequence[bytes] = ()) -> dict[str, Any]:
        """One request; adds number and token where the row did not."""
        if isinstance(envelope, dict):
            self.q += 1
            envelope = {"q": self.q, "t": self.token, **envelope}
            envelope = {k: v for k, v in envelope.items() if v is not DROP}
        self.send(envelope, frames)
        return self.receive()

    def ask(self, verb: str, frames: Sequence[bytes] = (), **changes: Any) -> dict[str, Any]:
        """A good request of this verb with some fields changed."""
        return self.call({"v": verb, **self.good(verb), **changes}, frames)

    # ---- a session with everything in it ----

    def attach(self) -> Raw:
        """Attaches."""
        self.token = self.call({"v": "attach", "nonce": self.nonce, "t": DROP})["t"]
        return self

    def share(self) -> Raw:
        """Gives segment 1 with good values in it."""
        self.segment = Segment(1, SEGMENT)
        reply = self.control({"v": "segment", "id": 1, "bytes": SEGMENT}, [self.segment.fd])
        assert reply["ok"], f"a good segment was refused: {reply}"
        self.fill()
        return self

    def fill(self, seed: int = 0) -> None:
        """Good values everywhere."""
        random = np.random.default_rng(seed)
        self.at(X, (ROWS, 4))[:] = random.standard_normal((ROWS, 4))
        self.at(W, (TABLE, 4))[:] = random.standard_normal((TABLE, 4))
        self.at(IDS, (ROWS,), np.int64)[:] = [1, TABLE - 1]
        self.at(GO, ())[...] = 1
        for offset in (Y, GX, GW, M, V):
            self.at(offset, (TABLE, 4))[:] = 0
        self.at(JOURNAL, (JOURNAL_BYTES,), np.uint8)[:] = 0

    def at(self, offset: int, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """A range of segment 1."""
        assert self.segment is not None
        count = int(np.prod(shape))
        return np.frombuffer(self.segment.view, dtype, count, offset).reshape(shape)

    def prepare(self) -> Raw:
        """Graph, plan 1, binding 1 (parameters), 2 (gradients), 3 and 4 (moments)."""
        reply = self.call({"v": "graph.put"}, [model()])
        self.graph = reply["graph"]
        for verb, changes in (
            ("graph.plan", {}),
            ("bind", {}),
            ("bind", {"bind": 2, "tensors": many(tensor(GW, (TABLE, 4)))}),
            ("bind", {"bind": 3, "tensors": many(tensor(M, (TABLE, 4)))}),
            ("bind", {"bind": 4, "tensors": many(tensor(V, (TABLE, 4)))}),
        ):
            reply = self.ask(verb, **changes)
            assert reply["ok"], f"a good {verb} was refused: {reply}"
        return self

    def good(self, verb: str) -> dict[str, Any]:
        """Fields of a request that succeeds."""
        x = tensor(X, (ROWS, 4))
        return {
            "attach": {"nonce": self.nonce, "t": DROP},
            "graph.put": {},
            "graph.plan": {
                "graph": self.graph, "plan": 1, "bound": ["w"], "grad": ["w", "x"], "out": [0, 1],
                "in": types([F32, [ROWS, 4]], [I64, [ROWS]], [F32, [TABLE, 4]]), "gmask": [1],
            },
            "bind": {"bind": 1, "tensors": many(tensor(W, (TABLE, 4)))},
            "forward": {
                "plan": 1, "run": 1, "seed": 3, "flags": 0, "b": 1,
                "in": many(x, tensor(IDS, (ROWS,), I64)),
                "out": many(tensor(Y, (ROWS, 4)), tensor(LOSS, ())),
            },
            "backward": {
                "run": 1, "go": many(tensor(GO, ()), at=[1]), "b": 2,
        "g": many(tensor(GX, (ROWS, 4))),
                "keep": False,
            },
            "release": {"runs": [1]},
            "unbind": {"bind": 99},
            "plan.drop": {"plan": 99},
            "plan.estimate": {"plan": 1, "optimizer": "sgd", "accumulate": 0, "held": 1 << 20},
            "explain": {"proto": 2, "t": DROP},
            "step": {
                "step": 0, "journal": single(tensor(JOURNAL, (JOURNAL_BYTES,), U8)),
        "groups": GROUPS,
                "group": [0], "bp": 1, "bm": 3, "bv": 4, "g": many(tensor(GW, (TABLE, 4))),
            },
            "ps": {"t": DROP}, "trace": {"t": DROP}, "stop": {"t": DROP}, "detach": {},
        }[verb]  # fmt: skip

    def open(self) -> Raw:
        """All of the above."""
        return self.share().attach().prepare()

    def step(self) -> bytes:
        """Forward and backward; the bytes of everything that came out."""
        for verb in ("forward", "backward"):
            reply = self.ask(verb)
            assert reply["ok"], f"the {verb} of an honest session was refused: {reply}"
        shapes = ((Y, (ROWS, 4)), (LOSS, ()), (GX, (ROWS, 4)), (GW, (TABLE, 4)))
        return b"".join(self.at(offset, shape).tobytes() for offset, shape in shapes)


# ---- graphs ----


def put(s: Raw, onnx: Any) -> dict[str, Any]:
    """graph.put of a model or of bytes."""
    data = onnx if isinstance(onnx, bytes) else onnx.SerializeToString()
    return s.call({"v": "graph.put"}, [data])


def compile_graph(s: Raw, onnx: Any, inputs: Sequence[list], **changes: Any) -> dict[str, Any]:
    """graph.put, then graph.plan for these input types; the first answer that is not ok."""
    reply = put(s, onnx)
    if not reply["ok"]:
        return reply
    fields = {
        "graph": reply["graph"], "plan": next(s.fresh), "in": types(*inputs), "out": [0],
        "grad": [], "bound": [], "gmask": [],
    }  # fmt: skip
    planned = s.call({"v": "graph.plan", **fields, **changes})
    if planned["ok"]:
        s.call({"v": "plan.drop", "plan": fields["plan"]})
    return planned


# ---- the proof ----


class Balance:
    """What the daemon holds for a session, and the descriptors of its two processes."""

    KEYS = ("plans", "bindings", "runs", "segments", "segment_bytes", "arena_bytes", "waiting")

    def __init__(self, pid: int, watch: Raw) -> None:
        self.pids, self.watch = (pid, watch.call({"v": "ps", "t": DROP})["worker"]), watch

    def read(self) -> tuple[Any, ...]:
        """One reading."""
        sessions = self.watch.call({"v": "ps", "t": DROP})["sessions"]
        rows = tuple(tuple(s[k] for k in ("session", *self.KEYS)) for s in sessions)
        return (rows, sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self.pids))

    def cpu_ms(self) -> float:
        """Processor time that the daemon has spent."""
        ticks = 0
        for pid in self.pids:
            with open(f"/proc/{pid}/stat") as stat:
                fields = stat.read().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks * 1000 / os.sysconf("SC_CLK_TCK")

    def settled(self, expected: tuple[Any, ...], seconds: float = 20.0) -> tuple[Any, ...]:
        """The reading, once it is the expected one or the time is over."""
        deadline = time.monotonic() + seconds
        while (now := self.read()) != expected and time.monotonic() < deadline:
            time.sleep(0.01)
        return now

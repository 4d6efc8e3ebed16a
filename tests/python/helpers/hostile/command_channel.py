"""Bad inputs on the command channel: envelopes, fields, tokens, sequence numbers, tensors.

Each row changes one thing in a request that works otherwise; see raw_client.py. Descriptors and the
control socket are in control_socket.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack

from helpers.hostile.raw_client import (
    DROP,
    F32,
    F64,
    I64,
    ROWS,
    SEGMENT,
    TABLE,
    U8,
    Raw,
    Row,
    V,
    single,
    tensor,
    types,
)

BIG = 1 << 63


def ask(name: str, code: str, parts: str, verb: str, **changes: Any) -> Row:
    """A row that changes fields of a good request; the parts are separated by |."""
    return Row(name, code, tuple(parts.split("|")), lambda s: s.ask(verb, **changes))


def explain(name: str, code: str, parts: str, **changes: Any) -> Row:
    """The same for the verb that needs no session."""
    row = ask(f"explain: {name}", code, parts, "explain", **changes)
    return dataclasses.replace(row, session=None)


def raw(name: str, code: str, parts: str, envelope: Any, **more: Any) -> Row:
    """A row that sends an envelope as it is, bytes or made by a function of the session."""

    def send(s: Raw) -> dict[str, Any]:
        made = envelope(s) if callable(envelope) else envelope
        return s.call(made)

    return Row(name, code, tuple(parts.split("|")), send, **more)


# ---- envelopes: no session is known yet when they are refused ----

DEEP = b"\x91" * 9
ENVELOPES = [
    raw("envelope: empty", "LIMIT", "ends before", b"", session=None),
    raw("envelope: a number", "LIMIT", "not a map", b"\x07", session=None),
    raw("envelope: a list", "LIMIT", "not a map", b"\x90", session=None),
    raw("envelope: two objects", "LIMIT", "1 bytes after", b"\x80\x80", session=None),
    raw("envelope: text cut short", "LIMIT", "claims 5 bytes|1 are left", b"\x81\xa5v",
        session=None),
    raw("envelope: number cut short", "LIMIT", "claims 8 bytes of data where 1 are left",
        b"\x81\xa1v\xcf\0", session=None),
    raw("envelope: list of 2^32", "LIMIT", "claims|entries", b"\x81\xa1v\xdd\xff\xff\xff\xff",
        session=None),
    raw("envelope: map of 2^32", "LIMIT", "claims|entries", b"\xdf\xff\xff\xff\xff", session=None),
    raw("envelope: bytes of 2^32", "LIMIT", "claims 4294967295 bytes",
        b"\x81\xa1v\xc6\xff\xff\xff\xff", session=None),
    raw("envelope: nine levels", "LIMIT", "deeper than 8", b"\x81\xa1v" + DEEP, session=None),
    raw("envelope: 100000 levels", "LIMIT", "deeper than 8", b"\x91" * 100000, session=None),
    raw("envelope: an extension type", "LIMIT", "kind 0xd4|does not use", b"\x81\xa1v\xd4\x01\x01",
        session=None),
    raw("envelope: the unused byte", "LIMIT", "kind 0xc1", b"\x81\xa1v\xc1", session=None),
    raw("envelope: 300000 values", "LIMIT", "more than 262144 values",
        msgpack.packb({"v": [0] * 300000}), session=None),
    raw("envelope: 1 MiB and a byte", "LIMIT", "has 1048577 bytes, more than 1048576",
        b"\0" * ((1 << 20) + 1), session=None),
    raw("envelope: 25 fields", "LIMIT", "25 fields, more than 24",
        msgpack.packb({f"k{i}": 0 for i in range(25)}), session=None),
    raw("envelope: a key that is a number", "LIMIT", "not named by a text", b"\x81\x01\x01",
        session=None),
    raw("envelope: a key of 33 bytes", "LIMIT", "at most 32 bytes", msgpack.packb({"k" * 33: 1}),
        session=None),
    raw("envelope: a key twice", "LIMIT", "field 'q' comes twice", b"\x82\xa1q\x01\xa1q\x02",
        session=None),
    raw("envelope: no verb", "TENSOR", "field 'v' is missing|a text", {"v": DROP}, session=None),
    raw("envelope: verb is a number", "TENSOR", "field 'v'|a text|an unsigned integer", {"v": 5},
        session=None),
    raw("envelope: verb is bytes", "TENSOR", "field 'v'|a text|got bytes", {"v": b"ps"},
        session=None),
    raw("envelope: unknown verb", "UNSUPPORTED", "unknown verb 'format.disk'", {"v": "format.disk"},
        session=None),
    raw("envelope: verb of 33 bytes", "LIMIT", "field 'v'|33 bytes, more than 32", {"v": "v" * 33},
        session=None),
    raw("envelope: empty verb", "UNSUPPORTED", "unknown verb ''", {"v": ""}, session=None),
    raw("envelope: a prefix of a verb", "UNSUPPORTED", "unknown verb 'forw'", {"v": "forw"},
        session=None),
    raw("envelope: no number", "TENSOR", "field 'q' is missing", {"v": "ps", "q": DROP},
        session=None),
    raw("envelope: number is a text", "TENSOR", "field 'q'|got a text", {"v": "ps", "q": "1"},
        session=None),
    raw("envelope: number below zero", "TENSOR", "field 'q'|a negative integer",
        {"v": "ps", "q": -1}, session=None),
    raw("envelope: number is a float", "TENSOR", "field 'q'|got a float", {"v": "ps", "q": 1.0},
        session=None),
]  # fmt: skip

# ---- sender and order of requests ----


def with_number(offset: int) -> Any:
    """A request whose number is this far from the last one."""
    return lambda s: {"v": "release", "runs": [], "q": s.q + offset}


def after_gap(s: Raw) -> dict[str, Any]:
    """A gap is allowed; what lies inside it is then too late."""
    s.q += 10
    assert s.call({"v": "release", "runs": []})["ok"]
    return s.call({"v": "release", "runs": [], "q": s.q - 5})


def attached_again(s: Raw) -> dict[str, Any]:
    """A second session over the same DEALER."""
    with Raw(s.path) as other:
        return s.ask("attach", nonce=other.nonce)


def other_token(s: Raw) -> dict[str, Any]:
    """The token of another open session of the same user."""
    with Raw(s.path) as other:
        other.attach()
        return s.call({"v": "release", "runs": [], "t": other.token})


LOST = "lost"
SESSIONS = [
    raw("token: missing", "SESSION", "unknown or foreign session",
        {"v": "release", "runs": [], "t": DROP}, session=LOST),
    raw("token: nil", "SESSION", "unknown or foreign", {"v": "release", "runs": [], "t": None},
        session=LOST),
    raw("token: empty", "SESSION", "unknown or foreign", {"v": "release", "runs": [], "t": b""},
        session=LOST),
    raw("token: zeros", "SESSION", "unknown or foreign",
        {"v": "release", "runs": [], "t": bytes(16)}, session=LOST),
    raw("token: one bit wrong", "SESSION", "unknown or foreign",
        lambda s: {"v": "release", "runs": [], "t": bytes([s.token[0] ^ 1]) + s.token[1:]},
        session=LOST),
    raw("token: a byte short", "SESSION", "unknown or foreign",
        lambda s: {"v": "release", "runs": [], "t": s.token[:15]}, session=LOST),
    raw("token: a byte long", "LIMIT", "field 't'|17 bytes, more than 16",
        lambda s: {"v": "release", "runs": [], "t": s.token + b"x"}, session=None),
    raw("token: a text", "TENSOR", "field 't'|expected bytes, got a text",
        {"v": "release", "runs": [], "t": "0123456789abcdef"}, session=None),
    Row("token: of another session", "SESSION", ("unknown or foreign",), other_token, LOST),
    raw("attach: the nonce was used", "SESSION", "the nonce is unknown, used or of another user",
        lambda s: {"v": "attach", "nonce": s.nonce, "t": DROP}, session=LOST),
    raw("attach: zeros", "SESSION", "the nonce is unknown",
        {"v": "attach", "nonce": bytes(16), "t": DROP}, session=LOST),
    raw("attach: empty nonce", "SESSION", "the nonce is unknown",
        {"v": "attach", "nonce": b"", "t": DROP}, session=LOST),
    raw("attach: nonce of 17 bytes", "LIMIT", "field 'nonce'|17 bytes",
        {"v": "attach", "nonce": bytes(17), "t": DROP}, session=None),
    raw("attach: no nonce", "TENSOR", "field 'nonce' is missing|bytes", {"v": "attach", "t": DROP},
        session=None),
    raw("attach: nonce is a number", "TENSOR", "field 'nonce'|expected bytes",
        {"v": "attach", "nonce": 7, "t": DROP}, session=None),
    Row("attach: the connection serves a session", "SESSION", ("serves session",), attached_again,
        LOST),
    raw("order: an old number", "SESSION", "comes after request", with_number(-3)),
    raw("order: number zero", "SESSION", "request 0 comes after request",
        {"v": "release", "runs": [], "q": 0}),
    Row("order: inside a gap", "SESSION", ("comes after request",), after_gap),
]  # fmt: skip

# ---- graph.put ----


def put(*frames: bytes, **fields: Any) -> Any:
    """graph.put with these payload frames."""
    return lambda s: s.call({"v": "graph.put", **fields}, frames)


def after_good_graph(second: bytes) -> Any:
    """graph.put of a good graph with this second frame."""
    from helpers.hostile.raw_client import model

    return lambda s: s.call({"v": "graph.put"}, [model(), second])


def sourced(**fields: Any) -> bytes:
    """A table of sources."""
    return msgpack.packb(fields)


def shared(name: str, code: str, parts: str, onnx: Any) -> Row:
    onnx = single(onnx) if isinstance(onnx, list) else onnx
    return raw(f"graph.put: {name}", code, parts, {"v": "graph.put", "onnx": onnx})


PUTS = [
    raw("graph.put: no bytes", "MODEL", "no ONNX bytes: neither frame 1 nor field 'onnx'",
        {"v": "graph.put"}),
    Row("graph.put: an empty frame", "MODEL", ("the model is empty",), put(b"")),
    Row("graph.put: three frames", "LIMIT", ("3 payload frames, expected at most 2",),
        put(b"", b"", b"")),
    Row("graph.put: alias is a text", "TENSOR", ("field 'alias'", "a list", "a text"),
        put(b"x", alias="w")),
    Row("graph.put: alias of texts", "TENSOR", ("field 'alias[0]'", "a list", "a text"),
        put(b"x", alias=["w"])),
    Row("graph.put: alias of numbers", "TENSOR", ("field 'alias[1][0]'", "expected a name"),
        put(b"x", alias=[[], [7]])),
    Row("graph.put: alias with a zero byte", "TENSOR", ("field 'alias[0][1]'", "a name"),
        put(b"x", alias=[["a", "b\0c"]])),
    Row("graph.put: 4097 alias groups", "LIMIT", ("'alias' has 4097 entries, more than 4096",),
        put(b"x", alias=[[]] * 4097)),
    Row("graph.put: sources are no msgpack", "LIMIT", ("frame 2", "kind 0xc1"),
        after_good_graph(b"\xc1")),
    Row("graph.put: sources by node", "UNSUPPORTED", ("unknown field 'frame 2.a'",),
        after_good_graph(msgpack.packb({"a": "b"}))),
    Row("graph.put: a source without text", "TENSOR", ("graph.put: field 'frame 2.sources[0]'",
        "a text", "an unsigned integer"), after_good_graph(sourced(nodes=["a"], sources=[7]))),
    Row("graph.put: sources as in protocol 1", "TENSOR", ("graph.put: field 'frame 2'", "a map"),
        after_good_graph(msgpack.packb([["a", "b"]]))),
    Row("graph.put: a source too many", "TENSOR", ("'frame 2': 1 nodes, but 2 sources",),
        after_good_graph(sourced(nodes=["a"], sources=["b", "c"]))),
    Row("graph.put: sources of nothing", "TENSOR", ("'frame 2.nodes' is missing",),
        after_good_graph(sourced(sources=["b"]))),
    Row("graph.put: lines of sources", "UNSUPPORTED",
        ("unknown field 'frame 2.lines' (known: nodes, sources)",),
        after_good_graph(sourced(nodes=[], sources=[], lines=[]))),
    Row("graph.put: sources of 5 MiB", "LIMIT", ("source table of", "more than 4194304"),
        after_good_graph(sourced(nodes=["a"], sources=["b" * (5 << 20)]))),
    shared("onnx is bytes", "TENSOR", "field 'onnx'|a map, got bytes", b"abc"),
    shared("onnx of floats", "MODEL", "onnx: expected u8", tensor(0, (4,))),
    shared("onnx in an unknown segment", "SHM", "onnx|unknown segment 77", tensor(0, (4,), U8, 77)),
    shared("onnx past the segment", "TENSOR", "onnx|which has 2097152 bytes",
           tensor(0, (SEGMENT + 1,), U8)),
    shared("onnx of 4 GiB", "MODEL", "onnx: expected u8 of at most 2147483648", tensor(0,
        (1 << 32,), U8)),
    shared("onnx of no bytes", "MODEL", "the model is empty", tensor(0, (0,), U8)),
    shared("onnx that is not ONNX", "MODEL", "at the start of the model", tensor(V, (64,), U8)),
]  # fmt: skip

# ---- graph.plan ----

TYPES = [[F32, [ROWS, 4]], [I64, [ROWS]], [F32, [TABLE, 4]]]


def plan(name: str, code: str, parts: str, **changes: Any) -> Row:
    return ask(f"graph.plan: {name}", code, parts, "graph.plan",
               **{"plan": 50, **changes})  # fmt: skip


PLANS = [
    plan("a graph that was not put", "STALE", "has not put that graph", graph=bytes(32)),
    plan("a graph id of 31 bytes", "STALE", "has not put that graph", graph=bytes(31)),
    plan("a graph id as text", "TENSOR", "field 'graph'|bytes|a text", graph="0" * 32),
    plan("no graph", "TENSOR", "field 'graph' is missing", graph=DROP),
    plan("no id", "TENSOR", "field 'plan' is missing", plan=DROP),
    plan("an id below zero", "TENSOR", "field 'plan'|a negative integer", plan=-1),
    plan("no inputs", "TENSOR", "field 'in' is missing", **{"in": DROP}),
    plan("too few inputs", "TENSOR", "the graph has 3 inputs, got 2", **{"in": types(*TYPES[:2])}),
    plan("too many inputs", "TENSOR", "the graph has 3 inputs, got 4", **{"in": types(*TYPES,
        TYPES[0])}),
    plan("inputs as in protocol 1", "TENSOR", "field 'in'|a map, got a list", **{"in": TYPES}),
    plan("an input that is a number", "TENSOR", "field 'in.dims[1]'|sizes|unsigned",
         **{"in": types(TYPES[0], [I64, 7], TYPES[2])}),
    plan("inputs without sizes", "TENSOR", "field 'in.dims' is missing",
         **{"in": {"dtypes": [F32, I64, F32]}}),
    plan("inputs with names", "UNSUPPORTED", "unknown field 'in.names' (known: dtypes, dims)",
         **{"in": {**types(*TYPES), "names": ["x", "ids", "w"]}}),
    plan("an input of rank 9", "TENSOR", "field 'in.dims[0]'|sizes", **{"in": types([F32, [1] * 9],
        *TYPES[1:])}),
    plan("a dimension below zero", "TENSOR", "field 'in.dims[0]'|sizes",
        **{"in": types([F32, [-2, 4]],
        *TYPES[1:])}),
    plan("a dimension of 2^63", "TENSOR", "field 'in.dims[0]'|sizes",
        **{"in": types([F32, [BIG, 4]],
        *TYPES[1:])}),
    plan("sizes that overflow", "LIMIT", "input 'x'|overflows 64 bits at dimension 1",
         **{"in": types([F32, [1 << 40, 1 << 40]], *TYPES[1:])}),
    plan("an unknown element type", "UNSUPPORTED", "input 'x'|element type 99",
        **{"in": types([99, [2,
        4]], *TYPES[1:])}),
    plan("an element type of 2^40", "UNSUPPORTED", "input 'x'|element type",
        **{"in": types([1 << 40,
        [2, 4]], *TYPES[1:])}),
    plan("text elements", "UNSUPPORTED", "input 'x'|element type 8", **{"in": types([8, [2, 4]],
        *TYPES[1:])}),
    plan("another element type", "TENSOR", "input 'x'|declares element type f32|f64",
         **{"in": types([F64, [ROWS, 4]], *TYPES[1:])}),
    plan("another rank", "TENSOR", "input 'ids'|declares rank 1", **{"in": types(TYPES[0], [I64, [1,
        2]], TYPES[2])}),
    plan("another dimension", "TENSOR", "input 'w'|declares dimension 0 as 10|[11,4]",
         **{"in": types(*TYPES[:2], [F32, [11, 4]])}),
    plan("shapes that do not fit", "GRAPH", "node 1 'scale' (Mul)|[3,4]|[2,4]",
         **{"in": types([F32, [3, 4]], *TYPES[1:])}),
    plan("an unknown device", "UNSUPPORTED", "field 'device'|no device 'abacus', only 'cpu'",
         device="abacus"),
    plan("a device of no name", "UNSUPPORTED", "field 'device'|no device '', only 'cpu'",
         device=""),
    plan("a device by number", "TENSOR", "field 'device'|a text", device=0),
    plan("bound out of range", "TENSOR", "field 'bound[0]': position 3, expected below 3",
        bound=[3]),
    plan("an unknown name", "TENSOR", "field 'bound[0]'|no 'bias'", bound=["bias"]),
    plan("bound twice", "TENSOR", "field 'bound[1]'|position 2 comes twice", bound=["w", 2]),
    plan("bound is nil inside", "TENSOR", "field 'bound[0]'|a position or a name|nil",
        bound=[None]),
    plan("gradient out of range", "TENSOR", "field 'grad[1]'|position 18446744073709551615",
         grad=["w", (1 << 64) - 1]),
    plan("gradient twice", "TENSOR", "field 'grad[1]'|twice", grad=["x", "x"]),
    plan("output unknown", "TENSOR", "field 'out[0]'|no 'logits'", out=["logits"]),
    plan("output out of range", "TENSOR", "field 'out[0]'|position 2, expected below 2", out=[2],
        gmask=[]),
    plan("output twice", "TENSOR", "field 'out[1]'|twice", out=[1, "loss"], gmask=[]),
    plan("no outputs", "TENSOR", "field 'out' is missing", out=DROP),
    plan("mask out of range", "TENSOR", "field 'gmask[0]'|position 2, expected below 2", gmask=[2]),
    plan("mask twice", "TENSOR", "field 'gmask[1]'|twice", gmask=[0, 0]),
    plan("mask by name", "TENSOR", "field 'gmask[0]'|an unsigned integer|a text", gmask=["loss"]),
    plan("parameter out of range", "TENSOR", "field 'parameters[1]': position 3, expected below 3",
        parameters=[2, 3]),
    plan("parameter twice", "TENSOR", "field 'parameters[1]': position 2 comes twice",
        parameters=[2, "w"]),
    plan("parameter unknown", "TENSOR", "field 'parameters[0]': the graph has no 'bias'",
        parameters=["bias"]),
    plan("parameter below zero", "TENSOR", "field 'parameters[0]'|a position or a name|a negative",
        parameters=[-1]),
    plan("parameters are a number", "TENSOR", "field 'parameters'|a list", parameters=2),
    plan("70000 parameters", "LIMIT", "field 'parameters' has 70000 entries, more than 65536",
        parameters=[0] * 70000),
    plan("plain is 2", "TENSOR", "field 'plain'|a boolean", plain=2),
    plan("plain is a text", "TENSOR", "field 'plain'|a boolean, got a text", plain="yes"),
    plan("70000 entries", "LIMIT", "field 'bound' has 70000 entries, more than 65536",
        bound=[0] * 70000),
    ask("plan.drop: no id", "TENSOR", "plan.drop: field 'plan' is missing", "plan.drop", plan=DROP),
    ask("plan.drop: a float", "TENSOR", "plan.drop: field 'plan'|a float", "plan.drop", plan=1.5),
    ask("plan.estimate: no id", "TENSOR", "field 'plan' is missing", "plan.estimate", plan=DROP),
    ask("plan.estimate: no such plan", "STALE", "plan.estimate: there is no such plan",
        "plan.estimate", plan=7),
    ask("plan.estimate: an unknown optimizer", "UNSUPPORTED",
        "field 'optimizer' 'lion': expected one of adamw fused-adam", "plan.estimate",
        optimizer="lion"),
    ask("plan.estimate: a part of a name", "UNSUPPORTED", "'sg'", "plan.estimate", optimizer="sg"),
    ask("plan.estimate: an empty name", "UNSUPPORTED", "''", "plan.estimate", optimizer=""),
    ask("plan.estimate: a long name", "UNSUPPORTED", f"'{'s' * 60}'", "plan.estimate",
        optimizer="s" * 100000),
    ask("plan.estimate: a number", "TENSOR", "field 'optimizer'|a text", "plan.estimate",
        optimizer=1),
    ask("plan.estimate: accumulate is 2", "TENSOR", "field 'accumulate'|a boolean",
        "plan.estimate", accumulate=2),
    ask("plan.estimate: too much is held", "LIMIT", "field 'held' is above 2^63 - 1",
        "plan.estimate", held=1 << 63),
    ask("plan.estimate: too much is trained", "LIMIT", "field 'trained' is above 2^63 - 1",
        "plan.estimate", trained=1 << 63),
    ask("plan.estimate: no such other plan", "STALE", "there is no such plan", "plan.estimate",
        more=[1, 7]),
    ask("plan.estimate: too many plans", "LIMIT", "field 'more'", "plan.estimate", more=[1] * 1025),
    ask("plan.estimate: less than nothing is held", "TENSOR", "field 'held'|negative",
        "plan.estimate", held=-1),
    explain("an unknown form", "UNSUPPORTED", "'form': expected text, json or notes", form="html"),
    explain("a part of a form", "UNSUPPORTED", "field 'form'", form="j"),
    explain("the form is a list", "TENSOR", "field 'form'|a text|a list", form=["text"]),
    explain("bytes below zero", "TENSOR", "field 'bytes'|negative", form="text", bytes=-1),
    explain("a negative start", "TENSOR", "field 'from'|negative", form="text", **{"from": -1}),
]  # fmt: skip

UNKNOWN = [
    ask(
        "unknown: a typo",
        "UNSUPPORTED",
        "forward: unknown field 'sede' (known: plan, run, seed, fl",
        "forward",
        seed=DROP,
        sede=3,
    ),
    ask(
        "unknown: an option",
        "UNSUPPORTED",
        "graph.plan: unknown field 'budget' (known: graph, plan",
        "graph.plan",
        budget=1 << 30,
    ),
    ask("unknown: nil", "UNSUPPORTED", "backward: unknown field 'retain'", "backward", retain=None),
    ask(
        "unknown: in a step",
        "UNSUPPORTED",
        "step: unknown field 'hyper' (known: step, journal",
        "step",
        hyper=b"",
    ),
    ask(
        "unknown: nothing is known",
        "UNSUPPORTED",
        "detach: unknown field 'now' (known: none)",
        "detach",
        now=1,
    ),
    ask(
        "unknown: with a zero byte",
        "UNSUPPORTED",
        "bind: unknown field 'bind",
        "bind",
        **{"bind\0": 1},
    ),
]

ADMIN = [
    Row("ps: with a payload", "LIMIT", ("ps: 1 payload frames, expected at most 0",),
        lambda s: s.ask("ps", [b"x"]), None),
    raw("stop: now is a text", "TENSOR", "stop: field 'now'|a boolean|a text",
        {"v": "stop", "now": "yes", "t": DROP}, session=None),
    raw("stop: now is 2", "TENSOR", "stop: field 'now'|a boolean",
        {"v": "stop", "now": 2, "t": DROP}, session=None),
    Row("message: nine frames", "LIMIT", ("more than 8",), lambda s: s.ask("ps", [b""] * 8), None),
]  # fmt: skip

TABLES = {
    "envelopes": ENVELOPES,
    "tokens and order": SESSIONS,
    "graph.put": PUTS,
    "graph.plan": PLANS,
    "fields that are not known": UNKNOWN,
    "ps, stop, frames": ADMIN,
}

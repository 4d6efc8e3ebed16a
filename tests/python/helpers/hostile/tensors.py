"""Bad inputs that name memory: bind, forward, backward, step.

Offsets past the end, sums that wrap, wrong types and shapes, ranges that overlap, journals that are
none: everything is refused before the first element is touched. See raw_client.py and
command_channel.py.
"""

from __future__ import annotations

from typing import Any

from helpers.hostile.command_channel import BIG, ask
from helpers.hostile.raw_client import (
    BF16,
    DROP,
    F32,
    F64,
    GO,
    GROUPS,
    GW,
    GX,
    I64,
    IDS,
    JOURNAL,
    JOURNAL_BYTES,
    LOSS,
    ROWS,
    SEGMENT,
    U8,
    Raw,
    Row,
    V,
    W,
    X,
    Y,
    many,
    single,
    tensor,
)

GOOD_X, GOOD_IDS = tensor(X, (ROWS, 4)), tensor(IDS, (ROWS,), I64)
GOOD_Y, GOOD_LOSS = tensor(Y, (ROWS, 4)), tensor(LOSS, ())


# ---- tensors and bindings ----


def bind(name: str, code: str, parts: str, one: Any) -> Row:
    changes = {"bind": 60, "tensors": many(one)}
    return ask(f"bind: {name}", code, f"bind: tensors[0]|{parts}", "bind", **changes)


BINDS = [
    bind("past the end", "TENSOR", f"which has {SEGMENT} bytes", tensor(SEGMENT - 64, (17,))),
    bind("begins past the end", "TENSOR", f"which has {SEGMENT} bytes", tensor(SEGMENT + 64, (1,))),
    bind("offset wraps 64 bits", "TENSOR", "offset 18446744073709551552", tensor((1 << 64) - 64,
        (17,))),
    bind("offset of 2^63", "TENSOR", "offset 9223372036854775808", tensor(BIG, (1,))),
    bind("size overflows", "LIMIT", "overflows 64 bits", tensor(0, (1 << 62, 4))),
    bind("size overflows behind a zero", "LIMIT", "overflows 64 bits", tensor(0, (0, 1 << 62, 4))),
    bind("misaligned by 1", "TENSOR", "offset 1 of segment 1 is not a multiple of 64", tensor(1,
        (1,))),
    bind("misaligned by 32", "TENSOR", "offset 32|not a multiple of 64", tensor(32, (1,))),
    bind("segment unknown", "SHM", "unknown segment 2", tensor(0, (1,), segment=2)),
    bind("segment 2^64-1", "SHM", "unknown segment 18446744073709551615",
         tensor(0, (1,), segment=(1 << 64) - 1)),
    bind("element type 0", "UNSUPPORTED", "element type 0", tensor(0, (1,), 0)),
    bind("text elements", "UNSUPPORTED", "element type 8", tensor(0, (1,), 8)),
    bind("element type 10^6", "UNSUPPORTED", "element type", tensor(0, (1,), 10**6)),
    ask("bind: nil", "TENSOR", "bind: field 'tensors'|a map, got nil", "bind", bind=60,
        tensors=None),
    ask("bind: as in protocol 1", "TENSOR", "bind: field 'tensors'|a map, got a list", "bind",
        bind=60, tensors=[[1, 0, F32, [1]]]),
    ask("bind: no sizes", "TENSOR", "bind: field 'tensors.dims' is missing", "bind", bind=60,
        tensors={"segments": [1], "offsets": [0], "dtypes": [F32]}),
    ask("bind: sizes nil", "TENSOR", "bind: field 'tensors.dims' is missing", "bind", bind=60,
        tensors={**many(GOOD_X), "dims": None}),
    ask("bind: more than a tensor has", "UNSUPPORTED",
        "bind: unknown field 'tensors.strides' (known: segments, offsets, dtypes, dims)", "bind",
        bind=60, tensors={**many(GOOD_X), "strides": [[1]]}),
    ask("bind: positions", "UNSUPPORTED", "bind: unknown field 'tensors.at'", "bind", bind=60,
        tensors=many(GOOD_X, at=[0])),
    ask("bind: two offsets", "TENSOR", "bind: field 'tensors': 1 segments, but 2 offsets", "bind",
        bind=60, tensors={**many(GOOD_X), "offsets": [0, 64]}),
    ask("bind: an offset for all", "TENSOR",
        "bind: field 'tensors.offsets'|a list, got an unsigned",
        "bind", bind=60, tensors={**many(GOOD_X), "offsets": 0}),
    ask("bind: rank 9", "TENSOR", "bind: field 'tensors.dims[0]'|sizes", "bind", bind=60,
        tensors=many(tensor(0, (1,) * 9))),
    ask("bind: a dimension below zero", "TENSOR", "bind: field 'tensors.dims[0]'|sizes", "bind",
        bind=60, tensors=many(tensor(0, (-1,)))),
    ask("bind: a float offset", "TENSOR", "bind: field 'tensors.offsets[0]'|got a float", "bind",
        bind=60, tensors=many([1, 0.0, F32, [1]])),
    ask("bind: the second one is bad", "SHM", "bind: tensors[1]|unknown segment 9", "bind", bind=60,
        tensors=many(tensor(0, (1,)), tensor(0, (1,), segment=9))),
    ask("bind: an empty map", "TENSOR", "bind: field 'tensors.segments' is missing", "bind",
        bind=60,
        tensors={}),
    ask("bind: no tensors field", "TENSOR", "bind: field 'tensors' is missing", "bind", bind=60,
        tensors=DROP),
    ask("bind: no id", "TENSOR", "bind: field 'bind' is missing", "bind", bind=DROP),
    ask("bind: id is a text", "TENSOR", "bind: field 'bind'|a text", "bind", bind="w"),
    ask("unbind: id below zero", "TENSOR", "unbind: field 'bind'|a negative", "unbind", bind=-5),
    ask("unbind: no id", "TENSOR", "unbind: field 'bind' is missing", "unbind", bind=DROP),
]  # fmt: skip

# ---- forward ----


def forward(name: str, code: str, parts: str, **changes: Any) -> Row:
    return ask(f"forward: {name}", code, f"forward: |{parts}", "forward", **changes)


FORWARDS = [
    forward("plan unknown", "STALE", "plan 7 is not known", plan=7),
    forward("no plan", "TENSOR", "field 'plan' is missing", plan=DROP),
    forward("plan nil", "TENSOR", "field 'plan'|an unsigned integer, got nil", plan=None),
    forward("run below zero", "TENSOR", "field 'run'|a negative integer", run=-1),
    forward("seed is a text", "TENSOR", "field 'seed'|a text", seed="3"),
    forward("seed below zero", "TENSOR", "field 'seed'|a negative integer", seed=-3),
    forward("flags unknown", "UNSUPPORTED", "field 'flags'|unknown bits in 16", flags=16),
    forward("look of 3", "UNSUPPORTED", "field 'look': 3, expected 0 to 2", look=3),
    forward("look that is a text", "TENSOR", "field 'look'", look="all"),
    forward("generation below zero", "TENSOR", "field 'gen'", gen=-1),
    forward("flags of 2^63", "UNSUPPORTED", "unknown bits in 9223372036854775808", flags=BIG),
    forward("no flags", "TENSOR", "field 'flags' is missing", flags=DROP),
    forward("binding unknown", "STALE", "binding 77 is not known (bind it again)", b=77),
    forward("no binding", "TENSOR", "field 'b': the plan has 1 bound inputs, got nil", b=None),
    forward("binding of the wrong type", "TENSOR", "field 'b'|a map", b={}),
    forward("another kind of binding", "TENSOR", "output 0 and bound input|share memory", b=2,
            out=many(tensor(GW, (ROWS, 4)), GOOD_LOSS)),
    forward("too few inputs", "TENSOR", "field 'in': the plan takes 2 inputs, got 1",
        **{"in": many(GOOD_X)}),
    forward("too many inputs", "TENSOR", "the plan takes 2 inputs, got 3",
            **{"in": many(GOOD_X, GOOD_IDS, GOOD_X)}),
    forward("in is nil", "TENSOR", "field 'in'|a map, got nil", **{"in": None}),
    forward("a segment nil", "TENSOR", "field 'in.segments[1]'|an unsigned integer, got nil",
            **{"in": many(GOOD_X, [None, *GOOD_IDS[1:]])}),
    forward("input of another type", "TENSOR", "input 0 'x': expected f32[2,4], got f64[2,4]",
            **{"in": many(tensor(X, (2, 4), F64), GOOD_IDS)}),
    forward("input in bf16", "TENSOR", "input 0 'x': expected f32[2,4], got bf16[2,4]",
            **{"in": many(tensor(X, (2, 4), BF16), GOOD_IDS)}),
    forward("input of another shape", "TENSOR", "input 0 'x': expected f32[2,4], got f32[4,2]",
            **{"in": many(tensor(X, (4, 2)), GOOD_IDS)}),
    forward("input of another rank", "TENSOR", "input 1 'ids': expected i64[2], got i64[1,2]",
            **{"in": many(GOOD_X, tensor(IDS, (1, 2), I64))}),
    forward("input past the end", "TENSOR", "in[0]|which has 2097152 bytes",
            **{"in": many(tensor(SEGMENT, (2, 4)), GOOD_IDS)}),
    forward("output past the end", "TENSOR", "out[1]|which has 2097152 bytes",
            out=many(GOOD_Y, tensor(SEGMENT, ()))),
    forward("output wraps", "TENSOR", "out[0]|18446744073709551552",
            out=many(tensor((1 << 64) - 64, (2, 4)), GOOD_LOSS)),
    forward("output misaligned", "TENSOR", "out[0]|not a multiple of 64", out=many(tensor(Y + 4, (2,
        4)), GOOD_LOSS)),
    forward("output missing", "TENSOR", "field 'out': the plan gives 2 outputs, got 1",
        out=many(GOOD_Y)),
    forward("output left out", "UNSUPPORTED", "unknown field 'out.at'", out=many(GOOD_LOSS,
        at=[1])),
    forward("output of another type", "TENSOR", "output 0 'y': expected f32[2,4], got i64[2,4]",
            out=many(tensor(Y, (2, 4), I64), GOOD_LOSS)),
    forward("output of another shape", "TENSOR", "output 1 'loss': expected f32[], got f32[1]",
            out=many(GOOD_Y, tensor(LOSS, (1,)))),
    forward("outputs overlap", "TENSOR", "output 0 and output 1 share memory", out=many(GOOD_Y,
        tensor(Y, ()))),
    forward("output over an input", "TENSOR", "output 0 and input 0 share memory",
        out=many(tensor(X,
        (2, 4)), GOOD_LOSS)),
    forward("output over the indices", "TENSOR", "output 1 and input 1 share memory",
        out=many(GOOD_Y,
        tensor(IDS, ()))),
    forward("output over a parameter", "TENSOR", "output 0 and bound input 0 share memory",
            out=many(tensor(W + 64, (2, 4)), GOOD_LOSS)),
    ask("forward: rel is a number", "TENSOR", "field 'rel'|a list", "forward", rel=1),
    ask("forward: rel of texts", "TENSOR", "field 'rel[0]'|a text", "forward", rel=["a"]),
    ask("forward: rel of 5000", "LIMIT", "field 'rel' has 5000 entries, more than 4096", "forward",
        rel=[0] * 5000),
    Row("forward: with a payload", "LIMIT", ("1 payload frames, expected at most 0",),
        lambda s: s.ask("forward", [b"x"])),
    ask("release: runs is a number", "TENSOR", "release: field 'runs'|a list", "release", runs=1),
    ask("release: a run below zero", "TENSOR", "release: field 'runs[1]'|a negative", "release",
        runs=[1, -1]),
    ask("release: no runs", "TENSOR", "release: field 'runs' is missing", "release", runs=DROP),
]  # fmt: skip

# ---- backward ----


def backward(name: str, code: str, parts: str, **changes: Any) -> Row:
    def send(s: Raw) -> dict[str, Any]:
        assert s.ask("forward")["ok"]
        reply = s.ask("backward", **changes)
        assert s.ask("backward")["ok"]  # what was refused has not used the run up
        return reply

    return Row(f"backward: {name}", code, tuple(parts.split("|")), send)


GOOD_GO, GOOD_GX = tensor(GO, ()), tensor(GX, (ROWS, 4))
BACKWARDS = [
    ask("backward: run unknown", "STALE", "backward: run 777 is not known", "backward", run=777),
    backward("no run", "TENSOR", "field 'run' is missing", run=DROP),
    backward("no gradients arrive", "TENSOR", "without a gradient", go=many(at=[])),
    backward("go is nil", "TENSOR", "field 'go'|a map, got nil", go=None),
    backward("go as in protocol 1", "TENSOR", "field 'go'|a map, got a list", go=[[1, GOOD_GO]]),
    backward("go without a position", "TENSOR",
        "gradient of output 0 'y': expected f32[2,4], got f32[]", go=many(GOOD_GO)),
    backward("go position out of range", "TENSOR", "go[0]: position 2, expected below 2",
        go=many(GOOD_GO, at=[2])),
    backward("go position of 2^64-1", "TENSOR",
        "go[0]: position 18446744073709551615, expected below 2",
        go=many(GOOD_GO, at=[(1 << 64) - 1])),
    backward("go twice", "TENSOR", "go[1]: position 1 after 1, expected a rising order",
        go=many(GOOD_GO, GOOD_GO, at=[1, 1])),
    backward("go in a falling order", "TENSOR",
        "go[1]: position 0 after 1, expected a rising order",
        go=many(GOOD_GO, GOOD_GO, at=[1, 0])),
    backward("go position is a text", "TENSOR", "field 'go.at[0]'|a text", go=many(GOOD_GO,
        at=["1"])),
    backward("go with too few positions", "TENSOR", "field 'go': 2 dims, but 1 at",
        go=many(GOOD_GO, GOOD_GO, at=[1])),
    backward("go excluded by the plan", "TENSOR", "output 0, which the plan excludes",
             go=many(tensor(V + 1024, (2, 4)), at=[0])),
    backward("go of another type", "TENSOR",
        "gradient of output 1 'loss': expected f32[], got f32[1]",
             go=many(tensor(GO, (1,)), at=[1])),
    backward("go in f64", "TENSOR", "expected f32[], got f64[]", go=many(tensor(GO, (), F64),
        at=[1])),
    backward("go past the end", "TENSOR", "go[0]|which has 2097152 bytes", go=many(tensor(SEGMENT,
        ()), at=[1])),
    backward("binding unknown", "STALE", "binding 78 is not known", b=78),
    backward("too few gradients", "TENSOR",
        "the plan has 2 gradients; binding and 'g' give 1 and 0", g=many()),
    backward("too many gradients", "TENSOR", "the plan has 2 gradients|1 and 2",
        g=many(GOOD_GX, GOOD_GX)),
    backward("a gradient beyond the last", "TENSOR", "g[0]: position 1, expected below 1",
        g=many(GOOD_GX, at=[1])),
    backward("no binding", "TENSOR", "the plan has 2 gradients|0 and 1", b=None),
    backward("gradient of another shape", "TENSOR", "gradient 0 'x': expected f32[2,4], got f32[8]",
             g=many(tensor(GX, (8,)))),
    backward("gradient of another type", "TENSOR", "expected f32[2,4], got bf16[2,4]",
        g=many(tensor(GX, (2, 4), BF16))),
    backward("gradient past the end", "TENSOR", "g[0]|which has 2097152 bytes",
        g=many(tensor(SEGMENT,
        (2, 4)))),
    backward("gradient over the input", "TENSOR", "gradient 'g' 0 and input 0 share memory",
             g=many(tensor(X, (2, 4)))),
    backward("gradient over an output", "TENSOR", "gradient 'g' 0 and output 0 share memory",
             g=many(tensor(Y, (2, 4)))),
    backward("gradient over what arrives", "TENSOR", "share memory", g=many(tensor(GO, (2, 4)))),
    backward("gradient over a parameter", "TENSOR", "bound input 0 share memory",
        g=many(tensor(W, (2,
        4)))),
    backward("gradient over a bound one", "TENSOR",
        "gradient 'g' 0 and bound gradient 0 share memory",
             g=many(tensor(GW + 64, (2, 4)))),
    backward("parameters as gradients", "TENSOR",
        "bound gradient 0 and bound input 0 share memory", b=1),
    backward("g is a text", "TENSOR", "field 'g'|a map", g="x"),
    backward("keep is 2", "TENSOR", "field 'keep'|a boolean", keep=2),
    backward("keep is a text", "TENSOR", "field 'keep'|a boolean, got a text", keep="yes"),
]  # fmt: skip

# ---- step ----


def groups(**changes: Any) -> dict[str, Any]:
    return {**GROUPS, **{name: [value] for name, value in changes.items()}}


def step(name: str, code: str, parts: str, **changes: Any) -> Row:
    return ask(f"step: {name}", code, parts, "step", **changes)


def journal(offset: int = JOURNAL, count: int = JOURNAL_BYTES, dtype: int = U8) -> dict[str, Any]:
    return single(tensor(offset, (count,), dtype))


STEPS = [
    step("no number", "TENSOR", "step: field 'step' is missing", step=DROP),
    step("number below zero", "TENSOR", "step: field 'step'|a negative integer", step=-1),
    step("a step too far", "STALE", "the journal is at step 0, the request says 5", step=5),
    step("step 2^64-1", "LIMIT", "step 18446744073709551615, expected below 1099511627775",
        step=(1 << 64) - 1),
    step("journal too small", "TENSOR", f"journal: expected {JOURNAL_BYTES} bytes, got 64",
        journal=journal(count=64)),
    step("step 2^40", "LIMIT", "step 1099511627776, expected below", step=1 << 40),
    step("count 1.5", "TENSOR", "field 'groups.t[0]'|a float", groups=groups(t=1.5)),
    step("journal past the end", "TENSOR", "journal|which has", journal=journal(SEGMENT - 64)),
    step("journal of floats", "TENSOR", "journal: expected u8", journal=journal(dtype=F32,
        count=JOURNAL_BYTES // 4)),
    step("journal nil", "TENSOR", "step: field 'journal'|a map, got nil", journal=None),
    step("journal as in protocol 1", "TENSOR", "step: field 'journal'|a map, got a list",
        journal=tensor(JOURNAL, (JOURNAL_BYTES,), U8)),
    step("journal without an offset", "TENSOR", "step: field 'journal.offset' is missing",
        journal={"segment": 1, "dtype": U8, "dims": [JOURNAL_BYTES]}),
    step("journal with a name", "UNSUPPORTED", "step: unknown field 'journal.name'",
        journal={**journal(), "name": "j"}),
    step("journal over a parameter", "TENSOR", "journal[0] and p[0] share memory",
        journal=journal(0)),
    step("groups as in protocol 1", "TENSOR", "step: field 'groups'|a map, got bytes",
        groups=bytes(64)),
    step("no settings", "TENSOR", "step: field 'groups' is missing", groups=DROP),
    step("no rate", "TENSOR", "step: field 'groups.lr' is missing",
        groups={k: v for k, v in GROUPS.items() if k != "lr"}),
    step("a setting by another name", "UNSUPPORTED",
        "step: unknown field 'groups.betas' (known: lr, beta1, beta2, eps, weight_decay, mode, "
        "bias_correction, t)", groups={**GROUPS, "betas": [0.9]}),
    step("a setting for more groups", "TENSOR", "step: field 'groups': 1 lr, but 2 beta1",
        groups={**GROUPS, "beta1": [0.9, 0.9]}),
    step("a rate that is a text", "TENSOR", "step: field 'groups.lr[0]': expected a number|a text",
        groups=groups(lr="1e-3")),
    step("max_norm is a text", "TENSOR", "step: field 'max_norm': expected a number, got a text",
        max_norm="1"),
    *[
        step(f"{name} {value}", "TENSOR",
             f"step: field 'groups.{name}[0]': expected a finite number from 0, got {value}",
             groups=groups(**{name: value}))
        for name in ("lr", "eps", "weight_decay")
        for value in (float("nan"), float("inf"), -1e-08)
    ],
    *[
        step(f"{name} {value}", "TENSOR",
             f"step: field 'groups.{name}[0]': expected a number from 0 to below 1, got {value:g}",
             groups=groups(**{name: value}))
        for name in ("beta1", "beta2")
        for value in (float("nan"), 1.0, -0.5)
    ],
    *[
        step(f"max_norm {value}", "TENSOR",
             f"step: field 'max_norm': expected a finite number from 0, got {value:g}",
             max_norm=value)
        for value in (float("nan"), float("inf"), -1.0)
    ],
    *[
        step(f"scale {value}", "TENSOR",
             f"step: field 'scale': expected a finite number above 0, got {value:g}",
             scale=value)
        for value in (float("nan"), float("inf"), -1.0, 0.0)
    ],
    step("finite is a number", "TENSOR", "step: field 'finite': expected a boolean", finite=2),
    step("settings without groups", "TENSOR", "parameter 0: group 0 of 0",
        groups={name: [] for name in GROUPS}),
    step("mode 3", "TENSOR", "field 'groups.mode[0]': 3, expected 0 to 2", groups=groups(mode=3)),
    step("mode below zero", "TENSOR", "field 'groups.mode[0]'|a negative", groups=groups(mode=-1)),
    step("mode NaN", "TENSOR", "'groups.mode[0]'|a float", groups=groups(mode=float("nan"))),
    step("bias correction of 2", "TENSOR", "'groups.bias_correction[0]'|a boolean",
        groups=groups(bias_correction=2)),
    step("count zero", "TENSOR", "field 'groups.t[0]': 0, expected 1", groups=groups(t=0)),
    step("count of 2^63", "TENSOR", "field 'groups.t[0]': 9223372036854775808",
        groups=groups(t=BIG)),
    step("group out of range", "TENSOR", "parameter 0: group 1 of 1", group=[1]),
    step("group of 2^40", "TENSOR", "parameter 0: group", group=[1 << 40]),
    step("no groups", "TENSOR", "field 'bp': expected 0 tensors, got 1", group=[], g=many()),
    step("too many groups", "TENSOR", "field 'bp': expected 2 tensors, got 1", group=[0, 0]),
    step("groups of texts", "TENSOR", "field 'group[0]'|a text", group=["0"]),
    step("parameters unknown", "STALE", "field 'bp': binding 70 is not known", bp=70),
    step("moment unknown", "STALE", "field 'bv': binding 71 is not known", bv=71),
    step("moments are the parameters", "TENSOR", "m[0] and p[0] share memory", bm=1),
    step("both moments the same", "TENSOR", "v[0] and m[0] share memory", bv=3),
    step("too few gradients", "TENSOR", "field 'g': expected 1 tensors, got 0", g=many()),
    step("gradient of another size", "TENSOR",
        "g[0]: expected f32 elements as in f32[10,4], got f32[9,4]",
         g=many(tensor(GW, (9, 4)))),
    step("gradient in f64", "TENSOR", "g[0]: expected f32 elements as in f32[10,4], got f64[10,4]",
         g=many(tensor(GW, (10, 4), F64))),
    step("gradient over a parameter", "TENSOR", "g[0] and p[0] share memory", g=many(tensor(W, (10,
        4)))),
    step("gradient is a number", "TENSOR", "field 'g'|a map", g=7),
    step("gradient of no parameter", "TENSOR", "g[0]: position 1, expected below 1",
        g=many(tensor(GW, (10, 4)), at=[1])),
]  # fmt: skip


TABLES = {
    "tensors, bindings": BINDS,
    "forward, release": FORWARDS,
    "backward": BACKWARDS,
    "step": STEPS,
}

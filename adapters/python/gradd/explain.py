"""What a plan does: `model.gradd_explain()` gives the table that `gradd explain` prints.

    print(model.gradd_explain())             # the plan that ran last
    print(model.gradd_explain(**batch))      # the plan of such a call; nothing is run
    model.gradd_explain().save_onnx("annotated.onnx")

`python -m gradd.explain` is the command line: live plans of the daemon, or a model file.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradd.session import protocol

if TYPE_CHECKING:
    from gradd.calls.captured import CapturedGraph, Plan
    from gradd.session.client import Client

PAGE = 500
FATES = ("unused", "run", "fused", "view", "folded", "merged")


@dataclass(frozen=True)
class Row:
    """One operator of a plan, in order of execution; fields as in `gradd explain --json`.

    Attributes:
        row: Number of the row.
        step: Position among the steps of its phase; -1 = costs nothing and is not run.
        kind: "run", "copy", "view" or "none".
        phase: "forward" or "backward".
        op: Operator of the engine.
        domain: Its domain, "" = ONNX.
        kernel: What carries it out: "oneDNN f32", "loop".
        node: Node of the graph that it comes from, or whose gradient it computes; -1 = a copy.
        node_name: Name of that node.
        node_op: Its operator in the graph.
        fused: The operators that a recognised one stands for, "" = as the model wrote it.
        source: "module.path @ file:line".
        dtype: Of the first result.
        shape: Of the first result.
        bytes_read: Of operands.
        bytes_written: Of results.
        work_bytes: Scratch.
        saved_bytes: Of results, kept for backward.
        flops: Products exactly, everything else one per element.
        leftover: Part of a pattern that was not recognised.
    """

    row: int
    step: int
    kind: str
    phase: str
    op: str
    domain: str
    kernel: str
    node: int
    node_name: str
    node_op: str
    fused: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    bytes_read: int
    bytes_written: int
    work_bytes: int
    saved_bytes: int
    flops: float
    leftover: bool

    @property
    def place(self) -> str:
        """ "model.layers.0.mlp (modeling_llama.py:172)"."""
        if self.node < 0:
            return ""
        module, _, line = self.source.partition(" @ ")
        text = f"{module} ({line.rpartition('/')[2]})" if line else module or self.node_name
        return f"gradient of {text}" if self.phase == "backward" else text


@dataclass(frozen=True)
class Explanation:
    """A plan, explained. Prints as a table.

    Attributes:
        title: Which plan.
        library: What multiplies matrices.
        threads: Of the plan.
        arena_bytes: Planned peak of one run: activations and workspace.
        saved_bytes: Of these, alive between forward and backward.
        constant_bytes: Held once per plan: constants, steps, what kernels have prepared.
        input_bytes: Of all graph inputs, parameters included.
        output_bytes: Of the outputs.
        grad_bytes: Of the gradients.
        compile_ms: Time that planning took.
        nodes: Nodes of the graph by fate and operator.
        rows: The operators.
    """

    title: str
    library: str
    threads: int
    arena_bytes: int
    saved_bytes: int
    constant_bytes: int
    input_bytes: int
    output_bytes: int
    grad_bytes: int
    compile_ms: float
    nodes: dict[str, dict[str, int]]
    rows: tuple[Row, ...]
    _fates: tuple[tuple[str, int], ...] = field(default=(), repr=False)
    _graph: tuple[bytes, tuple] | None = field(default=None, repr=False)

    def counts(self, phase: str = "forward") -> dict[str, int]:
        """Operators that are carried out in a phase, with their counts."""
        return dict(Counter(r.op for r in self.rows if r.phase == phase and r.step >= 0))

    @property
    def leftovers(self) -> list[Row]:
        """Rows of patterns that were not recognised."""
        return [r for r in self.rows if r.leftover]

    @property
    def flops(self) -> float:
        """Of forward and backward together."""
        return sum(r.flops for r in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as `gradd explain --json` prints it."""
        hidden = ("_fates", "_graph", "rows")
        names = [f for f in self.__dataclass_fields__ if f not in hidden]
        rows = [{**asdict(r), "shape": list(r.shape)} for r in self.rows]
        return {**{n: getattr(self, n) for n in names}, "rows": rows}

    def to_json(self, **options: Any) -> str:
        """JSON text; options are those of json.dumps."""
        return json.dumps(self.as_dict(), **options)

    def __str__(self) -> str:
        return table(self)

    def save_onnx(self, path: str | Path) -> None:
        """Writes the graph that was sent, annotated with what became of every node.

        Raises:
            ValueError: This explanation has no graph with it.
        """
        if self._graph is None:
            raise ValueError("this explanation was made without the graph")
        Path(path).write_bytes(annotate(*self._graph, self._fates, self.rows))


def explain_plan(
    client: Client, plan: Plan, graph: CapturedGraph | None = None, title: str = ""
) -> Explanation:
    """Asks the daemon about a plan of this client.

    Args:
        client: The client.
        plan: One of its plans.
        graph: The graph of the plan, for save_onnx().
        title: First line of the table.
    """
    fields: dict[str, Any] = {
        "proto": protocol.PROTOCOL[1],
        "session": client.session,
        "plan": plan.info.id,
        "rows": PAGE,
    }
    head = client.request("explain", {**fields, "nodes": 1})
    rows = list(head["rows"])
    while len(rows) < head["n_rows"]:
        page = client.request("explain", {**fields, "from": len(rows)})["rows"]
        if not page:
            break
        rows += page
    nodes = head["nodes"]
    return Explanation(
        title=title or f"session {head['session']}, plan {head['plan']}",
        nodes=_by_fate(head["fates"]),
        rows=tuple(_row(r) for r in rows),
        _fates=tuple((FATES[f], r) for f, r in zip(nodes["fates"], nodes["rows"], strict=True)),
        _graph=(graph.cap.onnx, graph.cap.sources) if graph is not None else None,
        **{
            name: head[name]
            for name in (
                *("library", "threads", "arena_bytes", "saved_bytes", "constant_bytes"),
                *("input_bytes", "output_bytes", "grad_bytes", "compile_ms"),
            )
        },
    )


def _by_fate(fates: list) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for entry in fates:
        found.setdefault(FATES[entry["fate"]], {})[entry["op"]] = entry["count"]
    return found


def _row(row: dict[str, Any]) -> Row:
    """A row as the verb `explain` sends it: see docs/protocol.md."""
    from gradd.spec import ONNX_DTYPES

    made = ("phase", "dtype", "shape", "leftover")
    same = {f.name: row[f.name] for f in fields(Row) if f.name not in made}
    return Row(
        phase="backward" if row["backward"] else "forward",
        dtype=ONNX_DTYPES.get(row["dtype"], "?"),
        shape=tuple(row["dims"]),
        leftover=bool(row["leftover"]),
        **same,
    )


# ---- the table ----


def amount(count: float) -> str:
    """ "3.2 MiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    unit = 0
    while count >= 1024 and unit < 4:
        count /= 1024
        unit += 1
    return f"{count:.1f} {units[unit]}" if unit else f"{count:.0f} B"


def _number(count: float) -> str:
    units = ("", " k", " M", " G", " T", " P")
    unit = 0
    while count >= 1000 and unit < 5:
        count /= 1000
        unit += 1
    return f"{count:.1f}{units[unit]}" if unit else f"{count:.0f}"


def table(e: Explanation) -> str:
    """The text of an explanation."""
    lines = [
        e.title,
        f"planned peak {amount(e.arena_bytes)} (one run: activations and workspace), saved for "
        f"backward {amount(e.saved_bytes)}, constants {amount(e.constant_bytes)}",
        f"inputs {amount(e.input_bytes)}, outputs {amount(e.output_bytes)}, gradients "
        f"{amount(e.grad_bytes)}; products by {e.library}; planned in {e.compile_ms:.1f} ms",
    ]
    for phase in ("forward", "backward"):
        lines += _phase(phase, [r for r in e.rows if r.phase == phase])
    lines += _totals(e.rows)
    lines += ["", "nodes of the model"]
    for fate, ops in e.nodes.items():
        listed = " ".join(f"{op}×{n}" for op, n in ops.items())
        lines.append(f"  {fate:<8} {sum(ops.values()):5}  {listed}")
    return "\n".join(lines + _unrecognised(e.leftovers))


_FORM = "{:>5}  {:<27} {:<12} {:<22} {:>10} {:>10} {:>8} {:>10} {:>10}  {}"


def _phase(phase: str, rows: list[Row]) -> list[str]:
    if not rows:
        return []
    run = sum(r.step >= 0 for r in rows)
    total = _number(sum(r.flops for r in rows))
    head = ("STEP", "OPERATOR", "KERNEL", "TYPE", "READ", "WRITTEN", "FLOP", "WORKSPACE", "SAVED")
    return [
        "",
        f"{phase}: {run} steps, {len(rows) - run} without cost, {total} FLOP",
        _FORM.format(*head, "SOURCE"),
        *(_line(r) for r in rows),
    ]


def _line(r: Row) -> str:
    sizes = (r.bytes_read, r.bytes_written, r.work_bytes, r.saved_bytes)
    read, written, work, saved = (amount(n) if n else "" for n in sizes)
    place = r.place + (f"  <- {r.fused}" if r.fused else "")
    return _FORM.format(
        r.step if r.step >= 0 else "-",
        r.op,
        r.kernel,
        f"{r.dtype}[{','.join(map(str, r.shape))}]",
        read,
        written,
        _number(r.flops) if r.flops else "",
        work,
        saved,
        place + ("  (not recognised)" if r.leftover else ""),
    ).rstrip()


def _totals(rows: tuple[Row, ...]) -> list[str]:
    totals: dict[tuple[str, str], list[float]] = {}
    for r in rows:
        entry = totals.setdefault((r.op, r.kernel), [0, 0, 0.0, 0])
        entry[r.phase == "backward"] += 1
        entry[2] += r.flops
        entry[3] += r.bytes_read + r.bytes_written
    form = "{:<27} {:<12} {:>8} {:>8} {:>10} {:>6} {:>10}"
    whole = sum(t[2] for t in totals.values()) or 1.0
    names = ("OPERATOR", "KERNEL", "FORWARD", "BACKWARD", "FLOP", "SHARE", "BYTES")
    lines = ["", form.format(*names)]
    for (op, kernel), (ahead, back, flops, moved) in sorted(
        totals.items(), key=lambda item: (-item[1][2], -item[1][3], item[0])
    ):
        share = f"{100 * flops / whole:.1f}%"
        lines.append(form.format(op, kernel, ahead, back, _number(flops), share, amount(moved)))
    return lines


def _unrecognised(rows: list[Row]) -> list[str]:
    if not rows:
        return ["", "not recognised: nothing"]
    lines = ["", "not recognised"]
    for op, count in Counter(r.op for r in rows).items():
        places = [r.place for r in rows if r.op == op]
        more = ", ..." if count > 4 else ""
        lines.append(f"  {op}×{count}: {', '.join(places[:4])}{more}")
    return lines


# ---- ONNX ----


def with_sources(data: bytes, sources: tuple) -> bytes:
    """A model whose nodes carry where they come from, which `gradd explain FILE` shows."""
    import onnx

    model = onnx.load_model_from_string(data)
    _add_sources(model, sources)
    return model.SerializeToString()


def _add_sources(model: Any, sources: tuple) -> None:
    known = dict(sources)
    for node in model.graph.node:
        if node.name in known:
            node.metadata_props.add(key="gradd.source", value=known[node.name])


def annotate(
    data: bytes, sources: tuple, fates: tuple[tuple[str, int], ...], rows: tuple[Row, ...]
) -> bytes:
    """A model whose nodes tell, as metadata and doc string, what a plan made of them."""
    import onnx

    model = onnx.load_model_from_string(data)
    _add_sources(model, sources)
    for node, (fate, at) in zip(model.graph.node, fates, strict=True):
        node.doc_string = f"gradd: {fate}"
        node.metadata_props.add(key="gradd.fate", value=fate)
        if at < 0:
            continue
        row = rows[at]
        moved = row.bytes_read + row.bytes_written
        node.doc_string += (
            f", row {at}: {row.op} ({row.kernel}), {moved} bytes, {row.flops:.0f} FLOP"
        )
        for name, value in (
            ("row", at),
            ("operator", row.op),
            ("kernel", row.kernel),
            ("bytes_read", row.bytes_read),
            ("bytes_written", row.bytes_written),
            ("flops", f"{row.flops:.0f}"),
            ("saved_bytes", row.saved_bytes),
        ):
            node.metadata_props.add(key=f"gradd.{name}", value=str(value))
    return model.SerializeToString()


def main() -> None:
    """`python -m gradd.explain [arguments of gradd explain]`."""
    from gradd.session import daemon

    binary = daemon.find_binary()
    where = os.environ.get("GRADD_DIR") or str(daemon.directory())
    os.execve(binary, [binary, "explain", *sys.argv[1:]], {**os.environ, "GRADD_DIR": where})


if __name__ == "__main__":
    main()

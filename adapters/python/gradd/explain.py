"""Explains a plan: `model.gradd_explain()` gives the table that `gradd explain` prints.

    print(model.gradd_explain())             # the plan that ran last
    print(model.gradd_explain(**batch))      # the plan of such a call; nothing is run
    model.gradd_explain().save_onnx("annotated.onnx")

`python -m gradd.explain` is the command line: plans of the daemon, or a model file.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradd import progress
from gradd.html_tables import table
from gradd.memory.budget import amount
from gradd.session import protocol

if TYPE_CHECKING:
    from gradd.calls.graph import Graph, Plan
    from gradd.dynamo.frontend import Compiled
    from gradd.session.client import Client


@dataclass(frozen=True)
class Row:
    """One operator of a plan, in order of execution: a row of `gradd explain --json`.

    `gradd explain --help` describes the fields. `dtype` and `shape` are those of the first output,
    `bytes_*` and `*_bytes` are bytes, `flops` are floating-point operations of one launch.
    """

    row: int
    launch: int
    kind: str
    phase: str
    op: str
    domain: str
    kernel: str
    dtype: str
    shape: tuple[int, ...]
    bytes_read: int
    bytes_written: int
    flops: float
    work_bytes: int
    saved_bytes: int
    node: int
    node_name: str
    node_op: str
    source: str
    place: str
    fused: str
    leftover: bool
    again: bool
    live: str


@dataclass(frozen=True)
class Explanation:
    """A plan, explained: the object of `gradd explain --json`. Prints as `gradd explain` does.

    As the last value of a notebook cell it is shown as tables.

    Attributes:
        title: Name of the model, or of the plan.
        library: The library that multiplies matrices.
        threads: Threads that run the plan.
        arena_bytes: Planned peak of one run: activations and workspace.
        saved_bytes: The part of arena_bytes that is alive between forward and backward.
        constant_bytes: Memory of the plan itself: constants, launches, prepared data of kernels.
        input_bytes: Size of all graph inputs, parameters included.
        output_bytes: Size of the outputs.
        grad_bytes: Size of the gradients.
        whole_bytes: arena_bytes if every value were kept; 0 without a memory budget or policy.
        recomputed_bytes: Size of the values that the backward computes again.
        recompute_ms: Time of computing them again, in ms, by a model.
        model_ms: Time of forward and backward without that, in ms, by the same model.
        batch_rows: Rows of a batch, if the plan leaves some out; 0 = all are computed.
        label_rows: Labelled rows that fit into the plan; 0 = the plan does not list them.
        real_rows: Rows without padding that fit into the plan; 0 = the plan does not list them.
        compile_ms: Time that planning took, in ms.
        nodes: Counts of the graph's nodes: by outcome, then by operator.
        rows: The operators, in order of execution.
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
    whole_bytes: int
    recomputed_bytes: int
    recompute_ms: float
    model_ms: float
    batch_rows: int
    label_rows: int
    real_rows: int
    compile_ms: float
    nodes: dict[str, dict[str, int]]
    rows: tuple[Row, ...]
    _data: dict[str, Any] = field(repr=False)
    _text: str = field(repr=False)
    _graphs: tuple[tuple[bytes, tuple, list], ...] = field(repr=False)

    def counts(self, phase: str = "forward") -> dict[str, int]:
        """Counts of the operators that a phase ("forward", "backward") runs."""
        return dict(Counter(r.op for r in self.rows if r.phase == phase and r.launch >= 0))

    @property
    def leftovers(self) -> list[Row]:
        """Rows of patterns that were not recognised."""
        return [r for r in self.rows if r.leftover]

    @property
    def flops(self) -> float:
        """Floating-point operations of forward and backward together."""
        return sum(r.flops for r in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as `gradd explain --json` prints it."""
        return copy.deepcopy(self._data)

    def to_json(self, **options: Any) -> str:
        """JSON text; options are those of json.dumps."""
        return json.dumps(self._data, **options)

    def __str__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        sizes = {
            "planned peak of one run": self.arena_bytes,
            "saved for backward": self.saved_bytes,
            "held by the plan": self.constant_bytes,
            "inputs": self.input_bytes,
            "outputs": self.output_bytes,
            "gradients": self.grad_bytes,
        }
        if self.recomputed_bytes:
            sizes["computed again in backward"] = self.recomputed_bytes
        parts = [f"<p>{escape(self.title)}</p>"]
        parts.append(table([(name, amount(size)) for name, size in sizes.items()], heads=False))
        for phase in ("forward", "backward"):
            rows = [r for r in self.rows if r.phase == phase and r.launch >= 0]
            cells = table([_HEADINGS, *map(_cells, rows)])
            what = f"{phase}: {len(rows)} launches"
            parts.append(f"<details><summary>{what}</summary>{cells}</details>")
        return f"<div>{''.join(parts)}</div>"

    def save_onnx(self, path: str | Path) -> None:
        """Writes the graph that was sent, annotated with the outcome for every node.

        Of several graphs the first one has this name, `net.onnx`, and the next `net-2.onnx`.

        Raises:
            ValueError: This explanation has no graph with it.
        """
        if not self._graphs:
            raise ValueError("this explanation was made without the graph")
        path = Path(path)
        for number, graph in enumerate(self._graphs, 1):
            name = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
            name.write_bytes(annotate(*graph))


_HEADINGS = ("operator", "kernel", "type", "read", "written", "FLOP", "saved", "source")


def _cells(row: Row) -> tuple[str, ...]:
    dims = ",".join(map(str, row.shape))
    sizes = (amount(row.bytes_read), amount(row.bytes_written))
    saved = amount(row.saved_bytes) if row.saved_bytes else ""
    name = f"{row.op} <- {row.fused}" if row.fused else row.op
    return (name, row.kernel, f"{row.dtype}[{dims}]", *sizes, f"{row.flops:,.0f}", saved, row.place)


def explain_plan(
    client: Client, plan: Plan, graph: Graph | None = None, title: str = ""
) -> Explanation:
    """Asks the daemon about a plan of this client.

    Args:
        client: The client.
        plan: One of its plans.
        graph: The graph of the plan, for save_onnx().
        title: First line of the table.
    """
    data = json.loads(_said(client, plan, "json"))
    first, _, table = _said(client, plan, "text").rstrip("\n").partition("\n")
    data["title"] = title or data["title"]
    graphs: tuple = ()
    if graph is not None:
        notes = json.loads(_said(client, plan, "notes"))
        graphs = ((graph.cap.onnx, graph.cap.sources, notes),)
    same = {f.name: data[f.name] for f in fields(Explanation) if f.name in data}
    return Explanation(
        **{**same, "rows": tuple(map(_row, data["rows"]))},
        _data=data,
        _text=f"{title or first}\n{table}",
        _graphs=graphs,
    )


_SUMS = tuple(f.name for f in fields(Explanation) if f.name.endswith(("_bytes", "_ms")))
_ROWS = ("batch_rows", "label_rows", "real_rows")


def explain_plans(client: Client, found: Sequence[tuple[Graph, Plan]], title: str) -> Explanation:
    """Explains the plans of one call: their sums, and the rows of all, if there are several.

    Args:
        client: The client.
        found: Graphs and plans, in the order of the call.
        title: First line of the table.
    """
    if len(found) == 1:
        return explain_plan(client, found[0][1], found[0][0], title)
    parts = [
        explain_plan(client, plan, graph, f"{title}, graph {i} of {len(found)}")
        for i, (graph, plan) in enumerate(found, 1)
    ]
    sums = {name: sum(getattr(p, name) for p in parts) for name in _SUMS}
    sums |= {name: max(getattr(p, name) for p in parts) for name in _ROWS}
    counts: dict[str, Counter[str]] = {}
    for part in parts:
        for fate, names in part.nodes.items():
            counts.setdefault(fate, Counter()).update(names)
    sums["nodes"] = {fate: dict(names) for fate, names in counts.items()}
    data = [p.as_dict() for p in parts]
    rows = [row for d in data for row in d["rows"]]
    return replace(
        parts[0],
        **sums,
        title=title,
        rows=tuple(row for p in parts for row in p.rows),
        _data={**data[0], **sums, "title": title, "rows": rows, "graphs": data},
        _text="\n\n".join(map(str, parts)),
        _graphs=tuple(g for p in parts for g in p._graphs),
    )


def explain_call(compiled: Compiled, args: tuple, kwargs: dict[str, Any]) -> Explanation:
    """Explains the daemon's work in such a call; without arguments in the one that ran last.

    Raises:
        ValueError: No arguments, and no call has run in the daemon (or its plan is gone).
    """
    title = type(compiled.module).__name__
    with progress.Compiling(title, "to explain a call"):
        found = compiled.plans(args, kwargs)
    return explain_plans(compiled.client, found, title=title)


def _said(client: Client, plan: Plan, form: str) -> str:
    """A text of the verb `explain`, put together from its pieces."""
    data = b""
    while True:
        reply = client.request(
            "explain",
            {
                "proto": protocol.PROTOCOL[1],
                "session": client.session,
                "plan": plan.info.id,
                "form": form,
                "from": len(data),
            },
        )
        data += reply["text"]
        if not reply["text"] or len(data) >= reply["n_bytes"]:
            return data.decode(errors="replace")


def _row(row: dict[str, Any]) -> Row:
    values = {f.name: row[f.name] for f in fields(Row)}
    return Row(**{**values, "shape": tuple(row["shape"]), "flops": float(row["flops"])})


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


def annotate(data: bytes, sources: tuple, notes: list[dict[str, Any]]) -> bytes:
    """Adds metadata and doc strings to a model's nodes that tell what a plan made of them."""
    import onnx

    model = onnx.load_model_from_string(data)
    _add_sources(model, sources)
    for node, said in zip(model.graph.node, notes, strict=True):
        node.doc_string = said["sentence"]
        for key, value in said["notes"].items():
            node.metadata_props.add(key=key, value=value)
    return model.SerializeToString()


def main() -> None:
    """`python -m gradd.explain [arguments of gradd explain]`."""
    from gradd.session import daemon

    binary = daemon.find_binary()
    where = os.environ.get("GRADD_DIR") or str(daemon.directory())
    os.execve(binary, [binary, "explain", *sys.argv[1:]], {**os.environ, "GRADD_DIR": where})


if __name__ == "__main__":
    main()

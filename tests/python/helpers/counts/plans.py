"""Counts of recognised operators: gradd's plan for a model beside its authors' source.

A Row says how many operators of each kind a reader of the model's source finds in its forward;
counts() finds the same in the plan that `gradd explain` prints. Whatever else is left of
activations, normalisation, attention or losses (explain's `leftover` rows) is in leftovers().
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from conftest import BINARY

from helpers.graphs import captures


class Row(NamedTuple):
    """Operators of the forward of one family.

    norm: RMS and layer normalisations. rope: rotary embeddings, of queries and keys. attention:
    self and cross. gated: SwiGLU and its kin. gelu: GELU in any form. linear: products with a bias.
    product: products without. table: embeddings, sums of them as one, and rows or columns that are
    picked by number. loss: cross-entropies.
    drop_add: dropouts that go into a residual sum. drop: dropouts that stand alone.
    """

    norm: int = 0
    rope: int = 0
    attention: int = 0
    gated: int = 0
    gelu: int = 0
    linear: int = 0
    product: int = 0
    table: int = 0
    loss: int = 1
    drop_add: int = 0
    drop: int = 0


KINDS = {
    "norm": ("RMSNormalization", "LayerNormalization"),
    "rope": ("Rope", "RopeApart"),
    "attention": ("FusedAttention",),
    "gated": ("GatedActivation",),
    "gelu": ("Gelu",),
    "linear": ("Linear",),
    "product": ("MatMul", "FusedMatMul", "Gemm"),
    "table": ("EmbeddingSum", "Gather"),
    "loss": ("CrossEntropy",),
    "drop_add": ("DropoutAdd",),
    "drop": ("Dropout",),
}


def explained(
    model: torch.nn.Module,
    batch: dict[str, torch.Tensor] | tuple[torch.Tensor, ...],
    path: Path,
    *options: str,
) -> dict[str, Any]:
    """The plan of one training step, as `gradd explain` prints it; the model is written to path."""
    args, named = ((), batch) if isinstance(batch, dict) else (batch, {})
    made = captures.capture(model, args, named)
    cap = made.cap
    path.write_bytes(cap.onnx)
    sizes = {i.name: made.values[i.name].shape for i in cap.inputs}
    given = [f"{n}={'x'.join(map(str, shape))}" for n, shape in sizes.items()]
    trained = ["--train", ",".join(cap.params), "--json"]
    command = [str(BINARY), "explain", str(path), *given, *trained, *options]
    return json.loads(subprocess.check_output(command, text=True, timeout=60))


def counts(plan: dict[str, Any]) -> Row:
    """Planned operators of the forward, by kind."""
    ops = Counter(r["op"] for r in plan["rows"] if r["phase"] == "forward" and r["launch"] >= 0)
    return Row(**{kind: sum(ops[op] for op in names) for kind, names in KINDS.items()})


def leftovers(plan: dict[str, Any]) -> dict[str, int]:
    """Operators that are left of patterns."""
    return dict(Counter(r["op"] for r in plan["rows"] if r["leftover"]))


def check(plan: dict[str, Any], row: Row, allowed: dict[str, int]) -> None:
    """Raises AssertionError, which names the kinds, where the plan is not what the row says."""
    found = counts(plan)
    differ = {
        kind: f"{getattr(found, kind)} planned, {getattr(row, kind)} written"
        for kind in Row._fields
        if getattr(found, kind) != getattr(row, kind)
    }
    assert not differ, differ
    where = [(r["op"], r["node_name"]) for r in plan["rows"] if r["leftover"]]
    assert leftovers(plan) == allowed, f"left over: {where}, allowed: {allowed}"

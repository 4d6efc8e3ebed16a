"""docs/operators.md: the operator table, from the output of `gradd --list-ops --json`."""

from __future__ import annotations

import itertools

import page_text

HEAD = """# Operators

What `gradd` runs, generated from the operator table by `make pages` (`gradd --list-ops` prints the
same). A model may use ONNX opset 13 to 25 and `com.gradd` 1. A graph with any other operator loads,
is named in the reply to `graph.put`, and falls back to PyTorch. Names without a domain are ONNX's.
An operator, its gradient and its reference are in `kernels/ops/`, a file for each family: that with
`GRADD_OPS` and its name.

"Types" lists the element types of each input, separated by semicolons, the last one for all further
inputs; "2 floats" stands for two inputs. [kernels.md](kernels.md) says what runs an operator on
a device, and for which of these types; a half that no kernel takes is cast to f32 and back. So is
to i32 an integer of 8 or 16 bits where i32 is among the types.

| Short | Types |
| --- | --- |
| floats | f32, f64, bf16, f16 |
| mixed | f32, f64, bf16, f16, bool |
| numbers | f32, f64, bf16, f16, i32, i64 |
| integers | i32, i64 |
| any | every type |

"""
ATTRIBUTES = """
## Attributes

A required attribute is bold. Operators that are not listed take none.

"""
INTERNAL = """
## Internal

Emitted by gradient rules and passes; refused when a model contains them.

"""
COLUMNS = ["Operator", "Opset", "Inputs", "Outputs", "Gradient", "Types"]
UNBOUNDED = 64  # GRADD_OP_MAX_IN
SHORT = {
    frozenset({"f32", "f64", "bf16", "f16"}): "floats",
    frozenset({"f32", "f64", "bf16", "f16", "bool"}): "mixed",
    frozenset({"f32", "f64", "bf16", "f16", "i32", "i64"}): "numbers",
    frozenset({"i32", "i64"}): "integers",
}


def span(bounds: list[int]) -> str:
    """ "1", "1-3" or "1+" for [min, max]."""
    low, high = bounds
    if high >= UNBOUNDED:
        return f"{low}+"
    return str(low) if low == high else f"{low}-{high}"


def opset(row: dict) -> str:
    """The opset range of a row: "13+" or "1-12"."""
    return f"{row['since']}+" if row["until"] is None else f"{row['since']}-{row['until']}"


def short(types: str | list[str]) -> str:
    """The types of one input, by the name of the set where it has one."""
    if isinstance(types, str):
        return types
    return SHORT.get(frozenset(types), " ".join(types))


def types(row: dict) -> str:
    """The types of all inputs; those of neighbours that are alike are said once."""
    runs = [(text, len(list(same))) for text, same in itertools.groupby(map(short, row["types"]))]
    return "; ".join(text if n == 1 else f"{n} {text}" for text, n in runs)


def name(row: dict) -> str:
    """The operator with its domain."""
    return row["name"] if row["domain"] == "ai.onnx" else f"{row['domain']} {row['name']}"


def table(rows: list[dict]) -> str:
    """A markdown table of these rows."""
    return page_text.table(
        COLUMNS,
        [
            (
                name(row),
                opset(row),
                span(row["inputs"]),
                span(row["outputs"]),
                "yes" if row["gradient"] else "no",
                types(row),
            )
            for row in rows
        ],
    )


def attributes(rows: list[dict]) -> str:
    """A list of operators with their attributes, required ones in bold."""
    texts = []
    for row in (row for row in rows if row["attributes"]):
        names = (f"**{a['name']}**" if a["required"] else a["name"] for a in row["attributes"])
        texts.append(f"{name(row)}: {', '.join(names)}")
    return page_text.items(texts)


def page(rows: list[dict]) -> str:
    """The whole page for the rows of `gradd --list-ops --json`."""
    models = [row for row in rows if row["from_model"]]
    internal = [row for row in rows if not row["from_model"]]
    text = HEAD + table(models) + ATTRIBUTES + attributes(models)
    return text + (INTERNAL + table(internal) if internal else "")

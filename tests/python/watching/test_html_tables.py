"""What a notebook shows of statistics and of an explanation."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from gradd import ORTModule
from gradd.html_tables import Stats
from gradd.memory.budget import amount
from helpers.nets import Net, batch


def cells(html: str) -> list[list[str]]:
    """Rows of all tables; not well-formed HTML is an error."""
    rows = ElementTree.fromstring(html).iter("tr")
    return [["".join(cell.itertext()) for cell in row] for row in rows]


def test_statistics_stay_a_dict_and_are_escaped() -> None:
    stats = Stats({"forwards": 3, "in_torch": {"<op> & co": 2}, "wait_ms": 1.23456, "breaks": {}})
    assert cells(stats._repr_html_()) == [
        ["forwards", "3"],
        ["in_torch", "<op> & co 2"],
        ["wait_ms", "1.235"],
        ["breaks", "none"],
    ]
    assert stats == dict(stats) and json.loads(json.dumps(stats)) == stats
    assert pickle.loads(pickle.dumps(stats))["in_torch"] == {"<op> & co": 2}


@pytest.mark.usefixtures("shared_daemon")
def test_statistics_and_explanation_of_a_module() -> None:
    model = ORTModule(Net(), strict=True)
    x, y = batch()
    model(x, y)
    stats = model.gradd_stats()
    assert ["forwards", str(stats["forwards"])] in cells(stats._repr_html_())
    found = model.gradd_explain()
    rows = cells(found._repr_html_())
    assert ["planned peak of one run", amount(found.arena_bytes)] in rows
    launches = [r for r in found.rows if r.launch >= 0]
    names = [r[0].split(" <- ")[0] for r in rows if len(r) == 8]
    forward, backward = ([r.op for r in launches if r.phase == p] for p in ("forward", "backward"))
    assert names == ["operator", *forward, "operator", *backward] and forward and backward
    first = replace(found.rows[launches[0].row], place="<lambda> & </td>")
    odd = replace(found, title="<b>", rows=(first,))
    assert cells(odd._repr_html_())[-2][-1] == "<lambda> & </td>"

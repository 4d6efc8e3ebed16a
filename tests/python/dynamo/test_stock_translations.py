"""The table of translations is torch's own, made row by row, with gradd's in front."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradd import private
from gradd.graph.translation import stock

_aten = torch.ops.aten


@pytest.fixture(scope="module")
def whole() -> Any:
    """torch's table of its whole library."""
    return private.ONNXRegistry.from_torchlib(stock.OPSET)


def _rows(registry: Any, target: Any) -> list[tuple[Any, bool]]:
    return [(row.onnx_function, row.is_complex) for row in registry.get_decomps(target)]


def _targets(whole: Any) -> Iterator[Any]:
    for rows in whole.functions.values():
        yield rows[0].fx_target


def test_each_row_is_the_one_of_the_whole_table(whole: Any) -> None:
    table, own = stock.Table(), stock.own()
    found = list(_targets(whole))
    assert len(found) > 500
    for target in found:
        rows, name = _rows(table, target), getattr(target, "name", str)
        count = len(own.get(name() if callable(name) else "", ()))
        assert rows[count:] == _rows(whole, target), target
        assert all(row.is_custom for row in table.get_decomps(target)[:count]), target


def test_no_operator_has_a_row_more(whole: Any) -> None:
    table, own = stock.Table(), stock.own()
    for target in private.decompositions:
        known = whole.is_registered(target) or target.name() in own
        assert table.is_registered(target) is known is bool(table.get_decomps(target)), target
    assert not table.is_registered(torch.ops.transformers) and not table.get_decomps(len)


@pytest.mark.quick
def test_a_row_is_made_where_a_graph_has_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    real = stock.from_library
    monkeypatch.setattr(stock, "from_library", lambda names: asked.extend(names) or real(names))
    table = stock.Table()
    for _ in range(2):
        assert table.is_registered(_aten.relu.default) and table.is_registered(_aten.tan.default)
        assert len(table.get_decomps(_aten.tan.default)) == 1
    assert asked == ["aten::tan"]
    assert set(real(["aten::tan"]).functions) - set(real([]).functions) == {"aten::tan"}


@pytest.mark.quick
def test_the_library_stays_whole() -> None:
    before = len(list(stock.registration.default_registry))
    with pytest.raises(ZeroDivisionError), stock._only(["aten::tan"]):
        assert len(list(stock.registration.default_registry)) == 1
        raise ZeroDivisionError
    assert len(list(stock.registration.default_registry)) == before > 500

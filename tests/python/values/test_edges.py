"""Torch's operations on edge data, against eager torch (the table is in helpers/edges).

In each run: every row that was once found wrong, and a twentieth of the others (selection.py).
The whole table, bf16 and the route through torch's decomposition too, is a nightly test.
"""

from __future__ import annotations

import pytest
import torch

from gradd import ORTModule
from gradd.errors import GraddError, UnsupportedError
from gradd.spec import CaptureError
from helpers.edges import (
    layers,
    losses,
    other_names,
    pointwise,
    reductions,
    row_notes,
    rows,
    shapes,
)
from helpers.selection import SEED, drawn, one_in

THEMES = (
    *(pointwise, reductions, losses, layers, shapes),
    other_names,
)
TABLE = {row.name: row for theme in THEMES for row in theme.ROWS}
WITHIN_F16 = [kind for kind in rows.DATA if kind != "1e5"]
RUNNABLE = [name for name in TABLE if name not in row_notes.REFUSED]


def _drawn() -> list[str]:
    others = set(RUNNABLE) - row_notes.FOUND_WRONG
    return drawn(others, len(others) // 20)


def _check(name: str, **options) -> None:
    found = rows.compare(TABLE[name], **options)
    assert not found, f"GRADD_DRAW={SEED}\n" + "\n".join(found)


def _check_or_refused(name: str, refused: dict[str, str], **options) -> None:
    if name not in refused:
        _check(name, **options)
        return
    with pytest.raises((CaptureError, GraddError)) as error:
        rows.compare(TABLE[name], **options)
    assert refused[name] in str(error.value)


def test_the_notes_name_rows():
    assert len(TABLE) == sum(len(theme.ROWS) for theme in THEMES), "two rows of one name"
    notes = {*row_notes.FOUND_WRONG, *row_notes.SKIP, *row_notes.NOISE, *row_notes.REFUSED}
    notes |= {*row_notes.NOT_IN_F16, *row_notes.REFUSED_IN_EVAL}
    assert {*row_notes.NOT_IN_BF16} <= {*row_notes.NOT_IN_F16}
    notes |= {*row_notes.REFUSED_WITHOUT_ROWS, *row_notes.NOT_IN_DOUBLES}
    assert not notes - set(TABLE)
    kinds = {kind for reasons in row_notes.SKIP.values() for kind in reasons}
    assert not kinds - {*rows.DATA, rows.EMPTY}


@pytest.mark.parametrize("name", one_in(2, sorted(row_notes.FOUND_WRONG)))
def test_what_was_wrong(name, shared_daemon):
    _check(name)


@pytest.mark.parametrize("name", _drawn())
def test_a_twentieth(name, shared_daemon):
    _check(name)


@pytest.mark.parametrize("name", [n for n in _drawn() if n not in row_notes.NOT_IN_DOUBLES])
def test_a_twentieth_in_doubles(name, shared_daemon):
    _check(name, dtype=torch.float64)


@pytest.mark.parametrize("name", [n for n in _drawn() if n not in row_notes.NOT_IN_F16])
def test_a_twentieth_in_f16(name, shared_daemon):
    _check(name, dtype=torch.float16, kinds=WITHIN_F16)


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(set(RUNNABLE) - row_notes.FOUND_WRONG))
def test_whole_table(name, shared_daemon):
    _check(name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [n for n in RUNNABLE if n not in row_notes.NOT_IN_BF16])
def test_whole_table_in_bf16(name, shared_daemon):
    _check(name, dtype=torch.bfloat16)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [n for n in RUNNABLE if n not in row_notes.NOT_IN_F16])
def test_whole_table_in_f16(name, shared_daemon):
    _check(name, dtype=torch.float16, kinds=WITHIN_F16)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [n for n in RUNNABLE if n not in row_notes.NOT_IN_DOUBLES])
def test_whole_table_in_doubles(name, shared_daemon):
    _check(name, dtype=torch.float64)


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNNABLE)
def test_whole_table_decomposed(name, shared_daemon):
    _check(name, decomposed=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNNABLE)
def test_whole_table_without_gradients(name, shared_daemon):
    _check_or_refused(name, row_notes.REFUSED_IN_EVAL, train=False)


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNNABLE)
def test_whole_table_without_rows(name, shared_daemon):
    _check_or_refused(name, row_notes.REFUSED_WITHOUT_ROWS, kinds=[rows.EMPTY])


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(row_notes.REFUSED))
def test_refused_by_name(name, shared_daemon):
    with pytest.raises((CaptureError, UnsupportedError, RuntimeError)) as error:
        rows.compare(TABLE[name])
    assert row_notes.REFUSED[name] in str(error.value)


@pytest.mark.parametrize("name", ["flatten", "unfold image"])
def test_sizes_of_a_batch_without_rows(name, shared_daemon):
    _check(name, kinds=[rows.EMPTY])


@pytest.mark.quick
def test_half_of_bf16_values_lie_on_bounds(shared_daemon):
    """Where equality is common another subgradient shows at once."""
    for name in ("clamp_", "hardtanh", "relu6", "max dim", "maximum"):
        _check(name, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "name",
    (
        *("remainder 0.1", "fmod 0.1", "remainder of 0.1", "comparisons 0.3", "equals 0.3"),
        *("hardshrink 0.3", "softshrink 0.3", "hardtanh 0.7", "div trunc 0.3", "signbit"),
    ),
)
def test_numbers_beside_bf16_are_rounded_where_torch_does(name, shared_daemon):
    _check(name, dtype=torch.bfloat16)


class _Padded(torch.nn.Module):
    """A table of the call's own rows, whose last but one is padding."""

    def forward(self, table, indices):
        return torch.nn.functional.embedding(indices, 2 * table, padding_idx=-2)


def test_a_negative_padding_index_counts_from_the_rows_of_the_call(shared_daemon):
    wrapped = ORTModule(_Padded(), strict=True)
    for count in (5, 7, 5, 4):
        indices = torch.arange(count)
        tables = [torch.ones(count, 3, requires_grad=True) for _ in range(2)]
        for module, table in zip((_Padded(), wrapped), tables, strict=True):
            module(table, indices).sum().backward()
        assert torch.equal(tables[0].grad, tables[1].grad)
    assert wrapped.gradd_stats()["captures"] == 1


def test_a_result_without_slope_has_gradients_of_zeros(shared_daemon):
    class Floor(torch.nn.Linear):
        def forward(self, x):
            return torch.div(super().forward(x), 0.3, rounding_mode="floor")

    wrapped = ORTModule(Floor(3, 2), strict=True)
    wrapped(torch.ones(4, 3)).sum().backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in wrapped.parameters())


def test_a_variance_far_from_zero_keeps_its_digits(shared_daemon):
    class Variances(torch.nn.Module):
        def forward(self, x):
            return x.var(-1), x.var(), torch.var_mean(x, 0)[0], x.std(-1)

    x = 1e4 + torch.randn(6, 8, generator=torch.Generator().manual_seed(0)) * 1e-2
    found = ORTModule(Variances(), strict=True)(x)
    for got, want in zip(found, Variances()(x.double()), strict=True):
        assert torch.allclose(got.double(), want, rtol=1e-6)

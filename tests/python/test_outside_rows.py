"""Reads that leave no trace in the bytecode of forward(): seen when they change, or refused."""

from __future__ import annotations

import outside_encoded
import outside_handed
import outside_memory
import outside_patterns
import pytest
from outside_rows import Row, follow

pytestmark = pytest.mark.usefixtures("shared_daemon")
_TABLES: tuple[dict[str, Row], ...] = (
    outside_patterns.ENDS,
    outside_patterns.PATTERNS,
    outside_patterns.STRANGERS,
    outside_handed.CALLED,
    outside_encoded.COMPARED,
    outside_encoded.ENCODED,
    outside_memory.ARRAYS,
    outside_memory.BUFFERS,
)
ROWS = {name: row for table in _TABLES for name, row in table.items()}


@pytest.mark.parametrize("name", ROWS)
def test_a_change_is_seen_or_its_reading_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    follow(ROWS[name])

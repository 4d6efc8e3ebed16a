"""Trials of a capture leave no trace outside: PyTorch's results, and PyTorch's state afterwards."""

from __future__ import annotations

import outside_undone
import pytest

pytestmark = pytest.mark.usefixtures("shared_daemon")
_LISTS = (
    outside_undone.BACKWARDS,
    outside_undone.IN_PLACE,
    outside_undone.MOVED,
    outside_undone.LOCKS,
)
DEEDS = {f"{deed.does} {i}": deed for i, deed in enumerate(d for found in _LISTS for d in found)}


@pytest.mark.parametrize("name", DEEDS)
def test_a_trial_leaves_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    outside_undone.follow(DEEDS[name])

"""Trials of a capture leave no trace outside: PyTorch's results, and PyTorch's state afterwards."""

from __future__ import annotations

import outside_undone
import pytest
from selection import one_in

pytestmark = pytest.mark.usefixtures("shared_daemon")
DEEDS = outside_undone.named(
    outside_undone.BACKWARDS,
    outside_undone.IN_PLACE,
    outside_undone.MOVED,
    outside_undone.LOCKS,
)


@pytest.mark.parametrize("name", one_in(2, DEEDS))
def test_a_trial_leaves_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    outside_undone.follow(DEEDS[name])

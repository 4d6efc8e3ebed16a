"""Two nodes, a process and a daemon on each, train one model: torchrun, accelerate, Ray."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import nodes, torchrun

pytestmark = pytest.mark.nightly


@pytest.fixture
def both(tmp_path: Path) -> Iterator[list[nodes.Node]]:
    if why := nodes.why_not():
        pytest.skip(why)
    with nodes.two(tmp_path) as made:
        yield made


@pytest.mark.parametrize("by", [torchrun.torchrun_of, torchrun.accelerate_of])
def test_two_nodes_have_the_gradient_of_one_process(
    by: torchrun.OnNode, both: list[nodes.Node], tmp_path: Path
) -> None:
    if by is torchrun.accelerate_of and importlib.util.find_spec("accelerate") is None:
        pytest.skip("there is no accelerate")
    cases = ("plain", "no_sync" if by is torchrun.torchrun_of else "prepared")
    found = torchrun.launch_on(both, tmp_path, *cases, by=by)
    for case in cases:
        torchrun.assert_gradients(found, case)
    assert len({rank["daemon"] for rank in found}) == 2

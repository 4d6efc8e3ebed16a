"""ONNX's own tests of nodes, for operators whose attributes have many forms.

Their models and values come with the package onnx. OPERATORS names what is tested so.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from onnx.backend.test.case.node import collect_testcases
from onnx.backend.test.case.test_case import TestCase

from helpers.graphs import engine as E

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of making values

# Operator, and how many tests of it there are at least.
OPERATORS = {"Conv": 6, "ConvTranspose": 11}


@functools.lru_cache(maxsize=1)
def cases() -> dict[str, list[TestCase]]:
    """Those of single nodes, by operator; the package makes all, in 5 s."""
    found: dict[str, list[TestCase]] = {name: [] for name in OPERATORS}
    for case in collect_testcases(None):
        nodes = case.model.graph.node
        if len(nodes) == 1 and nodes[0].op_type in found:
            found[nodes[0].op_type].append(case)
    return found


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("plain", [False, True])
def test_values_are_those_of_onnx(name: str, plain: bool) -> None:
    """Plain plans compute expansions."""
    assert len(cases()[name]) >= OPERATORS[name]
    for case in cases()[name]:
        for inputs, expected in case.data_sets:
            names = [i.name for i in case.model.graph.input]
            feeds = dict(zip(names, inputs, strict=True))
            plan = E.Plan(E.Model(case.model.SerializeToString()), feeds, plain=plain)
            found = E.Run(plan).forward(feeds).values()
            for got, want in zip(found, expected, strict=True):
                assert got.shape == want.shape, case.name
                np.testing.assert_allclose(got, want, 1e-5, 1e-5, err_msg=case.name)

"""Einsum: equations against numpy, and what is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from helpers.graphs import engine as E

pytestmark = pytest.mark.quick


def computed(equation: str, *shapes: tuple[int, ...]) -> tuple[np.ndarray, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    names = [f"x{i}" for i in range(len(arrays))]
    info = helper.make_tensor_value_info
    inputs = [info(n, TensorProto.DOUBLE, a.shape) for n, a in zip(names, arrays, strict=True)]
    node = helper.make_node("Einsum", names, ["y"], equation=equation)
    graph = helper.make_graph([node], "g", inputs, [info("y", TensorProto.DOUBLE, None)])
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    feeds = dict(zip(names, arrays, strict=True))
    plan = E.Plan(E.Model(model.SerializeToString()), feeds)
    (found,) = E.Run(plan).forward(feeds).values()
    return found, arrays


EQUATIONS = {
    "ab,bc,cd,de->ea": ((2, 3), (3, 4), (4, 5), (5, 2)),
    "abc,abc->": ((2, 3, 4), (2, 3, 4)),
    "abc,cd,be->aed": ((2, 3, 4), (4, 2), (3, 5)),
    "i,j,k->kji": ((2,), (3,), (4,)),
    "aB,Bc": ((2, 3), (3, 4)),
    "zi,z": ((2, 3), (2,)),
    " b i , b j -> i j ": ((4, 2), (4, 3)),
    "...ij->...ji": ((2, 5, 3, 4),),
    "i...,i...": ((3, 2, 4), (3, 2, 4)),
    "abc->b": ((2, 3, 4),),
    ",i->i": ((), (3,)),
    "bhwc,hkc,wkc->bhwk": ((2, 3, 4, 5), (3, 6, 5), (4, 6, 5)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_an_equation_is_numpys(equation: str) -> None:
    found, arrays = computed(equation, *EQUATIONS[equation])
    expected = np.einsum(equation, *arrays)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


REFUSED = {
    "ii->i": (((3, 3),), "an axis twice in a term"),
    "ij,jk->ik": (((2, 3), (4, 5)), "axis 0 of input 1 has 4 elements, others .* have 3"),
    "ij->ij ": (((2, 3, 4),), "2 axes for input 0, which has 3"),
    "ij,jk->il": (((2, 3), (3, 5)), "an axis 'l' that no input has"),
    "ij": (((2, 3), (3, 5)), "1 terms for 2 inputs"),
    "ij,jk": (((2, 3),), "goes on with ',jk' behind its 1 terms"),
    "i1": (((2, 3),), "has '1' where a letter is expected"),
    "i.j": (((2, 3),), "has '.j' where a letter is expected"),
    "ij>": (((2, 3),), "has '>' where a letter is expected"),
    "ij-": (((2, 3),), "goes on with '-'"),
    "ij->i,j": (((2, 3),), "goes on with ',j' behind its result"),
    "i\xe9": (((2, 3),), "has a byte 195, where a letter is expected"),
    "......": (((2, 3),), "where a letter is expected"),
}


@pytest.mark.parametrize("equation", REFUSED)
def test_refused_by_name(equation: str) -> None:
    shapes, words = REFUSED[equation]
    with pytest.raises(E.EngineError, match=words):
        computed(equation, *shapes)

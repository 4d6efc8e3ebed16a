"""ONNX's own node tests, as its package makes them, of operators whose reference is not exact.

REFUSED names tests with what the daemon says that it does not have.
"""

from __future__ import annotations

import copy
import functools
import importlib
import warnings

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from helpers.graphs import engine as E

pytestmark = pytest.mark.quick
STRINGS = onnx.AttributeProto.STRINGS

OPERATORS = (
    *("BatchNormalization", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"),
    *("Resize", "GridSample", "Col2Im", "GRU", "LSTM", "RNN"),
)
MODULES = {"BatchNormalization": "batch_normalization"}
# Part of a test's name -> part of the error.
REFUSED = {
    "argmax_2d_precomputed_strides": "storage_order",
    "tf_crop_and_resize": "tf_crop_and_resize",
    "lstm_with_peepholes": "sequence_lens",
    "averagepool_3d_dilations": "dilations",
    "averagepool_2d_dilations": "dilations",
}


@functools.cache
def _tests() -> dict:
    """Importing the module of an operator makes its tests."""
    from onnx.backend.test.case import node

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for name in OPERATORS:
            importlib.import_module(f"{node.__name__}.{MODULES.get(name, name.lower())}")
        return {case.name: case for case in node._NodeTestCases}


def _arrays(values) -> list[np.ndarray]:
    return [v if isinstance(v, np.ndarray) else numpy_helper.to_array(v) for v in values]


def _ours(case, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Sizes and scales are constants of the model, as plans need them."""
    model = copy.deepcopy(case.model)
    names = [value.name for value in model.graph.input]
    feeds = dict(zip(names, map(np.ascontiguousarray, inputs), strict=True))
    if model.graph.node[0].op_type in ("Resize", "Col2Im"):
        for name in names[1:]:
            model.graph.initializer.append(numpy_helper.from_array(feeds.pop(name), name))
        del model.graph.input[1:]
    plan = E.Plan(E.Model(model.SerializeToString()), feeds)
    return list(E.Run(plan).forward(feeds).values())


@pytest.mark.parametrize("operator", OPERATORS)
def test_nodes_give_what_onnx_says(operator):
    wrong, count = [], 0
    for name, case in _tests().items():
        if case.model.graph.node[0].op_type != operator or "uint8" in name:
            continue
        refused = next((text for part, text in REFUSED.items() if part in name), None)
        for inputs, outputs in case.data_sets:
            try:
                found = _ours(case, _arrays(inputs))
            except E.EngineError as error:
                if refused is None or refused not in str(error):
                    wrong.append(f"{name}: {error}")
                continue
            count += 1
            if refused is not None:
                wrong.append(f"{name}: is not refused")
            for got, want in zip(found, _arrays(outputs), strict=True):
                if got.shape != want.shape or not np.allclose(got, want, case.rtol, case.atol):
                    wrong.append(f"{name}: {got.ravel()[:6]} for {want.ravel()[:6]}")
    assert not wrong, "\n" + "\n".join(wrong)
    assert count


FUNCTIONS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}


@pytest.mark.parametrize("operator", FUNCTIONS)
def test_a_layer_may_list_its_usual_functions(operator):
    """ONNX's own tests have no lists; others than these are refused by name."""
    name = f"test_{operator.lower() if operator != 'RNN' else 'simple_rnn'}_defaults"
    case = copy.copy(_tests()[name])
    plain = case.model
    listed = {}
    for functions in (FUNCTIONS[operator], ["Relu", *FUNCTIONS[operator][1:]], []):
        case.model = copy.deepcopy(plain)
        attribute = onnx.helper.make_attribute("activations", functions, attr_type=STRINGS)
        case.model.graph.node[0].attribute.append(attribute)
        listed[tuple(functions)] = case.model
    usual, other, none = listed.values()
    inputs, outputs = (_arrays(values) for values in case.data_sets[0])
    case.model = usual
    for got, want in zip(_ours(case, inputs), outputs, strict=True):
        np.testing.assert_allclose(got, want, case.rtol, case.atol)
    first = FUNCTIONS[operator][0]
    with pytest.raises(E.EngineError, match=f"'activations': function 0 is not {first}"):
        E.Model(other.SerializeToString())
    with pytest.raises(E.EngineError, match="'activations'"):
        E.Model(none.SerializeToString())

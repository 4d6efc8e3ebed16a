"""One exception class per status code, the same list in C and Python; errors that name things."""

from __future__ import annotations

import pickle
import re

import onnx
import pytest
import torch
from accelerate.utils import find_executable_batch_size

from gradd import ORTModule, errors, options
from gradd.session import protocol
from helpers import ROOT
from helpers.nets import Net, batch
from helpers.sessions import session

STATUS = ROOT / "shm" / "status.h"


def _codes_in_c() -> list[str]:
    text = STATUS.read_text()
    body = text[text.index("#define GRADD_STATUS_MAP(X)") : text.index("typedef enum")]
    return re.findall(r"X\((\w+)\) +/", body)


@pytest.mark.quick
def test_the_lists_in_c_and_python_are_one() -> None:
    assert list(errors.BY_CODE) == _codes_in_c()
    for code, cls in errors.BY_CODE.items():
        assert issubclass(cls, errors.GraddError) and cls.code == code


@pytest.mark.quick
@pytest.mark.parametrize("code", list(errors.BY_CODE))
def test_errors_carry_code_and_sentence_and_can_be_pickled(code: str) -> None:
    error = errors.from_code(code, "input 'x': expected f32[2], got f32[3]", "lost")
    assert type(error) is errors.BY_CODE[code]
    assert f"GRADD_E_{code}" in str(error) and "got f32[3]" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.session) == (type(error), str(error), "lost")


def test_unknown_code_of_a_newer_daemon() -> None:
    error = errors.from_code("QUOTA", "too much")
    assert type(error) is errors.GraddError and "QUOTA" in str(error)


@pytest.mark.quick
def test_builtin_parents() -> None:
    assert issubclass(errors.TensorError, ValueError)
    assert issubclass(errors.IndexOutOfRangeError, IndexError)
    assert issubclass(errors.OutOfMemoryError, MemoryError)
    assert issubclass(errors.UnsupportedError, NotImplementedError)


def test_out_of_memory_makes_accelerate_try_a_smaller_batch() -> None:
    tried = []

    @find_executable_batch_size(starting_batch_size=8)
    def run(size: int) -> int:
        tried.append(size)
        if size > 2:
            raise errors.from_code("NOMEM", f"the run needs {size} GiB, 2 GiB are free")
        return size

    assert run() <= 2
    assert tried[0] == 8 and len(tried) > 1


@pytest.mark.quick
def test_options_have_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_LAZY", "no")
    assert options.get("GRADD_LAZY") is False
    monkeypatch.setenv("GRADD_LAZY", "perhaps")
    with pytest.raises(ValueError, match="GRADD_LAZY='perhaps'"):
        options.get("GRADD_LAZY")
    monkeypatch.setenv("ORTMODULE_USE_TRITON", "1")
    monkeypatch.setenv("ORTMODULE_NEVER_HEARD_OF", "1")
    named = "\n".join(options.ineffective())
    assert "ORTMODULE_USE_TRITON (no Triton here)" in named
    assert "ORTMODULE_NEVER_HEARD_OF (unknown)" in named
    assert all(o.help for o in options.OPTIONS)


@pytest.mark.parametrize("name", [o.name for o in options.OPTIONS if o.kind in ("bool", "int")])
def test_a_wrong_option_is_an_error_where_a_module_is_wrapped(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "/some/folder")
    with pytest.raises(ValueError, match=f"{name}='/some/folder': expected"):
        ORTModule(torch.nn.Linear(1, 1))


@pytest.mark.usefixtures("daemon")
def test_wrong_dtype_is_an_error_as_in_torch() -> None:
    model = ORTModule(Net())
    model(*batch())
    x, y = batch()
    with pytest.raises(RuntimeError, match="same dtype"):
        model(x.double(), y)
    model(x, y)[0].backward()


@pytest.mark.usefixtures("daemon")
def test_index_out_of_range_names_the_node_and_the_session_goes_on() -> None:
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(10, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids).sum()

    model = ORTModule(Table(), strict=True)
    model(torch.tensor([1, 2, 3])).backward()
    with pytest.raises(IndexError, match="10"):
        model(torch.tensor([1, 10, 3]))
    model(torch.tensor([4, 5, 6])).backward()
    assert model.table.weight.grad[1:7].eq(1).all()


WRONG = (1, (4, 5))  # does not fit where [3, 5] would


def _refusal(name: str, sources: list[tuple[str, str]], x: protocol.Type = (1, (2, 3))) -> str:
    """The error of the daemon for a product of x and w that has this name."""
    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"], name=name)
    inputs = [value("x", 1, [2, "n"]), value("w", 1, [None, 5])]
    graph = onnx.helper.make_graph([node], "g", inputs, [value("y", 1, [2, 5])])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)])
    client = session()
    info = client.put_graph(model.SerializeToString(), sources)
    with pytest.raises(errors.GraddError) as caught:
        client.plan(protocol.plan_fields(info.id, [x, WRONG], (), (), ("y",), ()))
    return str(caught.value)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    "name", ["product", "two words", "it's 'quoted'", "'", "''", "a: node 0 'x' (Add)", "é" * 50]
)
def test_source_of_a_node_of_any_name(name: str) -> None:
    others = [("'", "no @ no.py:1"), ("x", "no @ no.py:2"), ("quoted", "no @ no.py:3")]
    sources = [(n, s) for n, s in others if n != name]
    text = _refusal(name, [*sources, (name, "net.layer @ /a/net.py:7")])
    assert f"node 0 '{name[:60]}" in text and text.endswith(" (from net.layer, net.py:7)")
    assert text.count("(from ") == 1


@pytest.mark.usefixtures("daemon")
def test_what_is_quoted_need_not_be_a_node() -> None:
    """Input and node may have one name; without a name there is no source, nor with a cut one."""
    known = [("x", "net.layer @ /a/net.py:7"), ("", "other @ /a/net.py:8")]
    said = _refusal("x", known, (7, (2, 3)))
    assert "input 'x'" in said and "(from" not in said
    assert _refusal("x", known).endswith(" (from net.layer, net.py:7)")
    assert "node 0 'node_0'" in _refusal("", known) and "(from" not in _refusal("", known)
    long = "n" * 300
    assert "(from" not in _refusal(long, [(long[:120], "cut @ c.py:1"), (long, "long @ l.py:1")])

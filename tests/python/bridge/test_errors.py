"""One exception class per status code, the same list in C and Python; errors that name things."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import torch
from accelerate.utils import find_executable_batch_size
from nets import Net, batch

from gradd import ORTModule, errors, options

STATUS = Path(__file__).resolve().parents[3] / "shm" / "status.h"


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

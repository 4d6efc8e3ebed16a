"""What answers otherwise while a call is captured: never a number that only a trace would give."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import assert_close
from outside_cases import Base
from torch import nn
from torch.overrides import has_torch_function, has_torch_function_unary
from torch.utils import _python_dispatch

from gradd import ORTModule, export

pytestmark = pytest.mark.usefixtures("shared_daemon")
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class Asks(Base):
    """A layer whose result is scaled by an answer about its value."""

    def __init__(self, question: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.question = (question,)  # a module's functions would be in its key

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        return y * (1.0 + float(self.question[0](y)))


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "has_torch_function": lambda x: has_torch_function((x,)),
    "of one": has_torch_function_unary,
    "in C": lambda x: torch._C._has_torch_function_variadic(x, 1),
    "a mode of functions": lambda x: torch._C._is_torch_function_mode_enabled(),
    "modes of functions": lambda x: len(torch.overrides._get_current_function_mode_stack()),
    "modes of operators": lambda x: torch._C._len_torch_dispatch_stack(),
    "in Python": lambda x: len(_python_dispatch._get_current_dispatch_mode_stack()),
    "a backend": lambda x: torch.backends.mkldnn.enabled,
    "a backend in C": lambda x: torch._C._get_mkldnn_enabled(),
    "hooks of autograd": lambda x: (
        torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    ),
    "filters of warnings": lambda x: len(warnings.filters),
    "filters by name": lambda x: len(getattr(warnings, "filters")),  # noqa: B009
    "a class by name": lambda x: type(x).__name__ == "Tensor",
    "of the attribute": lambda x: x.__class__.__qualname__ == "Tensor",
    "its module": lambda x: type(x).__module__ == "torch",
    "its bases": lambda x: len(type(x).__mro__),
    "its text": lambda x: len(str(type(x))),
    "a dictionary": lambda x: len(x.__dict__),
    "by vars()": lambda x: len(vars(x)),
    "a stand-in's attribute": lambda x: hasattr(x, "fake_mode"),
    "by getattr()": lambda x: getattr(x, "constant", 1.0) is None,
    "a stand-in's class": lambda x: isinstance(x, torch._subclasses.FakeTensor),
    "repr()": lambda x: len(repr(x)),
    "str()": lambda x: len(str(x)),
    "an f-string": lambda x: len(f"{x}"),
    "an f-string of repr()": lambda x: len(f"{x!r}"),
    "format()": lambda x: len(format(x)),
    "a format": lambda x: len("{}".format(x)),  # noqa: UP032
    "percent": lambda x: len("%s" % x),  # noqa: UP031
    "in a list": lambda x: len(str([x])),
    "mapped": lambda x: sum(len(t) for t in map(str, [x, x])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    eager = Asks(REFUSED[name])
    ours = ORTModule(copy.deepcopy(eager))
    for _ in range(2):
        assert_close(ours(X), eager(X))
    assert ours.gradd_stats()["fallbacks"] == {"outside_state": 2}
    with pytest.raises(export.CaptureError, match="while a call is captured") as caught:
        export.capture(eager, (X,), {})
    assert caught.value.reason == "outside_state"


def _printed(x: torch.Tensor) -> float:
    print("a tensor:", x)
    logging.getLogger("gradd_test").debug("a tensor: %s", x)
    assert x.dim() == 2, f"of another rank: {x}"
    return 1.0


FREE: dict[str, Callable[[torch.Tensor], Any]] = {
    "messages": _printed,
    "isinstance()": lambda x: isinstance(x, torch.Tensor),
    "text of a type": lambda x: len(f"{x.dtype} {x.device}"),
    "its attribute": lambda x: hasattr(x, "gradd_unknown"),
    "a module's name": lambda x: len(type(nn.Linear(1, 1)).__name__),
}


@pytest.mark.parametrize("name", FREE)
def test_free(name: str) -> None:
    eager = Asks(FREE[name])
    ours = ORTModule(copy.deepcopy(eager), strict=True)
    assert_close(ours(X), eager(X))


@pytest.mark.parametrize("training", [True, False])
def test_code_of_torch_may_ask(training: bool) -> None:
    torch.manual_seed(0)
    eager = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).train(training)
    ours = ORTModule(copy.deepcopy(eager), strict=True)
    x = torch.randn(2, 3, 4)
    assert_close(ours(x), eager(x))

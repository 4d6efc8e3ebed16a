"""The pytest plugin of foreign_tests.py: what a foreign test file expects around it, and a record.

It gives names that gradd does not serve a stand-in, so that a file can be imported; a test that
uses one fails with PrivateError, which names it. Each case has a time limit, and a line of JSON in
the file FOREIGN_RECORD: first that it begins, then how it has ended. Cases that have a line already
are left out, and of one function all behind the first FOREIGN_EACH, if that is set.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import types
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

LIMIT = int(os.environ.get("FOREIGN_LIMIT") or 300)  # seconds of one case
RECORD = Path(os.environ["FOREIGN_RECORD"])
ORT = "onnxruntime.training.ortmodule"
PRIVATE = (
    *("_fallback", "_utils", "options"),
    *("_graph_execution_manager_factory", "_training_manager", "_onnx_models"),
)


class AdamW(torch.optim.Optimizer):
    """AdamW as transformers had it: epsilon beside the uncorrected root, decay behind the step."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step, with the betas 0.9 and 0.999, and epsilon 1e-6."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if not (state := self.state[p]):
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                state["m"].lerp_(p.grad, 0.1)
                state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                first, second = (1 - beta ** state["step"] for beta in (0.9, 0.999))
                size = -group["lr"] * second**0.5 / first
                p.addcdiv_(state["m"], state["v"].sqrt() + 1e-6, value=size)
                p.mul_(1 - group["lr"] * group["weight_decay"])


class PrivateError(Exception):
    """A test uses a private part of ONNX Runtime."""


class _StandIn(type):
    """A class whose attributes are classes like it; to call one is an error."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{cls.__qualname__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise PrivateError(cls.__qualname__)


def _stand_in(name: str) -> type:
    bases = (Exception,) if name.endswith(("Error", "Exception")) else ()
    if bases:
        return type(name, bases, {})
    return _StandIn(name, (), {"__qualname__": name})


def _module(name: str) -> types.ModuleType:
    made = types.ModuleType(name)
    known: dict[str, type] = {}

    def find(attribute: str) -> type:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return known.setdefault(attribute, _stand_in(f"{name.rpartition('.')[2]}.{attribute}"))

    made.__getattr__ = find  # type: ignore[method-assign]
    return made


def _export_by_tracing() -> None:
    """torch.onnx.export as it was: files that were written for it read names of its graphs."""
    torch.onnx.export = functools.partial(torch.onnx.export, dynamo=False)


def pytest_configure() -> None:
    """Puts the stand-ins in place; transformers' tests get the trainers of gradd."""
    if os.environ["FOREIGN_SUITE"].endswith("on devices"):
        return _export_by_tracing()
    if os.environ["FOREIGN_SUITE"] == "transformers":
        ours = import_module("optimum.gradd")
        for name in ("Trainer", "TrainingArguments", "Seq2SeqTrainer", "Seq2SeqTrainingArguments"):
            own = getattr(ours, f"ORT{name}")
            setattr(sys.modules["transformers"], name, own)  # its import has made another module
        return
    package = import_module(ORT)
    for name in PRIVATE:
        full = f"{ORT}.{name}"
        sys.modules[full] = _module(full)
        setattr(package, name, sys.modules[full])
    import_module("onnxruntime.training.utils").pytorch_type_to_onnx_dtype = _stand_in(
        "pytorch_type_to_onnx_dtype"
    )


def _write(line: dict[str, Any]) -> None:
    with RECORD.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _name(item: pytest.Item) -> str:
    """With its class: cases of two classes may have one name."""
    return item.nodeid.partition("::")[2].replace("::", ".")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what has been run, and fits the helpers that came with the file."""
    seen = set()
    if RECORD.exists():
        seen = {json.loads(line)["case"] for line in RECORD.read_text().splitlines()}
    each, count = int(os.environ.get("FOREIGN_EACH") or len(items)), Counter()
    kept = []
    for item in items:
        name = _name(item).partition("[")[0]
        count[name] += 1
        if count[name] <= each and _name(item) not in seen:
            kept.append(item)
    items[:] = kept
    helpers = sys.modules.get("_test_helpers")
    if helpers is not None:  # it asks private parts whether ONNX Runtime may fall back
        helpers.is_all_or_nothing_fallback_enabled = lambda *_, **__: False


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Records a file that cannot be imported."""
    if report.failed:
        words = [line[2:].strip() for line in str(report.longrepr).splitlines() if line[:1] == "E"]
        name = Path(report.nodeid).name
        _write({"case": name, "outcome": "not imported", "what": " ".join(words[-1:])})


class OverError(BaseException):
    """The time limit, which passes code that goes on after any Exception."""


def _over(*_: object) -> None:
    raise OverError(f"no end within {LIMIT} s")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Bounds a case."""
    _write({"case": _name(item)})
    signal.signal(signal.SIGALRM, _over)
    before = dict(os.environ)
    signal.alarm(LIMIT)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        os.environ.clear()  # a test that fails leaves what it has set
        os.environ.update(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    """Records how a case has ended."""
    report = yield
    if call.when == "call" or report.outcome != "passed":
        what = ""
        if call.excinfo is not None:
            what = f"{call.excinfo.typename}: {call.excinfo.value}"
            where = call.excinfo.traceback[-1]
            what += f" @ {Path(str(where.path)).name}:{where.lineno + 1} {where.statement}"
        _write({"case": _name(item), "outcome": report.outcome, "what": what[:2000]})
    return report

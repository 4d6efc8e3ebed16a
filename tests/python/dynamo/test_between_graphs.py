"""Operators that PyTorch runs between the graphs of a call: named, counted, refused if asked.

Each case is compared with plain PyTorch, and with an own count of the places where operators run.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradd import ORTModule
from gradd.dynamo import between_graphs, settings
from gradd.spec import CaptureError

pytestmark = pytest.mark.usefixtures("shared_daemon")
X = torch.linspace(-1, 1, 64).reshape(8, 8)
_LOCK = threading.Lock()


class Net(nn.Module):
    """Three layers, with a function of the module and the first one's result between."""

    def __init__(self, between: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.between(self, self.first(x))).square().mean()


def hooked(net: Net, h: Tensor) -> Tensor:
    return torch.relu(net.second(h))


def masked(net: Net, h: Tensor) -> Tensor:
    return h + torch.masked_select(h, h > 0).sort()[0].mean()


def chosen(net: Net, h: Tensor) -> Tensor:
    return h * h[h > 0].cumsum(0).mean()


def distinct(net: Net, h: Tensor) -> Tensor:
    return h + torch.unique((h > 0).long(), return_inverse=True)[1]


def aligned(net: Net, h: Tensor) -> Tensor:
    lengths = torch.full((8,), 1)
    loss = F.ctc_loss(h[:, None].log_softmax(-1), torch.tensor([[1]]), lengths[:1] * 8, lengths[:1])
    return h * loss


@torch.compiler.disable
def _skipped(net: Net, h: Tensor) -> Tensor:
    return torch.tanh(net.second(h))


def skipped(net: Net, h: Tensor) -> Tensor:
    return _skipped(net, h)


def locked(net: Net, h: Tensor) -> Tensor:
    with _LOCK:
        h = net.second(h)
        print(end="")
        return h * 2


def drawn(net: Net, h: Tensor) -> Tensor:
    return h + torch.randn(h.shape, generator=torch.Generator().manual_seed(4))


WORKING = (hooked, masked, chosen, distinct, aligned, skipped, locked, drawn)


def printed(net: Net, h: Tensor) -> Tensor:
    print(end="")
    return net.second(h)


def shown(net: Net, h: Tensor) -> Tensor:
    print(end=str(h)[:0])
    return net.second(h)


def scaled(net: Net, h: Tensor) -> Tensor:
    return net.second(h) / h.detach().abs().max().item()


def noted(net: Net, h: Tensor) -> Tensor:
    os.getloadavg()
    return net.second(h)


IDLE = (printed, shown, scaled, noted)


def sides(between: Callable, **options: Any) -> tuple[ORTModule, Net]:
    net = Net(between)
    twin = copy.deepcopy(net)
    if between is hooked:
        for module in (net, twin):
            module.second.register_full_backward_hook(lambda *_: None)
    return ORTModule(net, **options), twin


def train(model: nn.Module, twin: nn.Module, steps: int) -> None:
    for _ in range(steps):
        ours, theirs = model(X), twin(X)
        torch.testing.assert_close(ours, theirs)
        ours.backward()
        theirs.backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "gradd"]


@pytest.mark.parametrize("between", WORKING)
def test_operators_between_graphs_are_said_and_counted(between: Any, caplog: Any) -> None:
    model, twin = sides(between)
    train(model, twin, 3)
    stats = model.gradd_stats()
    assert stats["in_torch"] == stats["parts_in_torch"] == {"graph_break": 3}
    assert stats["breaks"] >= 3 and stats["fallbacks"] == {}
    *first, text = warnings_in(caplog)  # of the first call, if that has traced sizes of data
    assert len(first) <= 1
    name = "_skipped" if between is skipped else between.__name__
    assert "(graph_break)" in text and f" in {name} @ {__file__}:" in text


@pytest.mark.parametrize("between", WORKING)
def test_strict_refuses_operators_between_graphs_in_every_call(between: Any) -> None:
    model, _ = sides(between, strict=True)
    for _ in range(3):
        with pytest.raises(CaptureError, match="graph_break: no graph has .* in .* @ .*py:"):
            model(X)


@pytest.mark.parametrize("between", WORKING[1:])
def test_operators_without_gradients_count_as_well(between: Any) -> None:
    model, twin = sides(between)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(X), twin(X))
    assert model.gradd_stats()["in_torch"] == {"graph_break": 2}


@pytest.mark.parametrize("between", IDLE)
@pytest.mark.parametrize("strict", [False, True])
def test_breaks_at_which_python_alone_runs_are_no_error(
    between: Any, strict: bool, caplog: Any
) -> None:
    model, twin = sides(between, strict=strict)
    train(model, twin, 3)
    stats = model.gradd_stats()
    assert stats["in_torch"] == {} and stats["breaks"] >= 3
    texts = warnings_in(caplog)
    assert texts and all("no operator runs there" in t for t in texts)
    first = between.__code__.co_firstlineno
    assert any(f"{__file__}:{line} (" in t for t in texts for line in range(first, first + 3))


@pytest.mark.parametrize("seed", range(5))
def test_chains_of_layers_in_graphs_and_outside(seed: int) -> None:
    """Breaks and places with operators are those of the chain, however it is put together."""
    draw = random.Random(seed)
    chain = ["in"] + [draw.choice(("in", "print", "skip")) for _ in range(6)] + ["in"]

    # Dynamo does not resume within a loop: each step is a statement of its own.
    code = "\n ".join(f"h = {kind}_(net, h)" for kind in chain)
    names: dict[str, Any] = {f"{kind}_": step for kind, step in STEPS.items()}
    exec(f"def between(net, h):\n {code}\n return h", names)
    model, twin = sides(names["between"])
    train(model, twin, 2)
    text = "".join("." if kind == "in" else kind[0] for kind in chain)
    groups = [g for g in text.split(".") if g]
    stats = model.gradd_stats()
    assert stats["parts_in_torch"].get("graph_break", 0) == 2 * sum("s" in g for g in groups)
    assert stats["breaks"] >= 2 * len(groups)


STEPS: dict[str, Callable] = {
    "in": lambda net, h: torch.relu(net.second(h)) + h,
    "print": lambda net, h: (print(end=""), h)[1],
    "skip": _skipped,
}


def test_a_branch_that_brings_a_break_later_is_refused_in_its_first_call() -> None:
    def between(net: Net, h: Tensor) -> Tensor:
        return chosen(net, h) if net.on else h

    net = Net(between)
    net.on = False
    model = ORTModule(net, strict=True)
    model(X), model(X)
    net.on = True
    for _ in range(2):
        with pytest.raises(CaptureError, match="graph_break"):
            model(X)
    net.on = False
    model(X)


def test_a_module_within_another_counts_its_own() -> None:
    inner, _ = sides(skipped)
    outer = Net(lambda net, h: h * net.inner(h))
    outer.inner = inner
    model = ORTModule(outer)
    for _ in range(2):
        model(X).backward()
    assert inner.gradd_stats()["in_torch"] == {"graph_break": 2}
    assert model.gradd_stats()["in_torch"] == {} and model.gradd_stats()["breaks"] >= 2


@pytest.mark.parametrize(("layer", "share"), [("head", 75), ("tail", 50)])
def test_the_share_of_the_call_has_the_work_between_graphs(
    layer: str, share: int, caplog: Any
) -> None:
    """Of four products of one size, one is that of `head`, and two are those of `tail`."""
    net = Net(lambda net, h: net.head(net.tail(h)) + net.more(net.tail(h)))
    net.first = net.third = nn.Identity()
    net.tail, net.head, net.more = nn.Linear(8, 512), nn.Linear(512, 8), nn.Linear(512, 8)
    getattr(net, layer).register_full_backward_hook(lambda *_: None)
    ORTModule(net)(X)
    (text,) = warnings_in(caplog)
    found = int(text.partition("About ")[2].partition(" %")[0])
    assert abs(found - share) <= 3


def test_a_hook_in_a_sequential_is_named() -> None:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    net[2].register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="without a graph .*backward.* hook"):
        ORTModule(net, strict=True)(X)


def test_an_operator_of_an_unknown_cost_gives_no_share(caplog: Any) -> None:
    def algebra(net: Net, h: Tensor) -> Tensor:
        return _norm(h) * h

    @torch.compiler.disable
    def _norm(h: Tensor) -> Tensor:
        return torch.linalg.svdvals(h).sum()

    model, twin = sides(algebra)
    train(model, twin, 1)
    (text,) = warnings_in(caplog)
    assert "_linalg_svd" in text and "is not known" in text and "%" not in text


def test_a_break_within_a_statement_has_its_cause(caplog: Any) -> None:
    class Sampled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x).exp()
            return h + torch.distributions.Beta(h, h * 2).rsample()

    ORTModule(Sampled(8, 8))(X)
    (text,) = warnings_in(caplog)
    assert "(graph_break)" in text and "Beta" in text
    assert "step_unsupported" not in text


def test_what_runs_in_torch_without_gradd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_DISABLE", "1")
    model, twin = sides(printed)
    train(model, twin, 2)
    assert model.gradd_stats()["in_torch"] == {"disabled": 2}


def test_dynamos_own_advice_is_silent_within_calls() -> None:
    logger = logging.getLogger("torch._dynamo.variables.tensor")
    record = logger.makeRecord(logger.name, logging.WARNING, __file__, 1, "set a flag", (), None)
    with settings.Applied():
        assert not logger.filter(record)
    assert logger.filter(record)


def warned(net: Net, h: Tensor) -> Tensor:
    for layer in (net.second, net.second):  # Dynamo does not resume in a loop
        warnings.warn("layers of one kind", FutureWarning, stacklevel=2)
        h = torch.tanh(layer(h))
    return h


def test_a_warning_breaks_no_graph() -> None:
    model, twin = sides(warned, strict=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        train(model, twin, 3)
    kinds = [str(w.message) for w in caught if w.filename == __file__]
    assert "layers of one kind" in kinds
    assert model.gradd_stats()["breaks"] == 0 and not model.gradd_stats()["in_torch"]


def test_a_warning_comes_from_the_place_that_asks_for_it() -> None:
    def place(model: nn.Module) -> set[tuple[str, int]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(X)
        return {(w.filename, w.lineno) for w in caught if w.category is FutureWarning}

    model, twin = sides(warned)
    here = place(twin)
    assert here and place(model) == here


def test_a_warning_that_is_an_error_is_raised() -> None:
    model, _ = sides(warned)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        with pytest.raises(FutureWarning, match="layers of one kind"):
            model(X)


WARNS = """
import torch
from gradd import ORTModule

class Net(torch.nn.Linear):
    def forward(self, x):
        return torch.nn.functional.mse_loss(super().forward(x), torch.zeros(3, 1, 4))

model = ORTModule(Net(4, 4))
for _ in range(2):
    model(torch.ones(3, 4)).backward()
assert model.gradd_stats()["self_checks"] and not model.gradd_stats()["in_torch"]
"""


def test_a_warning_of_torch_is_given_once() -> None:
    done = subprocess.run([sys.executable, "-c", WARNS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("UserWarning: Using a target size") == 1, done.stderr


class Lines(logging.Handler):
    """What a logger takes, as its level and text."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.logger = logging.getLogger(f"{__name__}.lines")
        self.logger.handlers, self.logger.propagate = [self], False
        self.logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((record.levelname, record.getMessage()))


def counted(net: Net, h: Tensor) -> Tensor:
    net.calls = getattr(net, "calls", 0) + 1
    net.lines.info("call %d", net.calls)
    return net.second(h)


def asked(net: Net, h: Tensor) -> Tensor:
    if net.lines.isEnabledFor(logging.INFO):
        net.lines.info(f"{len(h)} rows")
    return net.second(h)


def levels(net: Net, h: Tensor) -> Tensor:
    net.lines.debug("never")
    net.lines.warning("of %s", "a kind", extra={"more": 1})
    net.lines.error("in %s", net.first.in_features)
    return net.second(h)


@pytest.mark.parametrize("between", [counted, asked, levels])
def test_lines_of_loggers_come_in_every_call(between: Any) -> None:
    model, twin = sides(between, strict=True)
    with torch.no_grad():
        for net in (model.module, twin):
            net.lines = Lines(logging.INFO).logger
        for _ in range(3):
            lines = net.lines.handlers[0].found
            theirs = twin(X), lines.copy()
            lines.clear()
            ours = model(X), lines.copy()
            lines.clear()
            torch.testing.assert_close(ours[0], theirs[0])
            assert ours[1] == theirs[1] and ours[1]
    assert model.gradd_stats()["breaks"] >= 3 and not model.gradd_stats()["in_torch"]


@pytest.mark.quick
@pytest.mark.parametrize("between", [counted, asked, levels])
def test_lines_that_loggers_drop_break_no_graph(between: Any) -> None:
    model, twin = sides(between, strict=True)
    for net in (model.module, twin):
        net.lines = Lines(logging.CRITICAL).logger
    train(model, twin, 3)
    assert model.gradd_stats()["breaks"] == 0
    assert getattr(model.module, "calls", 3) == 3


@pytest.mark.quick
def test_lines_of_libraries_break_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    once = functools.lru_cache(lambda logger, text: logger.warning(text))
    monkeypatch.setattr(logging.Logger, "warning_once", once, raising=False)
    lines = Lines(logging.INFO)
    code = """
def function(net, h):
    lines.warning("in each call of %d", net.first.in_features)
    lines.warning_once("in one of them")
    return net.second(h)
"""
    names = {"lines": lines.logger}
    exec(compile(code, "/env/site-packages/library.py", "exec"), names)
    model, _ = sides(names["function"], strict=True)
    for _ in range(3):
        model(X).backward()
    assert model.gradd_stats()["breaks"] == 0 and not model.gradd_stats()["in_torch"]
    assert lines.found.count(("WARNING", "in one of them")) == 1


class Checked(nn.Linear):
    """A branch in forward() itself: Dynamo goes on in either, with another reason for the break."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if torch.isnan(h).any():
            raise FloatingPointError
        return torch.tanh(h).sum()


def test_a_branch_is_said_to_depend_on_data(caplog: pytest.LogCaptureFixture) -> None:
    model = ORTModule(Checked(8, 8), strict=True)
    for _ in range(2):
        model(X).backward()
    (text,) = warnings_in(caplog)
    assert "data-dependent branching" in text and "generic_jump" not in text


def test_known_sequences_of_graphs_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between_graphs, "_PATHS", 2)
    model, twin = sides(chosen)
    for n in (8, 4, 1, 8, 4):
        torch.testing.assert_close(model(X[:n]), twin(X[:n]))
    assert model.gradd_stats()["in_torch"]["graph_break"] >= 4

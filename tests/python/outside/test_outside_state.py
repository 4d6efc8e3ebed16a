"""What forward() reads from outside its arguments, parameters and buffers: never a stale value."""

from __future__ import annotations

import builtins
import copy
import logging
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import outside_cases
import outside_classes
import process_cases
import pytest
import torch
from nets import assert_close
from outside_cases import CASES, Base
from selection import one_in
from torch import nn

from gradd import ORTModule, export
from gradd.calls import watch

pytestmark = pytest.mark.usefixtures("shared_daemon")
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def _same(ours: Any, eager: nn.Module, what: str) -> None:
    """One training step on both sides."""
    results = []
    for net in (ours, eager):
        for parameter in net.parameters():
            parameter.grad = None
        out = net(X)
        if out.requires_grad:
            out.square().sum().backward()
        results.append(out)
    assert results[0].dtype == results[1].dtype, what
    assert_close(*results, what)
    for (name, a), b in zip(ours.named_parameters(), eager.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), f"{what}: {name}"
        if b.grad is not None:
            assert_close(a.grad, b.grad, f"{what}: {name}")


@pytest.fixture
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What cases change, in classes and functions of torch, ends with the test."""
    monkeypatch.setattr(torch.nn.functional, "softsign", torch.nn.functional.softsign)
    monkeypatch.setattr(torch, "layer_norm", torch.layer_norm)
    monkeypatch.setattr(builtins, "pow", pow)
    own = {cls: set(cls.__dict__) for cls in (torch.Tensor, nn.Parameter)}
    yield
    for cls, names in own.items():
        for name in set(cls.__dict__) - names:
            if not isinstance(cls.__dict__[name], watch._Watched):  # gradd's, while a model lives
                delattr(cls, name)


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_a_change_outside_is_seen(name: str, put_back: None) -> None:
    make, changes = CASES[name]
    eager = make()
    ours = ORTModule(copy.deepcopy(eager), strict=True)
    _same(ours, eager, "at first")
    for number, change in enumerate(changes):
        change(ours)
        change(eager)
        _same(ours, eager, f"after change {number}")
    assert ours.gradd_stats()["forwards"] > len(changes)


PARAMETERS: dict[str, tuple[Callable, Callable]] = {
    "_backward_hooks": (
        lambda p: 3.0 if p._backward_hooks else 1.0,
        lambda p: p.register_hook(lambda g: g),
    ),
    "_post_accumulate_grad_hooks": (
        lambda p: 3.0 if p._post_accumulate_grad_hooks else 1.0,
        lambda p: p.register_post_accumulate_grad_hook(lambda p: None),
    ),
    "is_shared": (lambda p: 3.0 if p.is_shared() else 1.0, lambda p: p.share_memory_()),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_what_a_parameter_tells_is_asked_again(name: str) -> None:
    ask, change = PARAMETERS[name]

    class AsksParameter(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x) * ask(self.lin.weight)

    eager = AsksParameter()
    ours = ORTModule(copy.deepcopy(eager))
    _same(ours, eager, "before")
    _same(ours, eager, "again")
    for net in (ours, eager):
        change(dict(net.named_parameters())["lin.weight"])
    _same(ours, eager, "after")
    assert ours.gradd_stats()["captures"] == 1
    assert set(ours.gradd_stats()["fallbacks"]) <= {"outside_state", "backward_hooks"}


class Uses(Base):
    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = (function,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function[0](self.lin(x))


def _thrice(value: Any) -> Any:
    if not callable(value):
        return property(lambda tensor: torch.mul(value.__get__(tensor), 3))
    return lambda *args, **kwargs: torch.mul(value(*args, **kwargs), 3)


@pytest.mark.parametrize("name", outside_classes.FUNCTIONS)
def test_a_function_of_torch_that_is_replaced_is_applied_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own function hands itself to the tracer by its name, which is another's now."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    owner, function = outside_classes.FUNCTIONS[name]
    eager, before = Uses(function), getattr(owner, name)
    ours = ORTModule(copy.deepcopy(eager), strict=True)
    _same(ours, eager, "as it is")
    if name == "split":
        monkeypatch.setattr(owner, name, lambda *a: [t * 3 for t in before(*a)])
    else:
        monkeypatch.setattr(owner, name, _thrice(before))
    _same(ours, eager, "replaced")
    monkeypatch.setattr(owner, name, before)
    _same(ours, eager, "put back")


def _alone(test: str) -> None:
    """Runs a test in a process of its own: what it does to a class cannot be undone.

    Once `torch.Tensor.__getitem__` was set, tensors are sequences for C code (its slot stays
    filled), and `torch.tensor([a_tensor])` raises for the rest of the process.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"{__file__}::{test}"]
    env = os.environ | {"GRADD_TEST_ALONE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout, done.stdout


@pytest.mark.parametrize("name", outside_classes.METHODS)
def test_a_method_of_tensors_that_is_replaced_is_refused_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch, put_back: None
) -> None:
    if name == "__getitem__" and not os.environ.get("GRADD_TEST_ALONE"):
        _alone(f"test_a_method_of_tensors_that_is_replaced_is_refused_by_name[{name}]")
        return
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    eager = Uses(outside_classes.METHODS[name])
    ours = ORTModule(copy.deepcopy(eager))
    before = getattr(torch.Tensor, name)
    _same(ours, eager, "as it is")
    setattr(torch.Tensor, name, _thrice(before))
    _same(ours, eager, "replaced")
    with pytest.raises(export.CaptureError, match=f"torch.Tensor.{name} is replaced by"):
        export.capture(eager, (X,), {})
    setattr(torch.Tensor, name, before)
    _same(ours, eager, "put back")
    assert ours.gradd_stats()["fallbacks"] == {"outside_state": 1}
    assert ours.gradd_stats()["captures"] == 1


def test_nothing_is_captured_again_for_a_value_that_was_there_before() -> None:
    ours = ORTModule(outside_cases.Global(), strict=True)
    for value in (1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0):
        outside_cases.ALPHA = value
        ours(X)
    outside_cases.ALPHA = float("1.0")  # equal, but another object
    ours(X)
    assert ours.gradd_stats()["captures"] == 3


def test_what_has_changed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    ours = ORTModule(outside_cases.Global(), strict=True)
    outside_cases.ALPHA = 1.0
    ours(X)
    outside_cases.ALPHA = 2.5
    with caplog.at_level(logging.INFO, "gradd"):
        ours(X)
    assert "is captured again: the global ALPHA: 1.0 -> 2.5" in caplog.text


def test_what_changes_at_every_call_ends_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradd.bridge._MANY_CHANGES", 3)
    monkeypatch.setattr("gradd.fallback._UNPAID", 100)
    eager = outside_cases.Global()
    ours = ORTModule(copy.deepcopy(eager))
    for value in range(7):
        outside_cases.ALPHA = float(value)
        _same(ours, eager, f"{value}")
    assert ours.gradd_stats()["captures"] == 4
    assert ours.gradd_stats()["fallbacks"] == {"outside_state": 3}


class Tensors(Base):
    def __init__(self) -> None:
        super().__init__()
        self.box = {"t": torch.ones(4)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * outside_cases.PLAIN + SHARED["t"]


SHARED = {"t": torch.ones(4)}


def test_a_tensor_outside_is_an_input() -> None:
    """Written in place or exchanged for another one of its form: the same capture."""
    eager = Tensors()
    ours = ORTModule(copy.deepcopy(eager), strict=True)
    for value in range(4):
        outside_cases.PLAIN.data.fill_(value)
        SHARED["t"] = torch.full((4,), float(value))
        _same(ours, eager, f"{value}")
    assert ours.gradd_stats()["captures"] == 1
    SHARED["t"] = torch.ones(1)
    _same(ours, eager, "another shape")
    assert ours.gradd_stats()["captures"] == 2
    SHARED["t"] = torch.ones(4, requires_grad=True)
    with pytest.raises(export.CaptureError, match="would get no gradient"):
        ours(X)
    SHARED["t"] = torch.ones(4)


def test_modes_that_forward_asks_for() -> None:
    class Asks(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.lin(x)
            if torch.is_grad_enabled():
                y = y * 2
            return y * 3 if y.requires_grad else y

    eager = Asks()
    ours = ORTModule(copy.deepcopy(eager), strict=True)
    for _ in range(2):
        _same(ours, eager, "with gradients")
        with torch.no_grad():
            assert_close(ours(X), eager(X))
    assert ours.gradd_stats()["captures"] == 2


def test_the_default_type() -> None:
    class Makes(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ones(4) * 0.1 + self.lin(x).sum().to(torch.get_default_dtype())

    eager = Makes()
    ours = ORTModule(copy.deepcopy(eager))
    _same(ours, eager, "single")
    torch.set_default_dtype(torch.float64)
    try:
        _same(ours, eager, "double")
    finally:
        torch.set_default_dtype(torch.float32)


STATE: dict[str, Any] = {"n": 0, "log": [], "kept": torch.zeros(4), "array": None}


class Counts(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        STATE["n"] += 1
        return self.lin(x) * STATE["n"]


class Logs(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        STATE["log"].append(float(y.sum()) if y.device.type == "meta" else 1)
        return y * len(STATE["log"])


class Keeps(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        STATE["kept"].add_(1)
        return self.lin(x) * STATE["kept"]


class Sets(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Sets.calls = getattr(Sets, "calls", 0) + 1
        return self.lin(x) * Sets.calls


@pytest.mark.parametrize("kind", [Counts, Logs, Keeps, Sets])
def test_what_forward_writes_outside_is_written_once_per_call(kind: type) -> None:
    """It runs in PyTorch by name, and trying to capture it leaves no trace."""
    expected = []
    for wrap in (lambda m: m, ORTModule):
        STATE.update(n=0, log=[], kept=torch.zeros(4))
        if hasattr(Sets, "calls"):
            del Sets.calls
        net = wrap(kind())
        expected.append([net(X).detach() for _ in range(6)])
    for eager, ours in zip(*expected, strict=True):
        assert_close(ours, eager)
    assert net.gradd_stats()["fallbacks"] == {"outside_written": 6}


CACHE: dict[int, torch.Tensor] = {}


def test_a_cache_outside_is_filled_once() -> None:
    class Caching(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] not in CACHE:
                CACHE[x.shape[1]] = torch.arange(float(x.shape[1]))
            return self.lin(x) * CACHE[x.shape[1]]

    eager = Caching()
    CACHE.clear()
    ours = ORTModule(copy.deepcopy(eager))
    for _ in range(3):
        _same(ours, eager, "cached")
    stats = ours.gradd_stats()
    assert stats["captures"] == 1 and sum(stats["fallbacks"].values()) <= 1


class Clock(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * (1 + time.perf_counter() * 0)


class Opens(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with open("/proc/self/stat") as file:
            return self.lin(x) * (1 + 0 * len(file.read()))


COINS = random.Random(0)
NUMBERS = iter([1.0] * 1000)


class Coins(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * (1 + 0 * COINS.random())


class Stream(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * next(NUMBERS)


@pytest.mark.parametrize("kind", [Clock, Opens, Coins, Stream])
def test_what_cannot_be_watched_is_refused_by_name(kind: type) -> None:
    with pytest.raises(export.CaptureError, match="forward\\(\\)") as caught:
        ORTModule(kind(), strict=True)(X)
    expected = ("outside_state", "outside_written", "python_random")
    assert caught.value.reason in expected, caught.value
    eager = kind()
    _same(ORTModule(copy.deepcopy(eager)), eager, "in PyTorch")


class Asks(Base):
    def __init__(self, question: Any) -> None:
        super().__init__()
        self.question = (question,)  # a module's functions would be in its key

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) + self.question[0]()


def _ask(case: tuple, strict: bool) -> Any:
    """Both sides around the changes of a question."""
    question, back, change = case
    back()
    ours, eager = ORTModule(Asks(question), strict=strict), Asks(question)
    try:
        for number, step in enumerate((back, change, change, back)):
            if number != 2:
                step()
            _same(ours, eager, f"step {number}")
    finally:
        back()
    return ours.gradd_stats()


@pytest.mark.parametrize("name", process_cases.WATCHED)
def test_a_state_of_the_process_is_asked_again(name: str) -> None:
    stats = _ask(process_cases.WATCHED[name], strict=True)
    assert stats["captures"] <= 3, stats


@pytest.mark.parametrize("name", process_cases.REFUSED)
def test_a_state_of_the_process_is_refused_by_name(name: str) -> None:
    stats = _ask(process_cases.REFUSED[name], strict=False)
    assert set(stats["fallbacks"]) <= {"outside_state", "python_random"}, stats
    assert sum(stats["fallbacks"].values()) == 4, stats


class SetsMode(Base):
    """Calls something that may set a mode, and uses a tensor that it returns."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = (what,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        made = self.what[0]()
        return y * made if isinstance(made, (float, torch.Tensor)) else y


@pytest.mark.parametrize("name", process_cases.SET)
def test_a_mode_that_forward_sets_is_refused_by_name(name: str) -> None:
    """It is set in every call, as PyTorch does it, and an attempt to capture leaves no trace."""
    what, found = process_cases.SET[name], []
    with pytest.raises(export.CaptureError) as caught, process_cases.kept_modes():
        ORTModule(SetsMode(what), strict=True)(X)
    assert caught.value.reason == "outside_written", caught.value
    ours = ORTModule(SetsMode(what))
    for net in (ours, SetsMode(what)):
        for _ in range(3):
            with process_cases.kept_modes():
                out = net(X)
                found.append((out.dtype, out.requires_grad, process_cases.modes()))
    assert found[:3] == found[3:]
    assert sum(ours.gradd_stats()["fallbacks"].values()) == 3


@pytest.mark.parametrize("name", process_cases.LEFT)
def test_a_mode_that_forward_puts_back_is_its_own(name: str) -> None:
    what = process_cases.LEFT[name]
    ours, eager = ORTModule(SetsMode(what), strict=True), SetsMode(what)
    for gradients in (True, False, True):
        with torch.set_grad_enabled(gradients):
            _same(ours, eager, f"gradients {gradients}")
            assert torch.is_grad_enabled() == gradients


def test_messages_appear_at_the_capture(capsys: pytest.CaptureFixture) -> None:
    """A known limit: they keep nobody from the daemon, and are not repeated."""

    class Talks(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print("printed")
            warnings.warn("warned", stacklevel=1)
            logging.getLogger("gradd_test_talks").error("logged")
            return self.lin(x)

    ours, eager = ORTModule(Talks(), strict=True), Base_forward()
    with pytest.warns(UserWarning, match="warned"):
        _same(ours, eager, "first")
    assert "printed" in capsys.readouterr().out
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _same(ours, eager, "second")
    assert "printed" not in capsys.readouterr().out


def test_what_a_weak_reference_led_to_may_die() -> None:
    question = (lambda: process_cases.DIES() is None,)
    ours, eager = (wrap(Asks(question[0])) for wrap in (ORTModule, lambda m: m))
    _same(ours, eager, "alive")
    del process_cases.HELD["dies"]
    assert process_cases.DIES() is None  # a capture keeps nothing alive
    _same(ours, eager, "dead")


def test_a_class_that_is_registered_late() -> None:
    ours, eager = (
        wrap(Asks(lambda: isinstance(process_cases.THING, process_cases.Abstract)))
        for wrap in (ORTModule, lambda m: m)
    )
    _same(ours, eager, "before")
    process_cases.Abstract.register(process_cases.Thing)
    _same(ours, eager, "after")


def test_another_thread_has_another_name() -> None:
    ours, eager = (
        wrap(Asks(lambda: len(threading.current_thread().name)))
        for wrap in (ORTModule, lambda m: m)
    )
    _same(ours, eager, "here")
    failed: list[BaseException] = []

    def work() -> None:
        try:
            _same(ours, eager, "there")
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="a name of another length")
    thread.start()
    thread.join()
    assert not failed, failed


def test_writes_into_parameters_are_undone() -> None:
    class Writes(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.lin.weight.data.mul_(0.9)
            return self.lin(x)

    eager = Writes()
    ours = ORTModule(copy.deepcopy(eager))
    for _ in range(3):
        assert_close(ours(X), eager(X))


def test_a_tracer_of_the_trainer_stays() -> None:
    seen: list[str] = []

    def tracer(frame: Any, event: str, argument: Any) -> Any:
        seen.append(frame.f_code.co_name)
        return None

    ours = ORTModule(Base_forward(), strict=True)
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        ours(X)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert seen


class Base_forward(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)

"""The fast path of a call: how short it is, and that it notices every change."""

from __future__ import annotations

import copy
import enum
import operator
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradd
from gradd import ORTModule, optim
from helpers.nets import Net, assert_close, assert_same_grads, batch

pytestmark = [pytest.mark.one_in(2), pytest.mark.usefixtures("shared_daemon")]
PACKAGE = str(Path(gradd.__file__).parent)
SCALE = 1.0


@pytest.fixture(autouse=True)
def _first_checks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later self-checks come by the clock, and take the slow path."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "first")


class Frames:
    """The calls of Python functions in a block, by file."""

    def __enter__(self) -> Frames:
        self.ours: list[str] = []
        self.all = 0
        sys.setprofile(self._note)
        return self

    def _note(self, frame: types.FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        self.all += 1
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) or file == "<string>":
            self.ours.append(file)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    @property
    def files(self) -> set[str]:
        """Files of the package."""
        return {file for file in self.ours if file.startswith(PACKAGE)}


def _loss(result: Any) -> torch.Tensor:
    if isinstance(result, torch.Tensor):
        return result
    return result["loss"] if isinstance(result, dict) else result[0]


def _trained(model: nn.Module, *args: Any, steps: int = 3, **kwargs: Any) -> None:
    for _ in range(steps):
        model.zero_grad()
        _loss(model(*args, **kwargs)).backward()


@pytest.mark.parametrize("form", ["tensor", "dictionary"])
def test_a_step_runs_few_python_frames(form: str) -> None:
    """Twice as many are what a small model waits for longer than for a product."""

    class Small(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
            loss = super().forward(x, y)[0]
            return {"loss": loss} if form == "dictionary" else loss

    model, (x, y) = ORTModule(Small(), strict=True), batch()
    _trained(model, x, y, steps=12)
    graphs = model.gradd_stats()["graphs"]
    result = model(x, y=y)
    assert model.gradd_stats()["graphs"] == graphs + 1, "another form of call is another graph"
    _trained(model, x, y)
    least, files = [1000] * 3, [1000] * 2  # a reply that takes long is waited for in other frames
    for _ in range(8):
        model.zero_grad()  # gradients that are kept would make another slot
        with Frames() as forward:
            result = model(x, y)
        loss = result["loss"] if form == "dictionary" else result
        with Frames() as backward:
            loss.backward()
        counts = [len(forward.ours), forward.all, len(backward.ours)]
        least = list(map(min, least, counts))
        files = list(map(min, files, (len(forward.files), len(backward.files))))
    # Half of the forward's are torch's own.
    assert all(map(operator.le, least, (62, 112, 32))), least
    assert all(map(operator.le, files, (30, 11))), sorted(forward.files | backward.files)


def test_frames_do_not_grow_with_the_model() -> None:
    """Ten times the parameters are the same calls, forward and backward."""
    counts = []
    for layers in (2, 20):
        model = ORTModule(nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))), strict=True)
        x = batch()[0]
        for _ in range(12):
            model.zero_grad()
            model(x).sum().backward()
        least = [1000, 1000]  # now and then a slot or a segment comes or goes
        for _ in range(4):
            model.zero_grad()
            with Frames() as forward:
                loss = model(x).sum()
            with Frames() as backward:
                loss.backward()
            least = [min(least[0], len(forward.ours)), min(least[1], len(backward.ours))]
        counts.append(least)
    assert abs(counts[0][0] - counts[1][0]) <= 4 and abs(counts[0][1] - counts[1][1]) <= 4, counts


class Reader(nn.Module):
    """Reads what may change: an attribute, a buffer, a global, its mode, its arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
        self.factor = 2.0
        self.settings = {"add": 1.0}
        self.register_buffer("shift", torch.full((8,), 0.25))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor, times: float = 1.0, extra: Any = None) -> Any:
        hidden = self.layer(x) * self.factor + self.shift + self.settings["add"]
        if self.training:
            self.seen.add_(hidden.detach().mean(0))
        if extra is not None:
            hidden = hidden * extra["by"]
        return self.out(torch.tanh(hidden)).square().mean() * times * SCALE


def _set_global(value: float) -> None:
    globals()["SCALE"] = value


def _move(m: Reader) -> None:
    m.layer.weight = nn.Parameter(m.layer.weight.detach() * 0.5)


def _hook(m: Reader) -> None:
    m.out.register_forward_hook(lambda module, args, result: result * 3)


def _own_forward(m: Reader) -> None:
    inner = type(m.layer).forward
    m.layer.forward = types.MethodType(lambda self, x: inner(self, x) * 1.5, m.layer)


CHANGES: dict[str, Callable[[Reader], Any]] = {
    "an attribute": lambda m: setattr(m, "factor", 3.0),
    "an entry of a dictionary": lambda m: m.settings.update(add=2.0),
    "a global": lambda m: _set_global(4.0),
    "a value of a buffer": lambda m: m.shift.add_(1.0),
    "a value of a weight": lambda m: m.layer.weight.data.mul_(0.5),
    "another buffer": lambda m: setattr(m, "shift", torch.full((8,), 0.75)),
    "another weight": _move,
    "another submodule": lambda m: setattr(m, "out", copy.deepcopy(m.layer)),
    "a tie": lambda m: setattr(m.layer, "bias", nn.Parameter(m.layer.bias.detach().clone())),
    "a frozen weight": lambda m: m.layer.weight.requires_grad_(False),
    "eval mode": lambda m: m.eval(),
    "eval mode of a part": lambda m: m.layer.eval(),
    "a hook": _hook,
    "a forward of its own": _own_forward,
    "a double": lambda m: m.double(),
    "an optimizer's step": lambda m: optim.FusedAdam(m.parameters(), lr=0.1).step(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_is_seen(name: str) -> None:
    _set_global(1.0)
    theirs = Reader()
    ours = ORTModule(copy.deepcopy(theirs))
    x = batch()[0]
    for model in (ours, theirs):
        _trained(model, x, steps=12)
    _trained(ours, x), _trained(theirs, x)
    try:
        CHANGES[name](ours.module), CHANGES[name](theirs)
        if name == "a double":
            x = x.double()
        for _ in range(3):
            ours.zero_grad(), theirs.zero_grad()
            a, b = ours(x), theirs(x)
            assert_close(a, b, name)
            a.backward(), b.backward()
            assert_same_grads(ours, theirs)
        for (key, a), b in zip(ours.named_buffers(), theirs.buffers(), strict=True):
            assert_close(a, b, key)
    finally:
        _set_global(1.0)


class Equal:
    """Equal to every other one, by its own word."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    __hash__ = None  # type: ignore[assignment]


class Typed(nn.Module):
    """Its result depends on what `==` does not tell apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4)
        self.one = nn.Parameter(torch.full((1,), 0.5))
        self.other = nn.Parameter(torch.full((1,), 0.5))
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.number, self.flag = 1, 1
        self.table, self.equal = {"n": 1}, Equal(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = (self.layer(x) * self.one + self.other) * self.scale * self.equal.by
        result = result * (1.2 if self.flag is True else 1.0)
        result = result * (1.3 if isinstance(self.number, float) else 1.0)
        result = result * (0.8 if isinstance(self.table["n"], bool) else 1.0)
        result = result * (0.6 if hasattr(self, "renamed") else 1.0)
        return torch.tanh(result).square().mean()


def _tie(m: Typed) -> None:
    m.other = m.one


def _untie(m: Typed) -> None:
    m.other = nn.Parameter(m.one.detach().clone())


def _rename(m: Typed) -> None:
    m.renamed = m.__dict__.pop("number")
    m.number = 1


EQUALS: dict[str, Callable[[Typed], Any]] = {
    "one is True": lambda m: setattr(m, "flag", True),
    "one is 1.0": lambda m: setattr(m, "number", 1.0),
    "True in a dictionary": lambda m: m.table.update(n=True),
    "equal by its word": lambda m: setattr(m, "equal", Equal(2.0)),
    "equal parameters tied": _tie,
    "and untied": _untie,
    "an equal buffer": lambda m: setattr(m, "scale", torch.full((1,), 2.0)),
    "an equal parameter": lambda m: setattr(m, "one", nn.Parameter(torch.full((1,), 0.5))),
    "another name": _rename,
}


def test_what_equals_is_not_the_same() -> None:
    """Each change on top of those before it; values that are equal now need not be later."""
    theirs = Typed()
    ours = ORTModule(copy.deepcopy(theirs))
    x = batch()[0]
    for name in ("nothing", *EQUALS):
        for model in (ours.module, theirs):
            EQUALS.get(name, lambda m: None)(model)
        for _ in range(12 if name == "nothing" else 3):
            ours.zero_grad(), theirs.zero_grad()
            a, b = ours(x), theirs(x)
            assert_close(a, b, name)
            a.backward(), b.backward()
            assert_same_grads(ours, theirs)
            with torch.no_grad():
                for model in (ours, theirs):
                    for p in model.parameters():
                        p -= 0.01 * p.grad
                    next(model.buffers()).mul_(1.0625)


def _other_tables(m: nn.Module, how: str) -> None:
    """The tables of a layer get the contents of another layer's."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        other = nn.Linear(8, 8)
    if how == "__setstate__":
        m.first.__setstate__(other.__dict__)
    elif how == "__dict__":
        m.first.__dict__.update(other.__dict__)
    elif how == "_parameters":
        m.first._parameters = other._parameters
    elif how == "_modules":
        m._modules = {**m._modules, "first": other}
    elif how == "an equal table":
        m.first._parameters = dict(m.first._parameters)
        m.first.weight = other.weight
    elif how == "of the root":
        m._parameters = {"scale": nn.Parameter(torch.full((8,), 3.0))}
    elif how == "buffers":
        m._buffers = {"shift": torch.full((8,), 3.0)}


class Deep(nn.Module):
    """A layer, and a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.full((8,), 2.0))
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x) * self.scale + self.shift).square().mean()


@pytest.mark.parametrize(
    "how",
    [
        *("__setstate__", "__dict__", "_parameters", "_modules", "an equal table", "of the root"),
        "buffers",
    ],
)
def test_replaced_tables_of_modules_are_noticed(how: str) -> None:
    theirs = Deep()
    ours = ORTModule(copy.deepcopy(theirs))
    x = batch()[0]
    for model in (ours, theirs):
        _trained(model, x, steps=12)
    _other_tables(ours.module, how), _other_tables(theirs, how)
    for _ in range(3):
        ours.zero_grad(), theirs.zero_grad()
        a, b = ours(x), theirs(x)
        assert_close(a, b, how)
        a.backward(), b.backward()
        assert_same_grads(ours, theirs)


class Name(str, enum.Enum):  # noqa: UP042 - as libraries have them
    """Equal to the string that it is."""

    A = "a"


def test_strings_of_other_classes() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kind = nn.Linear(8, 4), "a"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * (2.0 if type(self.kind) is str else 3.0)

    theirs = Named()
    ours = ORTModule(copy.deepcopy(theirs))
    x = batch()[0]
    for kind in ("a", Name.A, "a", np.str_("a")):
        ours.module.kind = theirs.kind = kind
        for _ in range(3):
            assert_close(ours(x), theirs(x), repr(kind))


def test_a_renamed_parameter_and_one_of_another_type() -> None:
    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)
            self.a = nn.Parameter(torch.full((1,), 0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * next(p for n, p in self.named_parameters() if p.numel() == 1)

    theirs = Loose()
    ours = ORTModule(copy.deepcopy(theirs))
    x = batch()[0]
    changes = (
        lambda m: None,
        lambda m: m._parameters.update(b=m._parameters.pop("a")),
        lambda m: setattr(m, "b", nn.Parameter(m.b.detach().double())),
        lambda m: setattr(m, "b", nn.Parameter(m.b.detach().float().reshape(()))),
    )
    for change in changes:
        change(ours.module), change(theirs)
        for _ in range(4):
            ours.zero_grad(), theirs.zero_grad()
            a, b = ours(x), theirs(x)
            assert a.dtype == b.dtype
            assert_close(a, b)
            a.sum().backward(), b.sum().backward()
            assert_same_grads(ours, theirs)


CALLS: dict[str, tuple[tuple, dict]] = {
    "plain": ((torch.ones(3, 8),), {}),
    "other sizes": ((torch.ones(5, 8),), {}),
    "by name": ((), {"x": torch.ones(3, 8)}),
    "another number": ((torch.ones(3, 8), 2.0), {}),
    "a number that is zero": ((torch.ones(3, 8), 0.0), {}),
    "minus zero": ((torch.ones(3, 8), -0.0), {}),
    "an integer": ((torch.ones(3, 8), 2), {}),
    "nested": ((torch.ones(3, 8),), {"extra": {"by": torch.full((8,), 2.0)}}),
    "nested, other order": ((), {"extra": {"by": torch.full((8,), 3.0)}, "x": torch.ones(3, 8)}),
    "with a gradient": ((torch.ones(3, 8, requires_grad=True),), {}),
    "a slice": ((torch.ones(3, 16)[:, ::2],), {}),
    "transposed": ((torch.arange(24.0).reshape(8, 3).t(),), {}),
}


def test_calls_in_any_order() -> None:
    """Many forms of one module, each known: none takes the graph of another."""
    theirs = Reader()
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    order = torch.randperm(len(CALLS) * 12, generator=torch.Generator().manual_seed(0)).tolist()
    for number in order:
        name = list(CALLS)[number % len(CALLS)]
        args, kwargs = CALLS[name]
        mode = number // len(CALLS) % 3
        grads = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
        results = []
        for model in (ours, theirs):
            model.zero_grad()
            for tensor in grads:
                tensor.grad = None
            with torch.set_grad_enabled(mode != 1), torch.inference_mode(mode == 2):
                loss = model(*args, **kwargs)
            if mode == 0:
                loss.backward()
            results.append((loss, [g.grad for g in grads]))
        (a, ga), (b, gb) = results
        assert_close(a, b, name)
        assert a.requires_grad == b.requires_grad and a.is_inference() == b.is_inference(), name
        for one, other in zip(ga, gb, strict=True):
            assert (one is None) == (other is None), name
            if one is not None:
                assert_close(one, other, name)
        if mode == 0:
            assert_same_grads(ours, theirs)


def test_names_that_read_alike() -> None:
    """Arguments are told apart by where they are, not by their paths as text."""

    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x_mask: torch.Tensor, x: Any, b: Any = None) -> torch.Tensor:
            other = 0.0 if b is None else b[0]
            return self.layer(x["mask"]) - 3 * self.layer(x_mask) + other

    theirs = Alike()
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    for seed in range(5):
        a, b = batch(seed=seed)[0], batch(seed=seed + 10)[0]
        for kwargs in (
            {"x_mask": a, "x": {"mask": b}},
            {"x": {"mask": b}, "x_mask": a},
            {"x_mask": a, "b": [torch.ones(4), a], "x": {"mask": b}},
        ):
            assert_close(ours(**kwargs), theirs(**kwargs))


def test_the_same_tensor_twice() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.layer(a) * (3.0 if a is b else 1.0) + b

    theirs = Two()
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    a, b = torch.ones(2, 8), torch.ones(2, 8)
    for pair in ((a, b), (a, b), (a, a), (a, b), (b, b), (a, a)):
        for _ in range(4):
            assert_close(ours(*pair), theirs(*pair))


def test_a_number_of_items_is_data() -> None:
    """`num_items_in_batch` differs in every step and is no other graph."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
            return self.layer(x).square().sum() / num_items_in_batch

    theirs = Loss()
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    x = batch()[0]
    for n in range(1, 12):
        ours(x, num_items_in_batch=n)
    before = ours.gradd_stats()["graphs"]
    for n in range(12, 20):
        assert_close(ours(x, num_items_in_batch=n), theirs(x, num_items_in_batch=n))
    assert ours.gradd_stats()["graphs"] == before


def test_a_wrapper_goes_without_the_collector() -> None:
    """Guards and graphs lead to the module, and hold it no longer than its wrapper does."""
    import gc
    import weakref

    model, x = ORTModule(Reader(), strict=True), batch()[0]
    _trained(model, x, steps=12)
    gc.collect()  # what captures and checks leave
    gc.disable()
    try:
        held = model(x)
        ref, inner = weakref.ref(model), weakref.ref(model.module)
        del model
        assert ref() is None and held is not None
        del held
        assert inner() is None
    finally:
        gc.enable()


def test_old_memory_of_parameters_is_released() -> None:
    """A graph for another form of call keeps no memory where the parameters have been."""
    model, x = ORTModule(Reader(), strict=True), batch()[0]
    for mode in (True, False):
        model.train(mode)
        _trained(model, x), _trained(model, x, 2.0)
    before = model._gradd_compiled.client.parameters.busy_bytes
    for _ in range(6):
        state = {k: v.detach().clone() for k, v in model.module.state_dict().items()}
        model.module.load_state_dict(state, assign=True)
        del state
        model.train()
        _trained(model, x), _trained(model, x, 2.0)
    client = model._gradd_compiled.client
    with client.lock:
        client.parameters.drain()
    # The captures for eval mode may still hold the places of their last call.
    assert client.parameters.busy_bytes <= 2 * before

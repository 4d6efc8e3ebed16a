"""Attributes that forward() reads or writes: adapters that are merged, counters, caches, coins."""

from __future__ import annotations

import collections
import copy
import logging
import random
from typing import Any

import models
import pytest
import torch
from nets import assert_close
from selection import every_run
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from gradd import ORTModule, export

pytestmark = pytest.mark.usefixtures("shared_daemon")


def _lora() -> tuple[ORTModule, nn.Module, dict[str, torch.Tensor]]:
    module, make = models.build("peft_lora_llama", num_hidden_layers=1)
    eager = copy.deepcopy(module)
    return ORTModule(module, strict=True), eager, make(2, 8, 0)


def _scale(model: Any) -> None:
    for sub in model.modules():
        if hasattr(sub, "set_scale"):
            sub.set_scale("default", 3.0)


def _second_adapter(model: Any) -> None:
    for sub in model.modules():
        if hasattr(sub, "lora_A"):
            sub.set_adapter(["other"])


CHANGES = [lambda m: m.merge_adapter(), _scale, _second_adapter]


@pytest.mark.parametrize("train", every_run((True,), [False, True]))
@pytest.mark.parametrize(
    "change", every_run(CHANGES[:1], CHANGES), ids=["merge", "scale", "choose"]
)
def test_adapters_may_change_between_calls(change: Any, train: bool) -> None:
    ours, eager, batch = _lora()
    for model in (ours.module, eager):
        torch.manual_seed(7)
        config = copy.deepcopy(model.peft_config["default"])
        model.add_adapter("other", config)
        for name, parameter in model.named_parameters():
            if "other" in name:
                parameter.data.normal_(0.0, 0.05)
        model.train(train)
    with torch.no_grad():
        before = eager(**batch).logits
        assert_close(ours(**batch).logits, before)
        for model in (ours.module, eager):
            change(model)
        after = eager(**batch).logits
        assert_close(ours(**batch).logits, after)
    same = torch.allclose(before, after, atol=1e-4)
    assert same == (change is CHANGES[0]), "the change must show, but for a merge"


class Annealed(nn.Module):
    """Counts its calls, as for warming up a weight of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return self.lin(x).square().mean() * min(1.0, self.step / 10)


def _watch_captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    capture = export.capture

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return capture(*args, **kwargs)

    monkeypatch.setattr(export, "capture", counted)
    return seen


def test_a_counter_in_forward_runs_in_pytorch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same values as ever, one warning, and no trace for each value of the counter."""
    seen = _watch_captures(monkeypatch)
    eager = Annealed()
    model = ORTModule(copy.deepcopy(eager))
    x = torch.ones(3, 4)
    with caplog.at_level(logging.WARNING, "gradd"):
        for _ in range(8):
            assert_close(model(x), eager(x))
    assert model.module.step == 8
    assert model.gradd_stats()["fallbacks"] == {"attribute_written": 8}
    assert len(seen) == 3
    (message,) = [r.getMessage() for r in caplog.records if "runs in PyTorch" in r.getMessage()]
    assert "the root (Annealed).step" in message


class Cached(nn.Module):
    """Builds a table at the first call and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.table: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(4.0)
        return (self.lin(x) * self.table).square().mean()


def test_a_table_built_at_the_first_call() -> None:
    eager = Cached()
    model = ORTModule(copy.deepcopy(eager))
    x = torch.ones(3, 4)
    for _ in range(3):
        assert_close(model(x), eager(x))
    assert model.gradd_stats()["fallbacks"] == {"attribute_written": 1}
    assert model.gradd_stats()["captures"] == 1


class Skipping(nn.Module):
    """Leaves a layer out by Python's coin."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if random.random() < 0.5:
            hidden = self.second(hidden)
        return hidden.square().mean()


def test_pythons_coin_is_thrown_at_every_call() -> None:
    eager = Skipping()
    model = ORTModule(copy.deepcopy(eager))
    x = torch.ones(3, 4)
    results = []
    for m in (model, eager):
        random.seed(1)
        results.append([m(x).item() for _ in range(8)])
    assert results[0] == pytest.approx(results[1])
    assert len({round(r, 5) for r in results[1]}) == 2
    assert model.gradd_stats()["fallbacks"] == {"python_random": 8}


def test_a_setting_that_a_call_fills_in_is_filled_in_by_every_call() -> None:
    model, make = models.build("bert_cls")
    wrapped, config = ORTModule(model, strict=True), model.config
    config.problem_type = None
    for _ in range(2):
        wrapped(**make(2, 5, 0)).loss.backward()
        assert config.problem_type == "single_label_classification"
        config.problem_type = None
    assert wrapped.gradd_stats()["captures"] == 1


class _Bag(dict):
    """A result of the user's own class."""


class _Row(list):
    """Another one."""


def _tagged(y: torch.Tensor) -> torch.Tensor:
    y.tag = "t"
    return y


def _with(value: Any) -> Any:
    value.tag = 1
    return value


# What forward() makes of its result; whether the caller would miss something.
_RESULTS: dict[str, tuple[Any, bool]] = {
    "a tensor": (_tagged, True),
    "a nested one": (lambda y: {"a": [y, (_tagged(y * 2),)]}, True),
    "a detached one": (lambda y: _tagged(y.detach()), True),
    "a view": (lambda y: (y, _tagged(y[:, :2])), True),
    "by its dictionary": (lambda y: (y.__dict__.update(tag=1), y)[1], True),
    "a dictionary": (lambda y: _with(_Bag(a=y)), True),
    "a list": (lambda y: _with(_Row([y])), True),
    "a ModelOutput": (lambda y: _with(BaseModelOutput(last_hidden_state=y)), True),
    "a factory": (lambda y: collections.defaultdict(int, a=y), True),
    "another tensor": (lambda y: (_tagged(y) * 2, y.view(-1)), False),
    "for a while": (lambda y: (delattr(_tagged(y), "tag"), y)[1], False),
    "plain containers": (
        lambda y: [_Bag(a=y), _Row([y]), BaseModelOutput(last_hidden_state=y)],
        False,
    ),
}


def _visible(value: Any) -> Any:
    """Classes and attributes of a result."""
    own = sorted(getattr(value, "__dict__", {}))
    if isinstance(value, torch.Tensor):
        return (torch.Tensor, own)
    factory = getattr(value, "default_factory", None)
    inner = list(value.values()) if isinstance(value, dict) else value
    return (type(value), own, factory, [_visible(v) for v in inner])


@pytest.mark.parametrize("name", _RESULTS)
def test_attributes_of_a_result(name: str) -> None:
    """They are there, if need be because PyTorch runs the call."""
    make, lost = _RESULTS[name]

    class Returns(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return make(super().forward(x))

    eager = Returns(4, 4)
    ours, x = ORTModule(copy.deepcopy(eager)), torch.ones(2, 4)
    for _ in range(2):
        assert _visible(ours(x)) == _visible(eager(x))
    stats = ours.gradd_stats()
    assert stats["fallbacks"] == ({"attribute_written": 2} if lost else {}), stats
    assert stats["captures"] == (0 if lost else 1)


class Chooser(nn.Module):
    """Reads a container, as an adapter does that lists which of its parts are active."""

    def __init__(self, active: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})
        self.active = active

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.parts.items()
        return sum(part(x) * len(name) for name, part in parts if name in self.active)


class Twins(Chooser):
    """Asks whether two attributes are one object."""

    def __init__(self, active: Any) -> None:
        super().__init__(active)
        self.other = active

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x) * (2.0 if self.other is self.active else 3.0)
        return found * len(self.other)


FILL = {list: "extend", set: "update", dict.fromkeys: "update"}


@pytest.mark.parametrize("kind", FILL)
def test_an_equal_container_assigned_anew_is_the_same(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT's set_adapter() in every step; what changes in the new one is noticed as ever."""
    seen = _watch_captures(monkeypatch)
    eager = Chooser(kind("ab"))
    model = ORTModule(copy.deepcopy(eager), strict=True)
    x = torch.ones(3, 4)
    for _ in range(6):
        eager.active = model.module.active = kind("ab")
        assert_close(model(x), eager(x))
    assert len(seen) == 1
    for names in ("bc", "ab", "c", "bc", "ab"):
        eager.active = model.module.active = kind(names)
        assert_close(model(x), eager(x))
    assert len(seen) == 3, "one for each choice"
    for module in (eager, model.module):  # the new one in place
        module.active.clear()
        getattr(module.active, FILL[kind])(kind("a"))
    assert_close(model(x), eager(x))


def test_containers_that_were_one_object_and_are_not_any_more() -> None:
    eager = Twins(["a", "b"])
    model = ORTModule(copy.deepcopy(eager), strict=True)
    x = torch.ones(3, 4)
    for change in (
        lambda m: setattr(m, "active", ["a", "b"]),
        lambda m: m.other.append("c"),
        lambda m: setattr(m, "other", m.active),
        lambda m: m.active.append("c"),
        lambda m: (setattr(m, "active", [*m.active]), setattr(m, "other", m.active)),
        lambda m: m.other.remove("a"),
    ):
        assert_close(model(x), eager(x))
        for module in (model.module, eager):
            change(module)
    assert_close(model(x), eager(x))

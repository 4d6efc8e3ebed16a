"""memory_budget, GRADD_MEMORY_BUDGET, ORTMODULE_MEMORY_OPT_LEVEL and activation checkpoints.

values/test_recompute.py tests the plans that the engine makes for a budget; here are tests of the
budget that reaches it, and of the messages to the user.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gradd
from gradd import ORTModule, errors
from gradd.calls import parameters
from gradd.memory.budget import Memory, parse_bytes
from helpers import wrapper_internals
from helpers.models import families

pytestmark = [pytest.mark.one_in(6), pytest.mark.quick, pytest.mark.usefixtures("shared_daemon")]

WIDTH = 64


class Deep(torch.nn.Module):
    """Residual layers, plain or each in an activation checkpoint."""

    def __init__(self, layers: int = 6, kind: str = "plain", dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.into = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 4 * WIDTH) for _ in range(layers))
        self.out = torch.nn.ModuleList(torch.nn.Linear(4 * WIDTH, WIDTH) for _ in range(layers))
        self.dropout = torch.nn.Dropout(dropout)
        self.kind = kind
        self.register_buffer("scale", torch.ones(WIDTH))

    def layer(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.out[i](torch.tanh(self.into[i](x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(len(self.into)):
            if self.kind == "plain":
                x = self.layer(i, x)
            else:
                x = checkpoint(self.layer, i, x, use_reentrant=self.kind == "reentrant")
        return (x * self.scale).square().mean()


def batch() -> torch.Tensor:
    return torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(2))


def step(model: Any, of_input: bool = False) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(batch().requires_grad_(of_input))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def explained(model: ORTModule) -> gradd.Explanation:
    return model.gradd_explain(batch())


def peaks(net: torch.nn.Module) -> tuple[int, int]:
    """Planned bytes without a budget, and the least that can be met."""
    curve = gradd.estimate(net, [batch()]).curve
    return curve[0].activations, curve[-1].activations


def test_a_budget_is_met_with_the_same_bits() -> None:
    net = Deep(dropout=0.3)
    whole, least = peaks(net)
    plain = ORTModule(copy.deepcopy(net), strict=True)
    small = ORTModule(copy.deepcopy(net), strict=True, memory_budget=(whole + least) // 2)
    for a, b in zip(step(plain), step(small), strict=True):
        assert torch.equal(a, b)
    plan = explained(small)
    assert plan.arena_bytes <= (whole + least) // 2 < plan.whole_bytes == whole
    assert plan.recomputed_bytes > 0 and any(row.again for row in plan.rows)
    assert explained(plain).arena_bytes == whole and explained(plain).whole_bytes == 0


@pytest.mark.slow
def test_a_budget_that_cannot_be_met_names_one_that_can() -> None:
    net = Deep()
    _, least = peaks(net)
    model = ORTModule(net, memory_budget="1KiB")
    with pytest.raises(errors.OutOfMemoryError, match=f"can be met is {least} bytes") as error:
        model(batch())
    assert " % more time by the model" in str(error.value)
    with torch.no_grad():
        assert torch.isfinite(model(batch()))  # nothing is kept for a backward


def test_the_environment_gives_one(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Deep()
    whole, least = peaks(net)
    monkeypatch.setenv("GRADD_MEMORY_BUDGET", f"{least / 1024} KiB")
    assert explained(ORTModule(copy.deepcopy(net), strict=True)).arena_bytes == least
    own = ORTModule(copy.deepcopy(net), strict=True, memory_budget=whole)
    assert explained(own).arena_bytes == whole  # what is given to the wrapper comes first


@pytest.mark.slow
@pytest.mark.parametrize(("level", "again"), [("0", False), ("1", True), ("2", True)])
def test_levels_of_ortmodule(monkeypatch: pytest.MonkeyPatch, level: str, again: bool) -> None:
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", level)
    net = Deep()
    whole, least = peaks(net)
    plan = explained(ORTModule(net, strict=True))
    assert (plan.recomputed_bytes > 0) == again
    assert (plan.arena_bytes < whole) == again
    assert plan.arena_bytes >= least


def test_clusters_of_ortmodule_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", "BiasGelu+:1:-1")
    with pytest.raises(ValueError, match="ORTMODULE_MEMORY_OPT_CONFIG='BiasGelu"):
        ORTModule(Deep())
    monkeypatch.setenv("GRADD_DISABLE", "1")
    ORTModule(Deep())


def test_levels_that_there_are_none_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "3")
    with pytest.raises(ValueError, match="ORTMODULE_MEMORY_OPT_LEVEL='3': expected 0"):
        ORTModule(Deep())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "reentrant", "not reentrant"])
def test_checkpoints_are_the_first_level(kind: str) -> None:
    net = Deep(kind=kind)
    whole, _ = peaks(Deep())
    model = ORTModule(copy.deepcopy(net), strict=True)
    plan = explained(model)
    assert (plan.recomputed_bytes > 0) == (kind != "plain")
    assert plan.arena_bytes < whole if kind != "plain" else plan.arena_bytes == whole
    # torch's reentrant ones give no gradients unless an argument needs one
    for ours, theirs in zip(step(model, True), step(net, True), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    budget = ORTModule(copy.deepcopy(net), strict=True, memory_budget="1GiB")
    assert explained(budget).recomputed_bytes == 0  # it decides


@pytest.mark.slow
def test_checkpoints_of_transformers() -> None:
    module, make_batch = families.build("llama", num_hidden_layers=6)
    data = make_batch(2, 16, 0)
    model = ORTModule(module, strict=True)
    model(**data).loss.backward()
    before = [p.grad.clone() for p in model.parameters()]
    assert model.gradd_explain(**data).recomputed_bytes == 0
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(**data).loss.backward()
    plan = model.gradd_explain(**data)
    assert plan.recomputed_bytes > 0
    for parameter, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, grad)


@pytest.mark.slow
def test_rows_that_are_left_out_are_computed_again_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan over live rows keeps its gathered rows, or gathers them again."""
    module, make_batch = families.build("llama", num_hidden_layers=6)
    data = make_batch(4, 32, 0)
    assert not data["attention_mask"].all()
    grads, plans = [], []
    for level in ("0", "2"):
        monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", level)
        model = ORTModule(copy.deepcopy(module), strict=True)
        for _ in range(3):  # the plan over live rows is made when such a batch comes again
            model.zero_grad()
            model(**data).loss.backward()
        grads.append([p.grad for p in model.parameters()])
        plans.append(model.gradd_explain())
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert "GatherRows" in plans[1].counts()
    assert plans[0].recomputed_bytes == 0 < plans[1].recomputed_bytes


def test_what_a_recomputation_reads_must_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that the backward alone would not read: the forward does, and is run again."""
    monkeypatch.setattr(parameters, "_SMALL", 0)  # a small one is copied for each call
    net = Deep()
    model = ORTModule(net, strict=True, memory_budget=peaks(net)[1])
    loss = model(batch())
    net.scale.mul_(2)
    with pytest.raises(errors.StaleError, match="one of them has changed since"):
        loss.backward()
    step(model)


def test_copies_and_pickles_keep_the_budget() -> None:
    model = ORTModule(Deep(), strict=True, memory_budget="512 KiB")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert explained(other).arena_bytes <= 512 << 10 < explained(other).whole_bytes


@pytest.mark.slow
def test_estimates_of_a_budget() -> None:
    net = Deep()
    whole, least = peaks(net)
    data = [batch()]
    assert gradd.estimate(net, data, memory_budget=least).activations == least
    with pytest.raises(errors.OutOfMemoryError):
        gradd.estimate(net, data, memory_budget=1024)
    # the budget, not the machine's memory, is what the batch must fit into
    one = gradd.estimate(net, data, fits_gib=64, memory_budget=whole)[-1]
    assert one.batch > 128 and one.activations <= whole


def test_the_daemon_refuses_what_is_no_budget() -> None:
    model = ORTModule(Deep(), strict=True)
    step(model)
    (graph,) = wrapper_internals.graphs(model)
    wrong = {
        "expected 1 to 2\\^63 - 1 bytes": ({"memory_budget": 0}, errors.LimitError),
        "field 'memory_budget'": ({"memory_budget": 2**63}, errors.LimitError),
        "field 'recompute' 'all': expected none": ({"recompute": "all"}, errors.UnsupportedError),
    }
    for text, (fields, kind) in wrong.items():
        graph._memory = fields, fields
        graph.plans.clear()
        with pytest.raises(kind, match=text):
            explained(model)


SIZES = {
    "2GiB": 2 << 30,
    "1.5 GiB": 3 << 29,
    "512MiB": 512 << 20,
    " 64 KiB ": 64 << 10,
    ".5MiB": 512 << 10,
    "7": 7,
    "7 B": 7,
    "9007199254740993": 2**53 + 1,  # no double
}


@pytest.mark.parametrize("text", SIZES)
def test_texts_of_sizes(text: str) -> None:
    assert parse_bytes(text, "x") == SIZES[text]
    assert Memory.of(text).budget == SIZES[text]


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-1", "2GB", "2gib", "GiB", "1e9", "1..5KiB", "2 GiB x", "9999999TiB", "٣"],
)
def test_texts_that_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="memory_budget=.*expected bytes from 1, as in '2GiB'"):
        ORTModule(Deep(), memory_budget=text)


@pytest.mark.parametrize("value", [True, [1], object()])
def test_values_that_are_no_sizes(value: Any) -> None:
    with pytest.raises(TypeError, match="memory_budget: expected bytes or a text"):
        ORTModule(Deep(), memory_budget=value)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 2**63, 1.5])
def test_numbers_that_are_no_sizes(value: Any) -> None:
    with pytest.raises(ValueError, match="expected bytes from 1"):
        ORTModule(Deep(), memory_budget=value)

"""Switches of live rows, messages about them, and that they survive all that calls survive."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

import gradd
from gradd import ORTModule, errors
from gradd.calls import graph
from helpers.models.families import build
from helpers.sessions import session
from helpers.wrapper_internals import graphs, last

pytestmark = [pytest.mark.one_in(5), pytest.mark.usefixtures("shared_daemon")]
BATCH, POSITIONS = 4, 32


def padded(labelled: float = 0.3) -> dict[str, torch.Tensor]:
    """Half padding on the right, and labels on some of the real rows."""
    _, make = build("llama")
    batch = make(BATCH, POSITIONS, 3)
    mask = (torch.arange(POSITIONS) < POSITIONS // 2).long().expand(BATCH, -1).contiguous()
    chosen = torch.rand(BATCH, POSITIONS, generator=torch.Generator().manual_seed(5)) < labelled
    batch["attention_mask"] = mask
    batch["labels"] = batch["input_ids"].masked_fill(~(chosen & mask.bool()), -100)
    return batch


def trained(batch: dict[str, torch.Tensor], steps: int = 1) -> Any:
    model = ORTModule(build("llama")[0], strict=True)
    for _ in range(steps):
        model(**batch).loss.backward()
    return model


@pytest.mark.parametrize(
    ("name", "unlabelled", "padding"),
    [
        (None, True, True),
        ("GRADD_LIVE_ROWS", False, False),
        ("ORTMODULE_ENABLE_COMPUTE_OPTIMIZER", False, False),
        ("ORTMODULE_ENABLE_SPARSE_OPTIMIZER", False, False),
        ("ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER", False, True),
        ("ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER", True, False),
    ],
)
def test_a_switch_turns_off_what_it_names(
    name: str | None, unlabelled: bool, padding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name is not None:
        monkeypatch.setenv(name, "0")
    stats = trained(padded()).gradd_stats()
    assert (stats["unlabelled_rows_left_out"] > 0) == unlabelled
    assert (stats["padding_rows_left_out"] > 0) == padding
    assert (stats["flops_left_out"] > 0) == (unlabelled or padding)


@pytest.mark.parametrize("check", ["0", "1"])  # whose own calls print nothing
def test_rows_and_memory_are_printed(
    check: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", check)
    monkeypatch.setenv("ORTMODULE_PRINT_INPUT_DENSITY", "1")
    monkeypatch.setenv("ORTMODULE_PRINT_MEMORY_STATS", "1")
    batch = padded()
    trained(batch)
    lines = capsys.readouterr().out.splitlines()
    n = int((batch["labels"][:, 1:] != -100).sum())
    assert lines[0] == (
        f"gradd: {n} of 128 rows ({n / 128:.1%}) have a label, 64 (50.0%) are no padding"
    )
    assert [line.split(":")[1] for line in lines[1:]] == [" after forward", " after backward"]


def test_labels_on_padding_and_odd_masks_run_over_all_rows() -> None:
    """Every call checks the assumptions about labels and masks."""
    model, batch = trained(padded()), padded()
    before = model.gradd_stats()["padding_rows_left_out"]
    on_padding = {**batch, "labels": batch["input_ids"].clone()}
    model(**on_padding).loss.backward()
    odd = {**batch, "attention_mask": batch["attention_mask"] * 2}
    model(**odd).loss.backward()
    assert model.gradd_stats()["padding_rows_left_out"] == before
    model(**batch).loss.backward()
    assert model.gradd_stats()["padding_rows_left_out"] > before


def test_a_read_of_logits_and_a_later_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that was left out is computed over all rows; the loss's gradient is as it was."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    batch = padded()
    model = ORTModule(build("llama")[0], strict=True)
    result = model(**batch)
    result.loss.backward()
    first = [p.grad.clone() for p in model.parameters()]
    assert result.logits.shape == (BATCH, POSITIONS, result.logits.shape[-1])
    monkeypatch.setenv("GRADD_LIVE_ROWS", "0")
    twin = ORTModule(build("llama")[0], strict=True)
    other = twin(**batch)
    other.loss.backward()
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(result.logits[real], other.logits[real], rtol=1e-5, atol=1e-5)
    for own, p in zip(first, twin.parameters(), strict=True):
        torch.testing.assert_close(own, p.grad, rtol=1e-4, atol=1e-6)


def test_steps_of_all_sizes_make_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Densities as they come: plans are bounded, and most calls find one that is there."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    model, draw = ORTModule(build("llama")[0], strict=True), random.Random(2)
    for _ in range(150):
        model(**padded(draw.random()))
    stats = model.gradd_stats()
    assert stats["plans"] <= 40 and stats["captures"] == 1 and not stats["fallbacks"]
    assert stats["unlabelled_rows_left_out"] > 0.2 * stats["rows"]


def test_bits_are_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    batch, found = padded(), []
    for _ in range(2):
        model = trained(batch)
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_lists_that_break_their_rules_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon does not trust a client's lists."""
    from gradd.calls import liverows

    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    model, batch = trained(padded()), padded()
    for wrong in ([5, 5], [9, 3], [10**6], [-(10**6)], [3, -4, 7]):

        def filled(rows: torch.Tensor, size: int, wrong: list[int] = wrong) -> torch.Tensor:
            out = torch.full((size,), ~wrong[-1] if wrong[-1] >= 0 else wrong[-1])
            out[: len(wrong)] = torch.tensor(wrong)
            return out

        with monkeypatch.context() as patch:
            patch.setattr(liverows, "filled", filled)
            with pytest.raises(errors.GraddError, match="live rows"):
                model(**batch)
        model(**batch).loss.backward()  # the session has survived it


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_kill_costs_no_bit(daemon: Any, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists are inputs, and inputs are pinned: the next daemon computes the same."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")

    def steps(killed: bool) -> list[torch.Tensor]:
        over = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        model, found = ORTModule(build("bert_mlm", **over)[0], strict=True), []
        torch.manual_seed(3)
        for _ in range(3):
            model.zero_grad()
            loss = model(**padded()).loss
            if killed:
                daemon.kill()
            loss.backward()
            found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        assert model.gradd_stats()["padding_rows_left_out"] > 0
        return found

    assert all(map(torch.equal, steps(False), steps(True)))


def test_the_estimate_says_what_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that a call takes is the one that was promised."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    batch = padded()
    found = gradd.estimate(build("llama")[0], batch)
    assert found.live is not None and found.live.activations < found.activations
    model = trained(batch)
    assert model.gradd_explain().arena_bytes == found.live.activations
    assert found.live.real == 64 and found.live.labelled < 64 and found.live.percent > 30
    assert "rows of this batch" in str(found) and found.as_dict()["live"]["rows"] == 128
    everything = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    everything["labels"] = batch["input_ids"]
    assert gradd.estimate(build("llama")[0], everything).live is None


def test_plans_that_are_forgotten_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon has no more of them than the graph keeps, whatever the densities."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    monkeypatch.setattr(graph, "_PLANS", 5)
    model, draw = ORTModule(build("llama")[0], strict=True), random.Random(6)
    for _ in range(60):
        model(**padded(draw.random())).loss.backward()
    client = session()
    client.flush()
    mine = [
        p
        for p in client.request("explain", {"proto": 2})["plans"]
        if p["session"] == client.session
    ]
    assert 3 <= len(mine) <= 7, "those, the one over all rows, one of a run"


def test_plans_that_are_used_stay_and_others_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths as they come: calls on the fast path keep their plans from being the oldest."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    monkeypatch.setattr(graph, "_PLANS", 6)
    model, batch, used = ORTModule(build("llama")[0], strict=True), padded(), set()
    for length in range(4, POSITIONS):
        short = {name: values[:, :length].contiguous() for name, values in batch.items()}
        for data in (batch, short, batch):
            model(**data).loss.backward()
        used.add(last(model)[1].info.id)
    client = session()
    client.flush()
    plans = client.request("explain", {"proto": 2})["plans"]
    mine = [p for p in plans if p["session"] == client.session]
    assert len(used) == 1, "the plan of a batch that comes again and again was compiled again"
    assert 6 <= len(mine) <= 7, "those, and one of a run"


def test_a_budget_holds_over_live_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan over all rows and the one without padding are within it, with the same bits."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    batch, arenas, found = padded(), [], []
    net = build("llama", num_hidden_layers=4)[0]
    curve = gradd.estimate(net, batch).curve
    draw = random.Random(8)
    least, whole = curve[-1].activations, curve[0].activations
    drawn = sorted((draw.randint(least, whole) for _ in range(2)), reverse=True)
    for budget in [None, *drawn, least]:
        model = ORTModule(copy.deepcopy(net), strict=True, memory_budget=budget)
        model(**batch).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
        assert model.gradd_stats()["padding_rows_left_out"] > 0
        # With a budget, plans that have no share of it are estimates, and do not run.
        plans = [item for graph in graphs(model) for item in graph.plans.items()]
        peaks = [plan.info.peak for (*_, share, _), plan in plans if share != 0 or budget is None]
        arenas.append(model.gradd_explain().arena_bytes)
        assert len(peaks) >= 2 and (budget is None or max(peaks) <= budget)
        assert all(map(torch.equal, found[0], found[-1]))
    assert arenas == sorted(arenas, reverse=True) and arenas[-1] < arenas[0]

"""The forms in which trainers call models: each agrees with PyTorch as in test_parity.py.

Padding on either side, labels that are ignored, no labels (the loss outside the model), position
ids, `num_items_in_batch` as tensor and as number, hidden states, a batch of one at first, frozen
weights.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import nn

from gradd.session import client
from helpers.models import families
from helpers.parity import steps
from helpers.selection import every_run

pytestmark = [pytest.mark.one_in(6), pytest.mark.usefixtures("shared_daemon")]

STEPS = 3
IGNORED = -100


def _batches(make: families.MakeBatch, change: Any, sizes: list[tuple[int, int]]) -> list[dict]:
    return [change(make(*size, seed)) for seed, size in enumerate(sizes)]


def _build(name: str) -> tuple[nn.Module, families.MakeBatch]:
    """A model with one layer, where it has layers."""
    layers = "n_layer" if name.startswith("gpt2") else "num_hidden_layers"
    return families.build(name, **({} if name in families.MLPS else {layers: 1}))


def _train(
    name: str, change: Any, *, loss_of: steps.Loss = steps.loss_in_graph, constants: int = 0
) -> steps.Pair:
    """Steps of a small model on batches that `change` has changed, then on other sizes."""
    model, make = _build(name)
    first = _batches(make, change, [(3, 8)] * STEPS)
    others = _batches(make, change, [(1, 12), (4, 5)])
    return steps.run(model, first, others, loss_of=loss_of, constants=constants)


def _pad(batch: dict[str, torch.Tensor], left: bool) -> dict[str, torch.Tensor]:
    """Row i keeps all but i tokens: every row has padding of another width."""
    keep = torch.ones_like(batch["input_ids"])
    for row in range(keep.shape[0]):
        width = min(row + 1, keep.shape[1] - 2)
        keep[row, :width] = 0
    if not left:
        keep = keep.flip(1)
    ids = batch["input_ids"].clamp_min(2) * keep
    return {"input_ids": ids, "attention_mask": keep, "labels": ids.masked_fill(keep == 0, IGNORED)}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", every_run(("llama",), ["llama", "gpt2", "mistral"]))
def test_padding(name: str, side: str) -> None:
    _train(name, lambda b: _pad(b, side == "left"))


def test_most_labels_are_ignored() -> None:
    def change(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        batch["labels"][:, :-2] = IGNORED  # instruction tuning: only the answer counts
        return batch

    _train("llama_nomask", change)


def test_a_batch_without_any_label() -> None:
    """PyTorch's mean over nothing is not a number; so is the daemon's, and the next is right."""
    model, make = _build("llama_nomask")
    pair = steps.Pair(model)
    pair.step(make(2, 8, 0))
    empty = make(2, 8, 1)
    empty["labels"].fill_(IGNORED)
    for side in (pair.ours, pair.theirs):
        side.passes(empty, steps.loss_in_graph)
        assert side.loss != side.loss
        for name, gradient in side.gradients().items():
            assert gradient is not None, name
    nan = {n: g.isnan().all().item() for n, g in pair.theirs.gradients().items()}
    assert nan == {n: g.isnan().all().item() for n, g in pair.ours.gradients().items()}
    pair.step(make(2, 8, 2))


@pytest.mark.parametrize("name", every_run(("gpt2_nomask",), ["llama", "gpt2_nomask"]))
def test_loss_outside_of_the_model(name: str) -> None:
    """No labels are given: the logits are real, and their gradient comes from PyTorch."""

    def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch.pop("labels")
        scores = model(**batch).logits
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())

    _train(name, lambda b: b, loss_of=loss_of)


@pytest.mark.parametrize("name", every_run(("llama",), ["llama", "gpt2"]))
def test_position_ids(name: str) -> None:
    def change(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        batch = _pad(batch, left=True)
        places = batch["attention_mask"].cumsum(-1) - 1
        return {**batch, "position_ids": places.clamp_min(0)}

    _train(name, change)


def test_packed_sequences() -> None:
    """Without a mask, positions that start again separate the documents of a row."""

    def change(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        places = torch.arange(batch["input_ids"].shape[1])
        places = torch.where(places < 3, places, places - 3)
        return {**batch, "position_ids": places.expand_as(batch["input_ids"]).contiguous()}

    _train("llama_nomask", change)


@pytest.mark.parametrize("number", every_run((int,), [torch.tensor, int, float]))
def test_num_items_in_batch(number: Any) -> None:
    """What Trainer passes; the count differs in every batch and is not baked into the graph."""

    def change(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        count = int((batch["labels"] != IGNORED).sum()) + int(batch["input_ids"][0, 0])
        return {**batch, "num_items_in_batch": number(count)}

    _train("llama", change, constants=number is not torch.tensor)


def test_hidden_states_have_gradients() -> None:
    """Outputs beside the loss: each is differentiable."""

    def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        result = model(**batch, output_hidden_states=True)
        return result.loss + 0.1 * result.hidden_states[-1].square().mean()

    _train("llama", lambda b: b, loss_of=loss_of, constants=2)  # hooks of the first call


def test_logits_beside_the_loss() -> None:
    """Logits are computed when they are read, here by a second loss."""
    read: list[torch.Tensor] = []

    def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        result = model(**batch)
        read.append(result.logits.detach().clone())
        return result.loss

    _train("llama", lambda b: b, loss_of=loss_of)
    for ours, theirs in zip(read[::2], read[1::2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", every_run(("mlp_ce",), ("llama", "gpt2_nomask", "bert_mlm", "mlp_ce"))
)
def test_batch_of_one_first(name: str) -> None:
    """More rows than one in later batches, fewer in earlier ones."""
    model, make = _build(name)
    first = [make(1, 8, seed) for seed in range(STEPS)]
    steps.run(model, first, [make(4, 8, 50), make(2, 5, 51)])


def test_lora_does_no_work_for_frozen_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a LoRA model has fewer backward nodes than one where all weights train."""
    nodes = _watch_plans(monkeypatch)
    model, make = families.build("peft_lora_llama")
    pair = steps.Pair(model)
    pair.step(make(2, 8, 0))
    pair.finish()
    frozen = max(nodes, key=itemgetter(1))
    nodes.clear()
    for parameter in pair.wrapped.parameters():
        parameter.requires_grad_(True)
    steps.loss_in_graph(pair.wrapped, make(2, 8, 1)).backward()
    full = max(nodes, key=itemgetter(1))
    assert pair.wrapped.gradd_stats()["captures"] == 1, "freezing is a matter of plans"
    linears = [n for n, p in pair.wrapped.named_parameters() if "lora" not in n and p.dim() == 2]
    assert full[1] - frozen[1] >= len(linears), f"{frozen} launches with LoRA, {full} without"
    assert all(p.grad is not None for p in pair.wrapped.parameters())


def _watch_plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(forward, backward) launches of every plan that the daemon makes from now on."""
    seen: list[tuple[int, int]] = []
    original = client.protocol.plan_info

    def plan_info(plan_id: int, reply: dict[str, Any]) -> Any:
        launches = reply["launches"]
        seen.append((launches["forward"], launches["backward"]))
        return original(plan_id, reply)

    monkeypatch.setattr(client.protocol, "plan_info", plan_info)
    return seen


def test_freezing_while_training() -> None:
    """Gradual unfreezing, as trainers do: other plans, the same capture."""
    model, make = _build("llama")
    pair = steps.Pair(model)
    for step, frozen in enumerate(["embed_tokens", "self_attn", "", "lm_head"]):
        for side in (pair.ours, pair.theirs):
            for name, parameter in side.model.named_parameters():
                parameter.requires_grad_(not frozen or frozen not in name)
                parameter.grad = None
        pair.step(make(2, 8, step))
    assert pair.wrapped.gradd_stats()["captures"] == 1
    assert pair.wrapped.gradd_stats()["fallbacks"] == {}

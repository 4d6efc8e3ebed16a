"""Trainer in bf16: `bf16=True` (autocast over float32 parameters) and models converted to bf16.

Everything runs strictly, so a fallback is an error. Losses may be at most twice as far from those
of a float32 Trainer as those of Trainer in bf16 are, over the run.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from helpers.selection import every_run
from helpers.trainers.hugging_face import losses, make_trainer, norms, tiny_llama

pytestmark = pytest.mark.one_in(4)

TWICE = 2.0
ROUNDING = 2.0**-9


def converted() -> Any:
    return tiny_llama().to(torch.bfloat16)


def rounded() -> Any:
    """The float32 model with the values of the converted one."""
    return converted().float()


def distance(values: list[float], exact: list[float]) -> float:
    """Root of the mean square of the relative distances."""
    assert len(values) == len(exact) > 0
    pairs = zip(values, exact, strict=True)
    return math.sqrt(sum(((a - e) / e) ** 2 for a, e in pairs) / len(exact))


def assert_as_near(ours: Trainer, plain: Trainer, exact: Trainer) -> None:
    """Losses and gradient norms within twice Trainer's own distance; nothing ran in PyTorch."""
    for what in (losses, norms):
        own = distance(what(plain), what(exact))
        off = distance(what(ours), what(exact))
        assert off <= TWICE * max(own, ROUNDING), f"{what.__name__}: {off:.2e}, Trainer {own:.2e}"
    assert ours.gradd_stats()["fallbacks"] == {}
    assert ours.gradd_stats()["forwards"] >= len(losses(ours))


def three(folder: Path, exact: Any, half: Any, bf16: bool, **options: Any) -> list[Trainer]:
    """(gradd, Trainer, Trainer in float32), trained."""
    trainers = []
    for kind, build, flag in (
        ("gradd", half, bf16),
        ("torch", half, bf16),
        ("torch", exact, False),
    ):
        trainer = make_trainer(kind, folder, build(), bf16=flag, **options)
        trainer.train()
        trainers.append(trainer)
    return trainers


def test_autocast_runs_in_the_daemon(daemon, tmp_path: Path) -> None:
    ours, plain, exact = three(tmp_path, tiny_llama, tiny_llama, True, max_steps=6)
    assert_as_near(ours, plain, exact)
    assert ours.gradd_stats()["captures"] == 1
    parameter = next(ours.model.parameters())
    assert parameter.dtype is torch.float32


def test_autocast_with_accumulation_and_clipping(daemon, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.2, "max_steps": 4}
    assert_as_near(*three(tmp_path, tiny_llama, tiny_llama, True, **options))


def evaluations(trainer: Trainer) -> list[float]:
    return [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]


def test_autocast_evaluates_in_the_daemon(daemon, tmp_path: Path) -> None:
    """While training; afterwards the model is the user's again and runs in PyTorch."""
    options = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    ours, plain, exact = three(tmp_path, tiny_llama, tiny_llama, True, **options)
    assert_as_near(ours, plain, exact)
    own, off = (distance(evaluations(t), evaluations(exact)) for t in (plain, ours))
    assert off <= TWICE * max(own, ROUNDING)
    stats = ours.gradd_stats()
    assert stats["captures"] == 2 and stats["forwards"] >= 4 + 2
    assert ours.predict(ours.eval_dataset).predictions.dtype == "float32"


def test_full_bf16_evaluation(daemon, tmp_path: Path) -> None:
    """Trainer converts the model in place for it: its parameters leave and enter shared memory."""
    ours, plain = (
        make_trainer(k, tmp_path, bf16_full_eval=True, max_steps=2) for k in ("gradd", "torch")
    )
    for trainer in (ours, plain):
        trainer.train()
    values = [t.evaluate()["eval_loss"] for t in (ours, plain)]
    assert values[0] == pytest.approx(values[1], rel=2 * ROUNDING)
    assert next(ours.model.parameters()).dtype is torch.bfloat16
    ours.optimizer = ours.lr_scheduler = None  # their state is that of float32 parameters
    ours.train()
    stats = ours.gradd_stats()
    assert stats["fallbacks"] == {} and stats["captures"] == 2


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_ort_fused"])
def test_bf16_parameters(daemon, tmp_path: Path, optimizer: str) -> None:
    ours, plain, exact = three(tmp_path, rounded, converted, False, max_steps=6, optim=optimizer)
    assert_as_near(ours, plain, exact)
    for p in ours.model.parameters():
        assert p.dtype is torch.bfloat16


def test_master_weights_by_argument(daemon, tmp_path: Path) -> None:
    options = {"optim": "adamw_ort_fused", "max_steps": 3}
    trainer = make_trainer(
        "gradd", tmp_path, converted(), optim_args="master_weights=true", **options
    )
    trainer.train()
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    assert all("master" in state for state in inner.state.values()) and inner.state
    with pytest.raises(ValueError, match="foo=1.*master_weights"):
        make_trainer("gradd", tmp_path, converted(), optim_args="foo=1", **options).train()


def test_lazy_adam_by_argument(daemon, tmp_path: Path) -> None:
    """Rows of tokens that never occur are not even decayed."""
    options = {"optim": "adamw_ort_fused", "max_steps": 3, "weight_decay": 0.5}
    arguments = "master_weights=false, sparse_rows=true"
    trainer = make_trainer("gradd", tmp_path, converted(), optim_args=arguments, **options)
    table = trainer.model.get_input_embeddings().weight
    before = table.detach().clone()
    trainer.train()
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    unused = ~(inner.state[table]["exp_avg"] != 0).any(1)
    assert 0 < int(unused.sum()) < len(table)
    assert torch.equal((table == before).all(1), unused)


@pytest.mark.parametrize("way", every_run(("masters",), ["autocast", "masters"]))
def test_resumes_bit_for_bit(daemon, tmp_path: Path, way: str) -> None:
    options: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    build = tiny_llama
    if way == "autocast":
        options["bf16"] = True
    else:
        build = converted
        options |= {"optim": "adamw_ort_fused", "optim_args": "master_weights=true"}
    whole = make_trainer("gradd", tmp_path, build(), **options)
    whole.train()
    checkpoint = Path(whole.args.output_dir) / "checkpoint-3"
    resumed = make_trainer("gradd", tmp_path, build(), **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses(resumed)[-3:] == losses(whole)[-3:]
    for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_second_trainer_on_the_same_model(daemon, tmp_path: Path) -> None:
    """As when a notebook's cell is run twice: accelerate's wrapper is still on the model."""
    runs = []
    for kind in ("gradd", "torch"):
        model = tiny_llama()
        for _ in range(2):
            trainer = make_trainer(kind, tmp_path, model, bf16=True, max_steps=2)
            trainer.train()
        trainer.train()  # and the same trainer once more
        runs.append(trainer)
    ours, plain = runs
    assert ours.gradd_stats()["fallbacks"] == {} and ours.gradd_stats()["captures"] == 1
    assert distance(losses(ours), losses(plain)) <= 4 * ROUNDING


def test_one_forward_per_step(daemon, tmp_path: Path) -> None:
    """Accelerate converts every bf16 output; this does not compute logits that are not read."""
    ours = make_trainer("gradd", tmp_path, bf16=True, max_steps=4)
    seen: list[torch.Tensor] = []
    compute_loss = ours.compute_loss

    def noting(model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = compute_loss(model, inputs, return_outputs=True, **kwargs)
        seen.append(outputs["logits"])
        return loss

    ours.compute_loss = noting
    ours.train()
    stats = ours.gradd_stats()
    # What is held at the first step of the optimizer is computed before it.
    assert stats["forwards"] == 5 + stats["self_check_forwards"] and stats["repeated_forwards"] == 1
    assert daemon.ps()["counters"]["forward"] == stats["forwards"]
    assert all(t.dtype is torch.float32 and not t.gradd_is_computed for t in seen)

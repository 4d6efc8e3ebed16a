"""A model that is an ORTModule already, given to transformers' Trainer or to ORTTrainer.

Trainer decides a lot by the class of its model: labels, shifted or not, columns, what is saved.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers import Trainer, TrainingArguments

from gradd import ORTModule
from helpers.nets import assert_close
from helpers.selection import one_in
from optimum.gradd import ORTTrainer, ORTTrainingArguments

pytestmark = [pytest.mark.one_in(6), pytest.mark.usefixtures("shared_daemon")]
ROWS = [{"input_ids": list(range(i, i + 12)), "labels": list(range(i, i + 12))} for i in range(16)]
CONFIG = transformers.LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    bos_token_id=0,
    eos_token_id=0,
)


def _llama(tied: bool = False) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": tied})
    )


def _trainer(model: Any, folder: Path, kind: type = Trainer, **options: Any) -> Trainer:
    arguments = ORTTrainingArguments if kind is ORTTrainer else TrainingArguments
    defaults = {"max_steps": 4, "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-2}
    args = arguments(
        str(folder),
        report_to=[],
        use_cpu=True,
        per_device_train_batch_size=4,
        **{**defaults, **options},
    )
    return kind(model=model, args=args, train_dataset=ROWS, eval_dataset=ROWS[:4])


def _losses(trainer: Trainer, name: str = "loss") -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def _forwards(trainer: Trainer, model: Any) -> int:
    own = trainer.gradd_stats() if isinstance(trainer, ORTTrainer) else model.gradd_stats()
    assert own["fallbacks"] == {}
    return own["forwards"]


KINDS = pytest.mark.parametrize("kind", [Trainer, ORTTrainer])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing_factor": 0.1},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "best": {
        **{"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2},
        **{"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"},
    },
}


@KINDS
@pytest.mark.parametrize("options", one_in(2, OPTIONS))
def test_the_losses_are_those_of_the_plain_model(kind: type, options: str, tmp_path: Path) -> None:
    found = []
    for wrap in (False, True):
        model = ORTModule(_llama()) if wrap else _llama()
        trainer = _trainer(model, tmp_path, kind if wrap else Trainer, **OPTIONS[options])
        trainer.train()
        found.append((trainer, [p.detach().clone() for p in model.parameters()]))
    (theirs, right), (ours, mine) = found
    assert _losses(ours) == pytest.approx(_losses(theirs), rel=1e-5)
    assert len(_losses(ours)) == 4
    assert _losses(ours, "eval_loss") == pytest.approx(_losses(theirs, "eval_loss"), rel=1e-5)
    assert bool(_losses(ours, "eval_loss")) == (options in ("evaluation", "best"))
    for a, b in zip(mine, right, strict=True):
        assert_close(a, b)
    assert _forwards(ours, model) >= 4


@KINDS
@pytest.mark.parametrize("tied", [False, True])
def test_what_is_saved_can_be_loaded(kind: type, tied: bool, tmp_path: Path) -> None:
    model = ORTModule(_llama(tied))
    trainer = _trainer(model, tmp_path / "run", kind, save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", tmp_path / "run" / "checkpoint-4"):
        assert {"config.json", "model.safetensors"} <= set(os.listdir(folder))
        again = transformers.LlamaForCausalLM.from_pretrained(folder)
        for a, b in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(a, b)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert_close(a, b)


@KINDS
def test_predictions(kind: type, tmp_path: Path) -> None:
    found = [
        _trainer(model, tmp_path, used).predict(ROWS[:5])
        for model, used in ((_llama(), Trainer), (ORTModule(_llama()), kind))
    ]
    assert_close(torch.tensor(found[1].predictions), torch.tensor(found[0].predictions))
    assert (found[1].label_ids == found[0].label_ids).all()
    assert found[1].metrics["test_loss"] == pytest.approx(found[0].metrics["test_loss"], rel=1e-5)


def test_a_function_that_makes_wrapped_models(tmp_path: Path) -> None:
    args = ORTTrainingArguments(
        str(tmp_path), report_to=[], use_cpu=True, max_steps=2, save_strategy="no"
    )
    trainer = ORTTrainer(
        model_init=lambda: ORTModule(_llama()), args=args, train_dataset=ROWS, eval_dataset=ROWS
    )
    trainer.train()
    assert type(trainer.model) is transformers.LlamaForCausalLM
    assert trainer.gradd_stats()["forwards"] >= 2


@KINDS
def test_an_adapter_of_peft(kind: type, tmp_path: Path) -> None:
    found = []
    for wrap in (False, True):
        model = peft.get_peft_model(
            _llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        )
        model = ORTModule(model) if wrap else model
        trainer = _trainer(model, tmp_path, kind if wrap else Trainer)
        trainer.train()
        found.append(_losses(trainer))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert _forwards(trainer, model) >= 4
    trainer.save_model(str(tmp_path / "saved"))
    assert "adapter_config.json" in os.listdir(tmp_path / "saved")


def test_training_again_captures_nothing_again(tmp_path: Path) -> None:
    trainer = _trainer(_llama(), tmp_path, ORTTrainer)
    trainer.train()
    before = trainer.gradd_stats()["captures"]
    trainer.train()
    assert trainer.gradd_stats()["captures"] == before

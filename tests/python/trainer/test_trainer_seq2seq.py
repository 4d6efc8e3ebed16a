"""ORTSeq2SeqTrainer on a tiny BART: training in the daemon, generation in PyTorch, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from helpers.trainers.hugging_face import DEFAULTS, VOCABULARY, Tokens, assert_same_losses
from optimum.gradd import ORTSeq2SeqTrainer, ORTSeq2SeqTrainingArguments

pytestmark = pytest.mark.usefixtures("daemon")


def tiny_bart() -> BartForConditionalGeneration:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64}
    return BartForConditionalGeneration(BartConfig(vocab_size=VOCABULARY, dropout=0.0, **sizes))


def train(trainer_class: Any, arguments_class: Any, folder: Path, **more: Any) -> Any:
    """Trains with an evaluation that generates in the middle of training."""
    arguments = arguments_class(
        output_dir=str(folder),
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        predict_with_generate=True,
        generation_max_length=10,
        **{**DEFAULTS, **more},
    )
    trainer = trainer_class(
        model=tiny_bart(), args=arguments, train_dataset=Tokens(), eval_dataset=Tokens(8)
    )
    trainer.train()
    return trainer


def test_generation_during_training_stays_in_pytorch(tmp_path: Path) -> None:
    plain = train(Seq2SeqTrainer, Seq2SeqTrainingArguments, tmp_path / "a")
    ours = train(ORTSeq2SeqTrainer, ORTSeq2SeqTrainingArguments, tmp_path / "b", strict=True)
    assert_same_losses(plain, ours, 1e-5)
    stats = ours.gradd_stats()
    assert not stats["fallbacks"] and stats["forwards"] >= 4
    for a, b in zip(plain.state.log_history, ours.state.log_history, strict=True):
        assert abs(a.get("eval_loss", 0) - b.get("eval_loss", 0)) < 1e-5
    made = [t.predict(Tokens(4), max_length=8).predictions for t in (plain, ours)]
    assert made[0].shape == made[1].shape and (made[0] == made[1]).all()


@pytest.mark.nightly
def test_generation_after_a_second_training_in_bf16(tmp_path: Path) -> None:
    """Accelerate's wrapper is then around our forward, and generation passes through both."""
    options = {"predict_with_generate": True, "generation_max_length": 10, "bf16": True}
    arguments = ORTSeq2SeqTrainingArguments(
        output_dir=str(tmp_path), max_steps=2, eval_strategy="steps", eval_steps=2, strict=True,
        **{**DEFAULTS, **options},
    )  # fmt: skip
    widths: list[int] = []

    def measure(prediction: Any) -> dict[str, float]:  # without one Trainer does not generate
        widths.append(prediction.predictions.shape[1])
        return {}

    trainer = ORTSeq2SeqTrainer(
        model=tiny_bart(),
        args=arguments,
        train_dataset=Tokens(),
        eval_dataset=Tokens(8),
        compute_metrics=measure,
    )
    for _ in range(2):
        trainer.train()
    assert set(trainer.gradd_stats()["in_torch"]) == {"decoding"} and len(widths) == 2

"""Helpers of the trainer tests: tiny models, data, and pairs of runs of Trainer and ORTTrainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from optimum.gradd import ORTTrainer, ORTTrainingArguments

VOCABULARY = 128
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "seed": 1,
    "disable_tqdm": True,
    "optim": "adamw_torch",
}


class Tokens(torch.utils.data.Dataset):
    """Random rows; `varied` gives them different lengths (padded by the collator)."""

    def __init__(self, count: int = 40, length: int = 16, varied: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randint(3, VOCABULARY, (count, length), generator=generator)
        self._varied = varied

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[index]
        if self._varied:
            row = row[: 8 + index % 9]
        return {"input_ids": row, "labels": row.clone(), "attention_mask": torch.ones_like(row)}


def pad(features: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collates rows of different lengths; padding carries no label."""
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        key: torch.nn.utils.rnn.pad_sequence(
            [f[key] for f in features], batch_first=True, padding_value=value
        )
        for key, value in fill.items()
    }


def tiny_llama(seed: int = 0, **config: Any) -> LlamaForCausalLM:
    """One layer of width 32, always the same weights for a seed."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **{**sizes, **config},
        )
    )


def make_trainer(kind: str, folder: Path, model: Any = None, **options: Any) -> Trainer:
    """A trainer of kind "torch" or "gradd" around equal models, data and arguments.

    Options that Trainer's constructor knows go there, all others are training arguments.
    """
    names = ("data_collator", "train_dataset", "eval_dataset", "compute_metrics", "callbacks")
    names += ("model_init", "compute_loss_func", "preprocess_logits_for_metrics")
    chosen = {name: options.pop(name) for name in names if name in options}
    chosen.setdefault("train_dataset", Tokens())
    chosen.setdefault("eval_dataset", Tokens(8))
    arguments = {**DEFAULTS, "output_dir": str(folder / kind), **options}
    if model is None and "model_init" not in chosen:
        model = tiny_llama()
    if kind == "torch":
        for ours_only in ("strict", "use_module_with_loss", "save_onnx", "onnx_prefix"):
            arguments.pop(ours_only, None)
        if arguments["optim"] == "adamw_ort_fused":
            arguments["optim"] = "adamw_torch"
        return Trainer(model=model, args=TrainingArguments(**arguments), **chosen)
    arguments.setdefault("strict", True)  # a fallback would compare PyTorch with itself
    return ORTTrainer(model=model, args=ORTTrainingArguments(**arguments), **chosen)


def losses(trainer: Trainer) -> list[float]:
    """The logged training losses."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def norms(trainer: Trainer) -> list[float]:
    """The logged gradient norms."""
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


def train_pair(folder: Path, build: Any = tiny_llama, **options: Any) -> tuple[Trainer, Trainer]:
    """Trains both kinds on equal models; returns (Trainer, ORTTrainer)."""
    pair = []
    for kind in ("torch", "gradd"):
        trainer = make_trainer(kind, folder, build(), **options)
        trainer.train()
        pair.append(trainer)
    return pair[0], pair[1]


def assert_same_losses(a: Trainer, b: Trainer, tolerance: float = 1e-4) -> None:
    """Both logged the same number of losses, each within the tolerance."""
    first, second = losses(a), losses(b)
    assert len(first) == len(second) > 0
    worst = max(abs(x - y) for x, y in zip(first, second, strict=True))
    assert worst <= tolerance, f"losses differ by {worst:.2e}: {first[:6]} against {second[:6]}"

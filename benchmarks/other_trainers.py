"""Trainers of TRL, sentence-transformers and Lightning as workloads, at the size of `llama`.

Their packages are those of requirements-trainers.txt. The trainer is that of the package in both
engines; for ORTTrainer a part of its model is wrapped, as docs/trainers.md says.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from workloads import SEED, STEPS

ROWS = 256  # of a data set, which is read again and again
Made = tuple[Any, nn.Module | None]  # a trainer, and the wrapper if there is one


@dataclass(frozen=True)
class Other:
    """A trainer of another package.

    Attributes:
        what: For the table.
        build: Makes the plain model; for the small size, if told so.
        make: Makes the trainer of (model, whether to wrap it, small size, folder).
        sequences: Of a step.
        precision: That the trainer computes in.
    """

    what: str
    build: Callable[[bool], nn.Module]
    make: Callable[[nn.Module, bool, bool, str], Made]
    sequences: int
    precision: str = "fp32"


def _sizes(quick: bool) -> tuple[int, int]:
    """Tokens of a sequence, and words of the vocabulary."""
    return (64, 2000) if quick else (256, 32000)


def _tokenizer(words: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[BOS]", "[EOS]", "[CLS]", "[SEP]", "[MASK]"]
    names = [*special, *(f"w{i}" for i in range(len(special), words))]
    table = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = {f"{name.strip('[]').lower()}_token": name for name in special}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **marks)


def _texts(quick: bool, tokens: int, seed: int) -> list[str]:
    """Rows of so many random words."""
    generator = torch.Generator().manual_seed(SEED + seed)
    numbers = torch.randint(7, _sizes(quick)[1], (ROWS, tokens), generator=generator)
    return [" ".join(f"w{n}" for n in row) for row in numbers.tolist()]


def _common(folder: str, sequences: int) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": sequences,
        "learning_rate": 1e-5,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }


def _llama(quick: bool) -> nn.Module:
    import workloads

    return workloads.make("llama", quick).build()[0]


def _adapted(quick: bool) -> nn.Module:
    import workloads

    return workloads.make("lora", quick).build()[0]


def _sft(model: Any, wrap: bool, quick: bool, folder: str) -> Made:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from gradd import ORTModule

    layers, owner = None, model.base_model.model if hasattr(model, "peft_config") else model
    if wrap:
        layers = owner.model = ORTModule(owner.model)
    tokens, words = _sizes(quick)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**_common(folder, 4), max_length=tokens),
        train_dataset=Dataset.from_dict({"text": _texts(quick, tokens - 1, 0)}),
        processing_class=_tokenizer(words),
    )
    return trainer, layers


def _dpo(model: Any, wrap: bool, quick: bool, folder: str) -> Made:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from gradd import ORTModule

    layers, (tokens, words) = None, _sizes(quick)
    if wrap:
        layers = model.model = ORTModule(model.model)
    half = tokens // 4
    rows = {"prompt": _texts(quick, half, 0)}
    for seed, name in enumerate(("chosen", "rejected"), 1):
        rows[name] = [f" {text}" for text in _texts(quick, half - 1, seed)]
    trainer = DPOTrainer(
        model=model,
        ref_model=_llama(quick),
        args=DPOConfig(**_common(folder, 4), max_length=tokens),
        train_dataset=Dataset.from_dict(rows),
        processing_class=_tokenizer(words),
    )
    return trainer, layers


def _sentence_model(quick: bool) -> nn.Module:
    import sentence_transformers
    import workloads
    from sentence_transformers.models import Pooling, Transformer

    bert = workloads.make("bert", quick).build()[0].bert
    with tempfile.TemporaryDirectory() as folder:
        bert.save_pretrained(folder)
        _tokenizer(bert.config.vocab_size).save_pretrained(folder)
        words = Transformer(folder, max_seq_length=_sizes(quick)[0] // 2)
    pooled = [words, Pooling(bert.config.hidden_size)]
    return sentence_transformers.SentenceTransformer(modules=pooled, device="cpu")


def _sentences(model: Any, wrap: bool, quick: bool, folder: str) -> Made:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    from gradd import ORTModule

    encoder = None
    if wrap:
        encoder = model[0].model = ORTModule(model[0].model)
    tokens = _sizes(quick)[0] // 2
    rows = {name: _texts(quick, tokens, i) for i, name in enumerate(("anchor", "positive"))}
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(**_common(folder, 8)),
        train_dataset=Dataset.from_dict(rows),
        loss=losses.MultipleNegativesRankingLoss(model),
    )
    return trainer, encoder


def _lightning(model: Any, wrap: bool, quick: bool, folder: str) -> Made:
    import lightning

    from gradd import ORTModule

    class Task(lightning.LightningModule):
        """A network whose batches are its inputs."""

        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            """Returns the loss, a number."""
            return self.net(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            """AdamW of the parameters."""
            return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=True)

    tokens, words = _sizes(quick)
    generator = torch.Generator().manual_seed(SEED)
    rows = torch.randint(7, words, (ROWS, tokens), generator=generator)
    net = ORTModule(model) if wrap else model
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    data = torch.utils.data.DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    return (trainer, Task(net), data), net if wrap else None


OTHERS = {
    "trl_sft": Other("TRL's SFTTrainer on the model of llama", _llama, _sft, 4),
    "trl_lora": Other("TRL's SFTTrainer on the model of lora (PEFT)", _adapted, _sft, 4),
    "trl_dpo": Other("TRL's DPOTrainer on the model of llama, pairs", _llama, _dpo, 4),
    "sentences": Other(
        "sentence-transformers on the encoder of bert, pairs", _sentence_model, _sentences, 8
    ),
    "lightning": Other(
        "Lightning's Trainer on the model of llama", _llama, _lightning, 4, "bf16-mixed"
    ),
}


def tokens_of(name: str, quick: bool) -> int:
    """Of a step; of a pair those of one side."""
    share = {"trl_dpo": 2, "sentences": 2}.get(name, 1)
    return OTHERS[name].sequences * _sizes(quick)[0] // share

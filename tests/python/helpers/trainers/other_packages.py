"""Trainers of other packages around a wrapped model, each against the plain one.

`python -m helpers.trainers.other_packages NAME` prints as JSON the losses of both, and what the
daemon did. The packages (trl, sentence-transformers, lightning) are in an environment of their own.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from gradd import ORTModule

WORDS = ("the", "a", "cat", "dog", "tree", "runs", "sleeps", "sings", "under", "over", "near")
TEXTS = [" ".join(WORDS[(3 * i + j) % len(WORDS)] for j in range(6 + i % 4)) for i in range(16)]
Result = tuple[list[float], Any]  # losses, and the wrapper if there is one


SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["[PAD]", "[UNK]", "[BOS]", "[EOS]", "[CLS]", "[SEP]", "[MASK]"]
    table = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        bos_token="[BOS]",
        eos_token="[EOS]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=64,
    )


def _llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SIZES,
            pad_token_id=0,
            bos_token_id=2,
            eos_token_id=3,
        )
    )


def _bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertModel(
        transformers.BertConfig(
            **SIZES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _logged(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def _common(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": 5,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
    }


def _sft_trainer(model: Any, folder: Path) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=model,
        args=SFTConfig(**_common(folder), bf16=False, max_length=32),
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=_tokenizer(),
    )


def _train_sft(model: Any, folder: Path) -> list[float]:
    trainer = _sft_trainer(model, folder)
    trainer.train()
    return _logged(trainer)


def _with_layers_wrapped(wrap: bool) -> tuple[Any, Any]:
    model, layers = _llama(), None
    if wrap:
        layers = model.model = ORTModule(model.model)
    return model, layers


def sft(wrap: bool, folder: Path) -> Result:
    """TRL's supervised fine-tuning, which computes the loss itself, with the layers wrapped."""
    model, layers = _with_layers_wrapped(wrap)
    return _train_sft(model, folder), layers


def whole_sft(wrap: bool, folder: Path) -> Result:
    """The same with the whole model wrapped: TRL's forward goes around it."""
    model = ORTModule(_llama()) if wrap else _llama()
    return _train_sft(model, folder), model


def accelerated_sft(wrap: bool, folder: Path) -> Result:
    """The same with TRL's trainer told to use the daemon."""
    from optimum.gradd import accelerate

    trainer = _sft_trainer(_llama(), folder)
    if wrap:
        accelerate(trainer)
    trainer.train()
    return _logged(trainer), trainer


def dpo(wrap: bool, folder: Path) -> Result:
    """TRL's preference training, with the model before training as the reference."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model, layers = _with_layers_wrapped(wrap)
    rows = {"prompt": TEXTS, "chosen": [" cat sings"] * 16, "rejected": [" under near"] * 16}
    trainer = DPOTrainer(
        model=model,
        ref_model=_llama(),
        args=DPOConfig(**_common(folder), bf16=False),
        train_dataset=Dataset.from_dict(rows),
        processing_class=_tokenizer(),
    )
    trainer.train()
    return _logged(trainer), layers


def _sentences(folder: Path) -> Any:
    import sentence_transformers
    from sentence_transformers.models import Pooling, Transformer

    _bert().save_pretrained(folder / "bert")
    _tokenizer().save_pretrained(folder / "bert")
    words = Transformer(str(folder / "bert"), max_seq_length=16)
    return sentence_transformers.SentenceTransformer(modules=[words, Pooling(32)], device="cpu")


def _train_sentences(model: Any, folder: Path) -> list[float]:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(**_common(folder), bf16=False),
        train_dataset=Dataset.from_dict({"anchor": TEXTS, "positive": TEXTS[::-1]}),
        loss=losses.MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    return _logged(trainer)


def sentences(wrap: bool, folder: Path) -> Result:
    """sentence-transformers, with the encoder in the daemon."""
    model = _sentences(folder)
    inner = None
    if wrap:
        inner = model[0].model = ORTModule(model[0].model)
    return _train_sentences(model, folder), inner


def whole_sentences(wrap: bool, folder: Path) -> Result:
    """The same with the whole model wrapped."""
    model = _sentences(folder)
    wrapped = ORTModule(model) if wrap else model
    return _train_sentences(wrapped, folder), wrapped


def lightning(wrap: bool, folder: Path) -> Result:
    """A LightningModule whose network is wrapped."""
    import lightning as pl
    from torch import nn

    class Task(pl.LightningModule):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.mse_loss(self.net(x), y)
            self.losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
    net = ORTModule(net) if wrap else net
    task = Task(net)
    x = torch.randn(32, 8)
    data = torch.utils.data.TensorDataset(x, x[:, :2].sin())
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        gradient_clip_val=0.5,
        default_root_dir=str(folder),
    )
    trainer.fit(task, torch.utils.data.DataLoader(data, batch_size=8))
    return task.losses, net


TRAINERS: dict[str, Callable[[bool, Path], Result]] = {
    f.__name__: f
    for f in (sft, whole_sft, accelerated_sft, dpo, sentences, whole_sentences, lightning)
}


def main() -> None:
    """Runs one of them twice."""
    logging.getLogger("gradd").setLevel(logging.INFO)
    found = []
    for wrap in (False, True):
        torch.manual_seed(1)
        with tempfile.TemporaryDirectory() as folder:
            found.append(TRAINERS[sys.argv[1]](wrap, Path(folder)))
    (theirs, _), (ours, model) = found
    stats = model.gradd_stats()
    kept = ("forwards", "captures", "fallbacks", "self_check_failures")
    print(json.dumps({"theirs": theirs, "ours": ours, **{name: stats[name] for name in kept}}))


if __name__ == "__main__":
    main()

"""Trainers of other packages around a wrapped model, each against the plain one.

`python -m helpers.trainers.other_packages NAME` prints as JSON the losses of both, and what the
daemon did. The packages (requirements-trainers.txt) are in an environment of their own.
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


def _sft_trainer(model: Any, folder: Path, **options: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=model,
        args=SFTConfig(**_common(folder), bf16=False, max_length=32, **options),
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=_tokenizer(),
    )


def _train_sft(model: Any, folder: Path, **options: Any) -> list[float]:
    trainer = _sft_trainer(model, folder, **options)
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


def packed_sft(wrap: bool, folder: Path) -> Result:
    """The same with texts packed into rows, as TRL packs them by default."""
    model, layers = _with_layers_wrapped(wrap)
    return _train_sft(model, folder, packing=True), layers


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


def reward(wrap: bool, folder: Path) -> Result:
    """TRL's reward model: a score for each text, the chosen one's above the rejected one's."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**SIZES, pad_token_id=0, num_labels=1)
    )
    layers = None
    if wrap:
        layers = model.model = ORTModule(model.model)
    rows = {"chosen": [f"{text} cat sings" for text in TEXTS], "rejected": TEXTS}
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(**_common(folder), bf16=False, max_length=32),
        train_dataset=Dataset.from_dict(rows),
        processing_class=_tokenizer(),
    )
    trainer.train()
    return _logged(trainer), layers


def kto(wrap: bool, folder: Path) -> Result:
    """TRL's training from single judgements, with the model before training as the reference."""
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    model, layers = _with_layers_wrapped(wrap)
    rows = {"prompt": TEXTS, "completion": [" cat sings", " under near"] * 8}
    rows["label"] = [True, False] * 8
    trainer = KTOTrainer(
        model=model,
        ref_model=_llama(),
        args=KTOConfig(**_common(folder), bf16=False, max_length=32),
        train_dataset=Dataset.from_dict(rows),
        processing_class=_tokenizer(),
    )
    trainer.train()
    return _logged(trainer), layers


def _grpo_trainer(model: Any, folder: Path) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def short(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    config = GRPOConfig(**_common(folder), bf16=False, num_generations=4, max_completion_length=6)
    return GRPOTrainer(
        model=model,
        reward_funcs=short,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": TEXTS}),
        processing_class=_tokenizer(),
    )


def grpo(wrap: bool, folder: Path) -> Result:
    """TRL's training from rewards of what the model generates; the layers are wrapped."""
    model, layers = _with_layers_wrapped(wrap)
    trainer = _grpo_trainer(model, folder)
    trainer.train()
    return _logged(trainer), layers


def accelerated_grpo(wrap: bool, folder: Path) -> Result:
    """The same with TRL's trainer told to use the daemon."""
    from optimum.gradd import accelerate

    trainer = _grpo_trainer(_llama(), folder)
    if wrap:
        accelerate(trainer)
    trainer.train()
    return _logged(trainer), trainer


def _sentences(folder: Path) -> Any:
    import sentence_transformers
    from sentence_transformers.models import Pooling, Transformer

    _bert().save_pretrained(folder / "bert")
    _tokenizer().save_pretrained(folder / "bert")
    words = Transformer(str(folder / "bert"), max_seq_length=16)
    return sentence_transformers.SentenceTransformer(modules=[words, Pooling(32)], device="cpu")


def _sentence_trainer(model: Any, folder: Path) -> Any:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    return SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(**_common(folder), bf16=False),
        train_dataset=Dataset.from_dict({"anchor": TEXTS, "positive": TEXTS[::-1]}),
        loss=losses.MultipleNegativesRankingLoss(model),
    )


def _train_sentences(model: Any, folder: Path) -> list[float]:
    trainer = _sentence_trainer(model, folder)
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


def accelerated_sentences(wrap: bool, folder: Path) -> Result:
    """The same with the trainer told to use the daemon."""
    from optimum.gradd import accelerate

    trainer = _sentence_trainer(_sentences(folder), folder)
    if wrap:
        accelerate(trainer)
    trainer.train()
    return _logged(trainer), trainer


def setfit(wrap: bool, folder: Path) -> Result:
    """SetFit's first half, which trains the encoder on pairs; the encoder is wrapped."""
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments
    from sklearn.linear_model import LogisticRegression

    body, inner = _sentences(folder), None
    if wrap:
        inner = body[0].model = ORTModule(body[0].model)
    trainer = Trainer(
        model=SetFitModel(model_body=body, model_head=LogisticRegression()),
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=5,
            batch_size=4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"text": TEXTS, "label": [0, 1] * 8}),
    )
    trainer.train()
    logged = trainer.st_trainer.state.log_history
    return [row["embedding_loss"] for row in logged if "embedding_loss" in row], inner


def _regression(wrap: bool) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A network, inputs [32, 8] and what it has to learn of them [32, 2]."""
    from torch import nn

    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
    x = torch.randn(32, 8)
    return ORTModule(net) if wrap else net, x, x[:, :2].sin()


def _fabric(wrap: bool, precision: str) -> Result:
    from lightning import Fabric

    net, x, y = _regression(wrap)
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses = []
    for step in range(8):
        rows = slice(8 * (step % 4), 8 * (step % 4) + 8)
        loss = torch.nn.functional.mse_loss(model(x[rows]).float(), y[rows])
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, net


def fabric(wrap: bool, folder: Path) -> Result:
    """A loop of Lightning's Fabric."""
    return _fabric(wrap, "32-true")


def fabric_mixed(wrap: bool, folder: Path) -> Result:
    """The same under Fabric's autocast."""
    return _fabric(wrap, "bf16-mixed")


def fabric_half(wrap: bool, folder: Path) -> Result:
    """The same with parameters in bf16."""
    return _fabric(wrap, "bf16-true")


def accelerator(wrap: bool, folder: Path) -> Result:
    """A loop of Accelerate, which accumulates two batches."""
    from accelerate import Accelerator

    net, x, y = _regression(wrap)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer, data = accelerator.prepare(net, optimizer, data)
    losses = []
    for inputs, wanted in data:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), wanted)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, net


def skorch(wrap: bool, folder: Path) -> Result:
    """An estimator of skorch."""
    from skorch import NeuralNetRegressor

    net, x, y = _regression(wrap)
    estimator = NeuralNetRegressor(
        net,
        optimizer=torch.optim.AdamW,
        lr=1e-2,
        max_epochs=6,
        batch_size=8,
        train_split=None,
        verbose=0,
    )
    estimator.fit(x.numpy(), y.numpy())
    return estimator.history[:, "train_loss"], estimator.module_


def loop(wrap: bool, folder: Path) -> Result:
    """A loop of one's own, with a scheduler and clipped gradients."""
    net, x, y = _regression(wrap)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    losses = []
    for _ in range(8):
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses, net


def log_probs(wrap: bool, folder: Path) -> Result:
    """The function behind TRL's losses, with all its options and results."""
    from trl.kernels import ChunkedLogProbFunction

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = torch.nn.Linear(6, 8), torch.nn.Linear(8, 11)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            names = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
            w, b = self.head.weight, self.head.bias
            return ChunkedLogProbFunction.apply(self.body(x), w, b, y, 0.7, 4, 3.0, 0.5, names)

    net = Head()
    called = ORTModule(net) if wrap else net
    losses = []
    for step in range(6):
        x, y = torch.randn(9, 6), torch.arange(step, step + 9) % 11
        first, entropy, *others = called(x, y)
        (entropy.square().sum() - first.sum()).backward()
        with torch.no_grad():
            norms = [float(p.grad.norm()) for p in net.parameters()]
            [p.sub_(0.1 * p.grad) for p in net.parameters()]
        net.zero_grad()
        losses += [float(t.float().sum()) for t in (first, entropy, *others)] + norms
        assert not any(t.requires_grad for t in others)
    return losses, called


def _lightning(wrap: bool, folder: Path, precision: str) -> Result:
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

    net, x, y = _regression(wrap)
    task = Task(net)
    data = torch.utils.data.TensorDataset(x, y)
    trainer = pl.Trainer(
        accelerator="cpu",
        precision=precision,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        gradient_clip_val=0.5,
        default_root_dir=str(folder),
    )
    trainer.fit(task, torch.utils.data.DataLoader(data, batch_size=8))
    return task.losses, net


def lightning(wrap: bool, folder: Path) -> Result:
    """A LightningModule whose network is wrapped."""
    return _lightning(wrap, folder, "32-true")


def lightning_mixed(wrap: bool, folder: Path) -> Result:
    """The same under Lightning's autocast."""
    return _lightning(wrap, folder, "bf16-mixed")


def _adapted(wrap: bool, folder: Path, config: Any, **arguments: Any) -> Result:
    """A Llama with an adapter of PEFT, in ORTTrainer or in plain Trainer."""
    from peft import get_peft_model

    from optimum.gradd import ORTTrainer, ORTTrainingArguments

    model = get_peft_model(_llama(), config) if config is not None else _llama()
    ids = _tokenizer()(TEXTS, padding="max_length", max_length=12, truncation=True)
    rows = [
        {"input_ids": row, "attention_mask": mask, "labels": row}
        for row, mask in zip(ids["input_ids"], ids["attention_mask"], strict=True)
    ]
    kinds = (ORTTrainer, ORTTrainingArguments)
    if not wrap:
        kinds = (transformers.Trainer, transformers.TrainingArguments)
    trainer = kinds[0](model, kinds[1](**_common(folder), **arguments), train_dataset=rows)
    trainer.train()
    return _logged(trainer), trainer


def _lora(**more: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **more)


def lora(wrap: bool, folder: Path) -> Result:
    """PEFT's LoRA."""
    return _adapted(wrap, folder, _lora())


def dora(wrap: bool, folder: Path) -> Result:
    """LoRA with decomposed weights."""
    return _adapted(wrap, folder, _lora(use_dora=True))


def loha(wrap: bool, folder: Path) -> Result:
    """PEFT's LoHa: Hadamard products of two low-rank matrices."""
    from peft import LoHaConfig

    return _adapted(wrap, folder, LoHaConfig(r=4, target_modules=["q_proj", "v_proj"]))


def adalora(wrap: bool, folder: Path) -> Result:
    """PEFT's AdaLoRA, which penalises adapters that are not orthogonal."""
    from peft import AdaLoraConfig

    config = AdaLoraConfig(
        init_r=4, target_r=2, total_step=5, tinit=1, tfinal=1, deltaT=1,
        target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM",
    )  # fmt: skip
    return _adapted(wrap, folder, config)


def neftune(wrap: bool, folder: Path) -> Result:
    """Noise on embeddings: hardly any, since the daemon draws other numbers than PyTorch."""
    return _adapted(wrap, folder, None, neftune_noise_alpha=1e-6)


TRAINERS: dict[str, Callable[[bool, Path], Result]] = {
    f.__name__: f
    for f in (
        *(sft, packed_sft, whole_sft, accelerated_sft, dpo, reward, kto, grpo, accelerated_grpo),
        *(sentences, whole_sentences, accelerated_sentences, setfit, lightning, lightning_mixed),
        *(fabric, fabric_mixed, fabric_half, accelerator, skorch, loop, log_probs),
        *(lora, dora, loha, adalora, neftune),
    )
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
    kept = ("forwards", "captures", "in_torch", "self_check_failures")
    print(json.dumps({"theirs": theirs, "ours": ours, **{name: stats[name] for name in kept}}))


if __name__ == "__main__":
    main()

"""The workloads of the benchmark: a module, a batch, and how many tokens it holds.

Dropout is 0 everywhere and every random number comes from one seed, so all engines compute the
same. Beside the five of the table there are networks.py, and those that whole trainers train: the
samples (samples/README.md) at small size, and those of other_trainers.py. `--quick` keeps the
shapes and shrinks the sizes: it checks the machinery, its figures mean little.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import networks
import torch
from torch import nn

SEED = 20
STEPS = 4000  # of a trainer, more than a run takes; rows of the data are made as they are read
IGNORE = -100


@dataclass(frozen=True)
class Workload:
    """One workload.

    Attributes:
        build: returns (module, batch); the module's first output or `.loss` is the loss.
        tokens: tokens (or rows) per step, for throughput.
        repeat: steps per timed sample; more than 1 where one step is too short to time well.
        samples: timed samples for each that is asked for; more where they are short.
        sequences: of a step, for samples per second; 0 where tokens are all that counts.
        precision: of a trainer that has its own, for the table.
        make_trainer: makes a trainer of (the module, whether it is ours, its folder); also returns
            what counts the calls of the daemon, or None.
    """

    name: str
    what: str
    build: Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]
    tokens: int
    repeat: int = 1
    samples: int = 1
    sequences: int = 0
    precision: str = ""
    make_trainer: Callable[[nn.Module, bool, str], tuple[Any, Any]] | None = None


@dataclass(frozen=True)
class _LlamaSize:
    layers: int
    hidden: int
    inner: int
    vocabulary: int
    batch: int
    length: int


_FULL = _LlamaSize(8, 512, 1376, 32000, 4, 256)
_QUICK = _LlamaSize(2, 128, 344, 2000, 2, 64)


def make(name: str, quick: bool) -> Workload:
    """The workload of that name in its full or its quick size."""
    size = _QUICK if quick else _FULL
    if name == "llama":
        text = f"{size.layers}-layer Llama, batch {size.batch} x {size.length}, all labelled"
        return Workload(name, text, lambda: _llama(size), size.batch * size.length)
    if name == "sft":
        wide = _LlamaSize(**{**vars(size), "batch": 2 * size.batch})
        text = f"the same, batch {wide.batch} x {wide.length}, half padding, 30 % labelled"
        return Workload(name, text, lambda: _sft(wide), wide.batch * wide.length)
    if name == "lora":
        text = f"the same as llama, base frozen, LoRA r=8 on q and v ({size.batch} x {size.length})"
        return Workload(name, text, lambda: _lora(size), size.batch * size.length)
    if name == "bert":
        batch, length = (2, 64) if quick else (8, 128)
        text = f"BERT-base width, 4 layers, masked LM, batch {batch} x {length}, 15 % labelled"
        return Workload(name, text, lambda: _bert(quick, batch, length), batch * length)
    if name == "mlp":
        # Short samples: the hypervisor's bursts fall into some of them and leave the median alone.
        return Workload(
            name, "784-500-10, batch 64", _mlp, 64, repeat=20, samples=1 if quick else 10
        )
    if name in SAMPLES:
        return _sample(name)
    if name in OTHERS:
        return _other(name, quick)
    if name in networks.NAMES:
        return _network(name, quick)
    known = ", ".join(NAMES + networks.NAMES + SAMPLES + OTHERS)
    raise ValueError(f"no workload {name!r}; there are {known}")


NAMES = ("llama", "sft", "bert", "lora", "mlp")
SAMPLES = ("bert_pretraining", "llama_lora")
OTHERS = ("trl_sft", "trl_lora", "trl_dpo", "sentences", "lightning")
PRECISIONS = ("fp32", "bf16", "autocast")


def in_precision(
    module: nn.Module, batch: dict[str, torch.Tensor], precision: str
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The module and its batch in one of PRECISIONS.

    bf16 casts the parameters and the float inputs; autocast leaves both as they are.
    """
    if precision == "bf16":
        module = module.bfloat16()
        batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
    return module, batch


def _network(name: str, quick: bool) -> Workload:
    """One of networks.py."""
    made = networks.network(name, quick)

    def build() -> tuple[nn.Module, dict[str, torch.Tensor]]:
        torch.manual_seed(SEED)
        return made.build()

    return Workload(name, made.what, build, made.count)


def _sample(name: str) -> Workload:
    """One of samples/ at small size."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "samples"))
    sample = importlib.import_module(name)
    size = sample.SIZES["small"]

    def build() -> tuple[nn.Module, dict[str, torch.Tensor]]:
        from transformers import default_data_collator

        torch.manual_seed(SEED)
        return sample.build(size), default_data_collator(list(sample.Rows(size, size.sequences)))

    tokens = size.sequences * size.tokens

    def make_trainer(module: nn.Module, ours: bool, folder: str) -> tuple[Any, Any]:
        import common

        trainer = common.make_trainer(
            *(sample, size, folder),
            plain=not ours,
            model=module,
            max_steps=STEPS,
            logging_strategy="no",
            use_cpu=True,
        )
        return trainer, trainer if ours else None

    text = f"{sample.__doc__.split(', with')[0]} at small size, {size.sequences} x {size.tokens}"
    return Workload(
        *(name, text, build, tokens), sequences=size.sequences, make_trainer=make_trainer
    )


def _other(name: str, quick: bool) -> Workload:
    """A trainer of another package."""
    import other_trainers

    other = other_trainers.OTHERS[name]
    tokens = other_trainers.tokens_of(name, quick)

    def make_trainer(module: nn.Module, ours: bool, folder: str) -> tuple[Any, Any]:
        return other.make(module, ours, quick, folder)

    text = f"{other.what}, {other.sequences} x {tokens // other.sequences}"
    return Workload(
        *(name, text, lambda: (other.build(quick), {}), tokens),
        sequences=other.sequences,
        precision=other.precision,
        make_trainer=make_trainer,
    )


def _ids(size: _LlamaSize) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(3, size.vocabulary, (size.batch, size.length), generator=generator)


def _llama_module(size: _LlamaSize) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            intermediate_size=size.inner,
            num_hidden_layers=size.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=max(512, size.length),
            use_cache=False,
        )
    )


def _llama(size: _LlamaSize) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    ids = _ids(size)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    return _llama_module(size), batch


def _sft(size: _LlamaSize) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    ids = _ids(size)
    generator = torch.Generator().manual_seed(SEED + 1)
    # Lengths spread evenly around the half, so that half of all positions is padding on the right.
    lengths = torch.linspace(0.2, 0.8, size.batch).mul(size.length).long()
    real = torch.arange(size.length)[None, :] < lengths[:, None]
    # 30 % of all positions carry a label: the last 60 % of each row's real tokens.
    answer = torch.arange(size.length)[None, :] >= (lengths * 0.4).long()[:, None]
    ids = torch.where(real, ids, torch.zeros_like(ids))
    labels = torch.where(real & answer, ids, torch.full_like(ids, IGNORE))
    order = torch.randperm(size.batch, generator=generator)
    batch = {"input_ids": ids, "attention_mask": real.long(), "labels": labels}
    return _llama_module(size), {k: v[order].contiguous() for k, v in batch.items()}


def _lora(size: _LlamaSize) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from peft import LoraConfig, get_peft_model

    module, batch = _llama(size)
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        lora_dropout=0.0,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
    )
    return get_peft_model(module, config), batch


def _bert(quick: bool, batch: int, length: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(SEED)
    small = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
    config = BertConfig(
        num_hidden_layers=2 if quick else 4,
        vocab_size=2000 if quick else 30522,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **(small if quick else {}),
    )
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(5, config.vocab_size, (batch, length), generator=generator)
    chosen = torch.rand(batch, length, generator=generator) < 0.15
    labels = torch.where(chosen, ids, torch.full_like(ids, IGNORE))
    inputs = {"input_ids": torch.where(chosen, torch.full_like(ids, 4), ids)}
    inputs |= {"attention_mask": torch.ones_like(ids), "labels": labels}
    return BertForMaskedLM(config), inputs


class _Classifier(nn.Module):
    """784-500-10 with its loss inside, as an ORTModule user would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(784, 500)
        self.out = nn.Linear(500, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        """Returns {"loss": cross-entropy}."""
        scores = self.out(torch.relu(self.hidden(x)))
        return {"loss": nn.functional.cross_entropy(scores, labels)}


def _mlp() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(SEED)
    module = _Classifier()
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(64, 784, generator=generator)
    return module, {"x": x, "labels": torch.randint(0, 10, (64,), generator=generator)}

"""What the samples share: the command line, the check of memory, and the two trainers.

A sample is a module with

* `SIZES`: {"small": Size, "full": Size},
* `build(size)`: its model with random weights; on the meta device if torch's default device is,
* `Rows(size, count)`: a data set of so many synthetic sequences.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import transformers

import gradd
from optimum.gradd import ORTTrainer, ORTTrainingArguments

# Of trainer and daemon without a model, which an estimate does not include.
PROCESSES = 3 << 29
MIB = 1 << 20


@dataclass(frozen=True)
class Size:
    """Sizes of a model and of a step.

    Attributes:
        layers: Transformer layers.
        hidden: Width of the hidden states.
        inner: Width inside the MLP.
        heads: Attention heads.
        vocabulary: Rows of the table of embeddings.
        sequences: Sequences of a step.
        tokens: Tokens of a sequence.
        dtype: Of the parameters.
        dropout: Probability; 0 where losses are compared with PyTorch's.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    vocabulary: int
    sequences: int
    tokens: int
    dtype: torch.dtype = torch.float32
    dropout: float = 0.0


def make_trainer(
    sample: Any,
    size: Size,
    folder: str,
    *,
    plain: bool = False,
    model: torch.nn.Module | None = None,
    **arguments: Any,
) -> transformers.Trainer:
    """An ORTTrainer, or plain Trainer, of a sample's model and data, both from the same seed.

    Args:
        sample: The module of the sample.
        size: One of its sizes.
        folder: For the trainer's output.
        plain: transformers' Trainer, in PyTorch.
        model: Of the sample; by default a new one.
        arguments: More training arguments.
    """
    if model is None:
        torch.manual_seed(0)
        model = sample.build(size)
    arguments = {
        "output_dir": folder,
        "max_steps": 10,
        "per_device_train_batch_size": size.sequences,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": torch.cuda.is_available(),
        "optim": "adamw_torch_fused" if plain else "adamw_ort_fused",
        **arguments,
    }
    rows = sample.Rows(size, size.sequences * arguments["max_steps"])
    if plain:
        args = transformers.TrainingArguments(**arguments)
        return transformers.Trainer(model, args, train_dataset=rows)
    return ORTTrainer(model, ORTTrainingArguments(**arguments), train_dataset=rows)


def estimate(sample: Any, size: Size) -> gradd.estimating.Estimate:
    """The planned memory of a step; nothing large is built: the weights are on the meta device."""
    with torch.device("meta"):
        model = sample.build(size).train()
    batch = transformers.default_data_collator(list(sample.Rows(size, size.sequences)))
    return gradd.estimate(model, batch, optimizer="adamw")


def too_little(found: gradd.estimating.Estimate) -> str:
    """Says that the machine, or its GPU, has not the memory of an estimate; "" if it has."""
    gpu = torch.cuda.is_available()
    left = torch.cuda.mem_get_info()[0] if gpu else found.available
    needed = found.total + PROCESSES
    if needed <= left:
        return ""
    return (
        f"not run: {needed / MIB:,.0f} MiB are needed ({found.total / MIB:,.0f} for training, "
        f"{PROCESSES / MIB:,.0f} for the processes), and the {'GPU' if gpu else 'machine'} has "
        f"{left / MIB:,.0f} left; --force runs it all the same"
    )


def main(sample: Any, argv: list[str] | None = None) -> transformers.Trainer:
    """Trains one of a sample's sizes and prints its losses, and where it ran.

    Args:
        sample: The module of the sample.
        argv: Command line; by default that of the process.

    Returns:
        The trainer that has trained.

    Raises:
        SystemExit: The memory is not enough: nothing was built.
    """
    options = _parse(sample, argv)
    size = sample.SIZES[options.size]
    found = estimate(sample, size)
    parts = f"{found.total / MIB:,.0f} MiB, {found.activations / MIB:,.0f} of it for activations"
    print(f"estimated memory of training: {parts}")
    if (missing := too_little(found)) and not options.force:
        sys.exit(missing)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(sample, size, folder, plain=options.plain, max_steps=options.steps)
        trainer.train()
    _report(trainer, size)
    return trainer


def _parse(sample: Any, argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=sample.__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sample.SIZES, default="small")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--plain", action="store_true", help="transformers' Trainer, in PyTorch")
    parser.add_argument("--force", action="store_true", help="run where memory is short, too")
    return parser.parse_args(argv)


def _report(trainer: transformers.Trainer, size: Size) -> None:
    rows = [row for row in trainer.state.log_history if "loss" in row]
    print(f"loss {float(rows[0]['loss']):.4f} -> {float(rows[-1]['loss']):.4f}")
    if isinstance(trainer, ORTTrainer):
        stats = trainer.gradd_stats()
        print(f"forwards in the daemon {stats['forwards']}, in PyTorch {stats['in_torch'] or 0}")

"""A step by each public name, for an environment that has gradd as wheels; prints the names."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import torch
from torch import nn

import gradd
from gradd.optim import FusedAdam


def trained(wrapped: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer) -> float:
    """Two steps; how much the loss has changed."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 6, generator=generator)
    losses = []
    for _ in range(2):
        loss = wrapped(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[1] - losses[0]


def net() -> nn.Module:
    """A small model, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def expected() -> float:
    """By PyTorch alone."""
    model = net()
    return trained(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0))


def check(name: str, change: float) -> None:
    """Compares with PyTorch, and prints the name."""
    want = expected()
    if abs(change - want) > 1e-3 * abs(want):
        raise SystemExit(f"{name}: the loss changed by {change}, not by {want}")
    print(name)


def modules() -> None:
    """ORTModule, by its own name and its old one, and its optimizers."""
    model = net()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    wrapped = gradd.ORTModule(model, strict=True)
    check("ORTModule", trained(wrapped, adamw))
    assert wrapped.gradd_stats()["in_torch"] == {}

    model = net()
    wrapped = gradd.ORTModule(model, strict=True)
    fused = FusedAdam(model.parameters(), lr=0.1, eps=1e-8, weight_decay=0.0)
    check("FusedAdam", trained(wrapped, fused))

    from torch_ort import ORTModule

    model = net()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    check("torch_ort", trained(ORTModule(model), adamw))

    model = net()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    compiled = torch.compile(model, backend="gradd", options={"strict": True})
    check("torch.compile", trained(compiled, adamw))


class Regression(nn.Module):
    """What Trainer takes: a loss by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows of six features and four values."""
        return {"loss": (self.layers(x) - labels).square().mean()}


def trainers() -> None:
    """ORTTrainer beside Trainer."""
    from transformers import Trainer, TrainingArguments

    from optimum.gradd import ORTTrainer, ORTTrainingArguments

    data = [{"x": torch.full((6,), i / 8.0), "labels": torch.ones(4)} for i in range(8)]
    losses = []
    for trainer, arguments in (
        (Trainer, TrainingArguments),
        (ORTTrainer, ORTTrainingArguments),
    ):
        with tempfile.TemporaryDirectory() as out:
            settings = {"max_steps": 3, "report_to": [], "use_cpu": True, "disable_tqdm": True}
            args = arguments(out, save_strategy="no", **settings)
            losses.append(trainer(model=Regression(), args=args, train_dataset=data).train())
    if abs(losses[0].training_loss - losses[1].training_loss) > 1e-5:
        raise SystemExit(f"ORTTrainer: {losses[1].training_loss}, not {losses[0].training_loss}")
    print("ORTTrainer")


if __name__ == "__main__":
    modules()
    trainers()

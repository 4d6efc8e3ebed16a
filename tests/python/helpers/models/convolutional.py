"""Small networks of convolutions, as families.build() gives models: a module and its batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

CLASSES = 5
Batch = dict[str, Any]
MakeBatch = Callable[[int, int, int], Batch]


class Classifier(nn.Module):
    """Features and a linear layer over their mean, with the loss in the graph."""

    def __init__(self, features: nn.Module, width: int) -> None:
        super().__init__()
        self.features, self.head = features, nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(self.features(x).flatten(2).mean(-1))
        return nn.functional.cross_entropy(scores, y), scores


class Flat(nn.Module):
    """Two convolutions and a linear layer over all that they give, for one size of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 4, 3, stride=2)
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.second(torch.relu(self.first(x))))
        scores = self.head(hidden.flatten(1))
        return nn.functional.cross_entropy(scores, y), scores


class Block(nn.Module):
    """That of ConvNeXt: depthwise, a norm over channels, two products, a scale, and a sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        hidden = self.scale * self.narrow(nn.functional.gelu(self.wide(hidden)))
        return x + hidden.permute(0, 3, 1, 2)


def _speech() -> nn.Module:
    """The layers in front of wav2vec 2, a position convolution with groups behind them."""
    return nn.Sequential(
        nn.Conv1d(1, 8, 10, stride=5, bias=False),
        nn.GroupNorm(8, 8),
        nn.GELU(),
        nn.Conv1d(8, 8, 3, stride=2),
        nn.GELU(),
        nn.Conv1d(8, 8, 8, padding=4, groups=4),
        nn.GELU(),
    )


def _mobile() -> nn.Module:
    """A depthwise convolution between others, as in MobileNetV2."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(8, 36, 1),
        nn.SiLU(),
        nn.Conv2d(36, 36, 3, stride=2, padding=1, groups=36),
        nn.SiLU(),
        nn.Conv2d(36, 6, 1),
    )


def _decoder() -> nn.Module:
    """Down and up again."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding="same", padding_mode="reflect"),
        nn.SiLU(),
        nn.Conv2d(6, 8, 2, stride=2),
        nn.SiLU(),
        nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.SiLU(),
        nn.Conv2d(4, 6, 3, padding=2, dilation=2, padding_mode="circular"),
    )


def _volumes() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1, padding_mode="replicate"), nn.Tanh(), nn.Conv3d(4, 4, 2)
    )


_KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[int, ...]]]] = {
    "flat": (Flat, lambda size: (3, 8, 8)),
    "convnext": (
        lambda: Classifier(nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), Block(8), Block(8)), 8),
        lambda size: (3, 4 * size, 4 * size + 8),
    ),
    "mobile": (lambda: Classifier(_mobile(), 6), lambda size: (3, 4 * size, 4 * size + 3)),
    "speech": (lambda: Classifier(_speech(), 8), lambda size: (1, 40 * size)),
    "decoder": (lambda: Classifier(_decoder(), 6), lambda size: (3, 2 * size, 2 * size + 4)),
    "volumes": (lambda: Classifier(_volumes(), 4), lambda size: (2, size, size + 1, 5)),
}
KINDS = tuple(_KINDS)


def build(kind: str) -> tuple[nn.Module, MakeBatch]:
    """A module in train mode, and make_batch(batch, size, seed) -> keyword arguments."""
    make, shape = _KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = make()

    def make_batch(batch: int, size: int, seed: int = 0) -> Batch:
        gen = torch.Generator().manual_seed(seed)
        x = torch.randn(batch, *shape(size), generator=gen)
        return {"x": x, "y": torch.randint(0, CLASSES, (batch,), generator=gen)}

    return module.train(), make_batch

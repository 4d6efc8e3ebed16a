"""Times blocks of convolutional networks in the daemon beside PyTorch's eager mode.

    .venv/bin/python benchmarks/convolutions.py [--precision bf16] [--rounds 8] [--only NAME,...]

Forward and backward of one block, in turn: in the daemon, in eager mode, and in eager mode with
weights and pictures in torch.channels_last. The least of the rounds is printed for each, and the
ratio of the medians to the daemon's. GRADD_THREADS and --threads set the processors of both.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "python"))  # a block of ConvNeXt


class Bottleneck(nn.Module):
    """That of ResNet-50, without its norms."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(wide, narrow, 1)
        self.second = nn.Conv2d(narrow, narrow, 3, padding=1)
        self.third = nn.Conv2d(narrow, wide, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(x))))
        return torch.relu(x + self.third(hidden))


def stages() -> nn.Module:
    """A ResNet with one bottleneck of each size, with norms, in front of its classifier."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    channels = 64
    for narrow in (64, 128, 256, 512):
        layers.append(Down(channels, narrow, 1 if narrow == 64 else 2))
        channels = 4 * narrow
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))


class Down(nn.Module):
    """A bottleneck of ResNet-50 that changes its sizes."""

    def __init__(self, channels: int, narrow: int, stride: int) -> None:
        super().__init__()
        wide = 4 * narrow
        self.way = nn.Sequential(
            nn.Conv2d(channels, narrow, 1, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(),
            nn.Conv2d(narrow, narrow, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(),
            nn.Conv2d(narrow, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
        )
        self.beside = nn.Sequential(
            nn.Conv2d(channels, wide, 1, stride=stride, bias=False), nn.BatchNorm2d(wide)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.beside(x) + self.way(x))


def convnext() -> nn.Module:
    """One block of 96 channels."""
    from helpers.models.convolutional import Block

    return Block(96)


BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "bottlenecks": (
        lambda: nn.Sequential(Bottleneck(256, 64), Bottleneck(256, 64)),
        (8, 256, 56, 56),
    ),
    "3x3": (lambda: nn.Conv2d(64, 64, 3, padding=1), (8, 64, 56, 56)),
    "depthwise": (lambda: nn.Conv2d(96, 96, 7, padding=3, groups=96), (8, 96, 56, 56)),
    "convnext": (convnext, (8, 96, 56, 56)),
    "stages": (stages, (4, 3, 224, 224)),
}


def step(module: Any, x: torch.Tensor) -> float:
    """Milliseconds of a forward and a backward."""
    start = time.perf_counter()
    y = module(x)
    y.backward(torch.ones_like(y))
    taken = time.perf_counter() - start
    module.zero_grad()
    x.grad = None
    return taken * 1e3


def measure(name: str, dtype: torch.dtype, rounds: int) -> str:
    """A line about one block."""
    from gradd import ORTModule

    make, shape = BLOCKS[name]
    torch.manual_seed(0)
    module, x = make().to(dtype), torch.randn(*shape, dtype=dtype)
    last = torch.channels_last
    sides = {
        "gradd": (ORTModule(copy.deepcopy(module), strict=True), x.clone().requires_grad_()),
        "eager": (module, x.clone().requires_grad_()),
        "channels last": (
            copy.deepcopy(module).to(memory_format=last),
            x.clone(memory_format=last).requires_grad_(),
        ),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for at in range(rounds + 2):
        for side, (called, given) in sides.items():
            taken = step(called, given)
            if at > 1:
                times[side].append(taken)
    base = statistics.median(times["gradd"])
    parts = [
        f"{side} {min(t):8.1f} ms ({statistics.median(t) / base:5.2f})" for side, t in times.items()
    ]
    return f"{name:12s} {'  '.join(parts)}"


def main() -> None:
    """Prints a line for each block."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default=",".join(BLOCKS))
    args = parser.parse_args()
    os.environ.setdefault("GRADD_SELF_CHECK", "0")
    os.environ.setdefault("GRADD_THREADS", str(args.threads))
    torch.set_num_threads(args.threads)
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    for name in args.only.split(","):
        print(measure(name, dtype, args.rounds), flush=True)


if __name__ == "__main__":
    main()

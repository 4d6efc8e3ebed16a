"""The work of a rank whose daemon averages gradients with those of the others, by the stand-in for
NCCL; torchrun starts it. See test_emu_averages.py.

Arguments: the folder for what it finds, the type of device, and the cases. A case is a function of
this file.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from helpers import emu_group, emu_torch

if __name__ == "__main__":
    emu_torch.load()  # autograd's first backward counts the devices of the process
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradd import ORTModule, errors
from gradd.session.client import Client, get_client
from helpers.ranks import LAYERS, WIDTH, Stack, batch

STEPS = 3
GROUP = str(4 * WIDTH * WIDTH + 1)  # the gradients of one layer
CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def _rank() -> int:
    return torch.distributed.get_rank()


def _device() -> str:
    return f"emu:{_rank()}"


def _client() -> Client:
    return get_client(device=torch.device(_device()))


def _group() -> torch.distributed.ProcessGroup:
    return torch.distributed.group.WORLD


def _wrapped(module: nn.Module) -> ORTModule:
    return ORTModule(module.to(_device()), process_group=_group())


def _stack(unused: bool = False) -> Stack:
    """With other values in each rank, until that takes part."""
    module = Stack(WIDTH, unused)
    torch.manual_seed(_rank())
    if _rank():
        for p in module.parameters():
            nn.init.normal_(p)
    return module


def _gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.cpu().clone() for p in module.parameters()]


@contextlib.contextmanager
def _said(found: dict[str, str], what: str) -> Iterator[None]:
    """Keeps the error of what is done."""
    try:
        yield
    except (errors.GraddError, ValueError, TypeError) as error:
        found[what] = f"{type(error).__name__}: {error}"


# ---- cases -------------------------------------------------------------------------------------


def _train(module: nn.Module, steps: int = STEPS) -> list[torch.Tensor | None]:
    """Gradients of all steps; the second one is of two batches."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in (2 * step, 2 * step + 1) if step == 1 else (2 * step,):
            module(batch(micro, _rank()).to(_device())).backward()
        found += _gradients(module)
        optimizer.step()
    return found


def in_one_process() -> list[torch.Tensor | None]:
    """The same in PyTorch, of the mean of what two ranks see."""
    module = Stack(WIDTH, True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    found: list[torch.Tensor | None] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in (2 * step, 2 * step + 1) if step == 1 else (2 * step,):
            for rank in range(2):
                (module(batch(micro, rank)) / 2).backward()
        found += _gradients(module)
        optimizer.step()
    return found


@case
def stack() -> dict[str, Any]:
    """In groups and together, beside DistributedDataParallel; with an unused layer."""
    found: dict[str, Any] = {}
    for name, size in (("groups", GROUP), ("together", "0")):
        os.environ["GRADD_GROUP_BYTES"] = size
        module = _wrapped(_stack(unused=True))
        found[name] = _train(module)
        found[f"{name}_in_torch"] = module.gradd_stats()["in_torch"]
    plain = DistributedDataParallel(
        ORTModule(_stack(unused=True).to(_device()), strict=True), find_unused_parameters=True
    )
    found["ddp"] = _train(plain)
    reduced = _group()._get_backend(torch.device(_device())).reduced if False else []
    found["reduced"] = reduced
    return found


def main(folder: Path, cases: list[str]) -> None:
    """Does the work of this rank."""
    emu_group.register()
    torch.accelerator.set_device_index(int(os.environ["RANK"]))
    torch.distributed.init_process_group("emu")
    found = {name: CASES[name]() for name in cases}
    torch.save(found, folder / f"{_rank()}.pt")
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[3:])

"""The work of a rank whose daemon averages gradients with those of the others, by the stand-in for
NCCL; torchrun starts it. See test_emu_averages.py.

Arguments: the folder for what it finds, the type of device, and the cases. A case is a function of
this file.
"""

from __future__ import annotations

import contextlib
import copy
import gc
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
from helpers.nets import Determinants
from helpers.ranks import WIDTH, Stack, batch

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


def _train(module: nn.Module) -> list[torch.Tensor | None]:
    """Gradients of all steps; the second one is of two batches."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in _micros(step):
            module(batch(micro, _rank()).to(_device())).backward()
        found += _gradients(module)
        optimizer.step()
    return found


def _micros(step: int) -> list[int]:
    return [2 * step, 2 * step + 1] if step == 1 else [2 * step]


def in_one_process() -> list[torch.Tensor | None]:
    """The same in PyTorch, of the mean of what two ranks see."""
    module = Stack(WIDTH, True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    found: list[torch.Tensor | None] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in _micros(step):
            for rank in range(2):
                (module(batch(micro, rank)) / 2).backward()
        found += _gradients(module)
        optimizer.step()
    return found


@case
def stack() -> dict[str, Any]:
    """In groups and together, with an unused layer; how many collectives Python has made."""
    found: dict[str, Any] = {}
    for name, size in (("groups", GROUP), ("together", "0")):
        os.environ["GRADD_GROUP_BYTES"] = size
        module = _wrapped(_stack(unused=True))
        before = emu_group.EmuGroup.collectives
        found[name] = _train(module)
        found[f"{name}_collectives"] = emu_group.EmuGroup.collectives - before
    return found


@case
def inputs() -> dict[str, Any]:
    """The gradient of an input is this rank's own; a frozen parameter has none; a kept graph."""
    os.environ["GRADD_GROUP_BYTES"] = GROUP
    module = _wrapped(_stack().requires_grad_(False))
    module.layers[2].requires_grad_(True)
    x = batch(7, _rank()).to(_device()).requires_grad_(True)
    loss = module(x)
    loss.backward(retain_graph=True)
    once = _gradients(module)
    loss.backward()
    return {"x": x.grad.cpu(), "once": once, "twice": _gradients(module)}


@case
def llama() -> dict[str, Any]:
    """A small Llama, whose head and embedding are one parameter, beside the same by DDP."""
    from transformers import LlamaConfig, LlamaForCausalLM

    os.environ["GRADD_GROUP_BYTES"] = "20000"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 96}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=True)
    found = {}
    for name in ("averaged", "ddp"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(_device())
        if name == "ddp":
            module = DistributedDataParallel(ORTModule(model, strict=True))
        else:
            module = ORTModule(model, process_group=_group())
        generator = torch.Generator().manual_seed(_rank())
        for _ in range(3):
            module.zero_grad()
            ids = torch.randint(96, (2, 12), generator=generator).to(_device())
            module(input_ids=ids, labels=ids).loss.backward()
        found[name] = _gradients(model)
    return found


@case
def other_parameters() -> dict[str, Any]:
    """One rank changes a parameter by itself: the next backward fails in both."""
    module = _wrapped(_stack())
    x = batch(1, _rank()).to(_device())
    found: dict[str, Any] = {"errors": {}}
    module(x).backward()
    if _rank():
        with torch.no_grad():
            module.layers[1].weight.add_(1)
    for what in ("backward", "again"):
        with _said(found["errors"], what):
            module(x).backward()
            _client().catch_up()
    return found


@case
def killed() -> dict[str, Any]:
    """The daemon of one rank dies between two groups."""
    os.environ["GRADD_GROUP_BYTES"] = GROUP
    os.environ["GRADD_REDUCE_SECONDS"] = "20"  # on a busy machine the other rank may be late
    module, client = _wrapped(_stack()), _client()
    x = batch(1, _rank()).to(_device())
    for _ in range(2):
        module.zero_grad()
        module(x).backward()
    found: dict[str, Any] = {"errors": {}, "pids": [], "right": _gradients(module)}

    def kill(p: torch.Tensor) -> None:
        handle.remove()
        found["pids"].append(client.daemon_pid)
        os.kill(client.daemon_pid, signal.SIGKILL)

    if _rank():
        handle = module.layers[-1].weight.register_post_accumulate_grad_hook(kill)
    module.zero_grad()
    for what in ("backward", "again"):
        with _said(found["errors"], what):
            module(x).backward()
            client.catch_up()
        if what == "backward":
            found["gradients"] = _gradients(module)
    return found


@case
def refused() -> dict[str, str]:
    """What is refused by name, in both ranks."""
    found: dict[str, str] = {}
    with _said(found, "structure"):
        _wrapped(nn.Linear(4, 4 + _rank()))
    with _said(found, "one on the CPU"):
        ORTModule(nn.Linear(4, 4).to("cpu" if _rank() else _device()), process_group=_group())
    module = _wrapped(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)))
    with _said(found, "sparse"):
        module(torch.tensor([1, 2]).to(_device())).sum().backward()
    with _said(found, "pickle"):
        pickle.dumps(module)
    assert copy.deepcopy(module)._gradd_reduction is module._gradd_reduction
    module = _wrapped(nn.Sequential(nn.Linear(3, 3), Determinants()))
    with _said(found, "operator"):
        module(torch.randn(2, 3).to(_device()))
    return found


def main(folder: Path, cases: list[str]) -> None:
    """Does the work of this rank."""
    emu_group.register()
    torch.accelerator.set_device_index(int(os.environ["RANK"]))
    torch.distributed.init_process_group("emu")
    found = {}
    for name in cases:
        found[name] = CASES[name]()
        gc.collect()
        torch.distributed.barrier()
    torch.save(found, folder / f"{_rank()}.pt")
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[3:])

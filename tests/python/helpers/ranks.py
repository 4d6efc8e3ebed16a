"""The work of a rank of several, which torchrun starts; see test_ddp.py and test_emu_ddp.py.

Arguments: the folder for what it finds, the type of device, and the cases. On a GPU each rank has
one of its own.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from helpers import emu_group, emu_torch

if __name__ == "__main__" and sys.argv[2] == "emu":
    emu_torch.load()  # autograd's first backward counts the devices of the process
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import gradd
from gradd import ORTModule
from gradd.memory.devices import HostWords
from gradd.session import in_groups
from gradd.session.client import Client, get_client

WIDTH, LAYERS, STEPS = 48, 5, 3
KILLS = 51  # the first step has none
_BACKWARDS = 4  # the lane of a trace that has them, as the daemon has done them
DEVICE = "cpu"
# Of DistributedDataParallel, by case.
OPTIONS: dict[str, dict[str, Any]] = {
    "bucket_view": {"gradient_as_bucket_view": True},
    "no_sync": {},
    "static_graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}
_wait = in_groups.wait
CASES = ("plain", *OPTIONS, "events", "default", "killed", "killed_bucket_view")


class Stack(nn.Module):
    """Layers, and one that the loss does not depend on."""

    def __init__(self, width: int, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        if unused:
            self.unused = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def batch(step: int, rank: int, rows: int = 6, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, width, generator=generator)


def stack(case: str) -> Stack:
    return Stack(WIDTH, case == "unused")


def in_one_process(case: str = "plain") -> list[torch.Tensor]:
    """The gradients of all steps in PyTorch, of the mean of what two ranks see."""
    model = stack(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in _micros(case, step):
            for rank in range(2):
                (model(batch(micro, rank)) / 2).backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return found


def _micros(case: str, step: int) -> list[int]:
    return [2 * step, 2 * step + 1] if case == "no_sync" else [step]


class Rank:
    """This process, in one case."""

    def __init__(self, case: str, grouped: bool) -> None:
        os.environ["GRADD_GROUP_BYTES"] = str(4 * WIDTH * WIDTH + 1) if grouped else "0"
        self.case, self.number = case, torch.distributed.get_rank()
        if case == "averaged":  # by the daemons
            self.module = self.model = _averaged(stack(case).to(DEVICE))
            return
        self.module = ORTModule(stack(case).to(DEVICE), strict=True)
        if case == "prepared":
            from accelerate import Accelerator

            self.model = Accelerator(cpu=True).prepare(self.module)
            return
        options = OPTIONS.get(case, {})
        self.model = DistributedDataParallel(self.module, bucket_cap_mb=0.01, **options)

    def train(self) -> dict[str, Any]:
        """Gradients of all steps, and the order of events in the last one."""
        if self.case == "events":
            self._note_events()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        found = []
        self.noted: list[str] = []
        for step in range(STEPS):
            optimizer.zero_grad()
            self.noted.clear()
            *first, last = _micros(self.case, step)
            for micro in first:
                with self.model.no_sync():
                    self.model(batch(micro, self.number).to(DEVICE)).backward()
            self.model(batch(last, self.number).to(DEVICE)).backward()
            found += [p.grad.cpu().clone() for p in self.model.parameters() if p.grad is not None]
            optimizer.step()
        in_torch = self.module.gradd_stats()["in_torch"]
        in_groups.wait = _wait
        return {"gradients": found, "events": self.noted, "in_torch": in_torch}

    def _note_events(self) -> None:
        def reduce(state, bucket):  # torch wants types as such, not as text
            self.noted.append(f"reduce {bucket.index()}")
            return allreduce_hook(None, bucket)

        def waited(client: Any, pending: Any, group: int) -> None:
            _wait(client, pending, group)
            self.noted.append(f"group {group}")

        self.model.register_comm_hook(None, reduce)
        in_groups.wait = waited


def _averaged(module: nn.Module) -> ORTModule:
    """Has the values of rank 0 afterwards, as with DistributedDataParallel."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.distributed.get_rank())
    return ORTModule(module, process_group=torch.distributed.group.WORLD)


def killed(options: dict[str, Any], kills: bool) -> dict[str, Any]:
    """Gradients of a step in which this rank's daemon dies behind the first group."""
    client, pids = _client(), []
    rows, wide = (1024, 640) if DEVICE == "cpu" else (256, 64)
    os.environ["GRADD_GROUP_BYTES"] = str(4 * wide * wide + 1)
    module = ORTModule(Stack(wide, False).to(DEVICE), strict=True)
    model = DistributedDataParallel(module, bucket_cap_mb=1, **options)
    x = batch(1, torch.distributed.get_rank(), rows, wide).to(DEVICE)
    for _ in range(3):
        model.zero_grad()
        model(x).backward()
    model.zero_grad()
    before = client.recoveries

    def kill(p: torch.Tensor) -> None:
        handle.remove()
        if client.recoveries == before and not pids:
            pids.append(client.daemon_pid)
            with contextlib.suppress(ProcessLookupError):  # the other rank was faster
                os.kill(client.daemon_pid, signal.SIGKILL)

    weight = module.layers[-1].weight
    if kills:
        handle = weight.register_post_accumulate_grad_hook(kill)
    model(x).backward()
    found = [p.grad.cpu().clone() for p in model.parameters()]
    return {"gradients": found, "pids": pids, "recoveries": client.recoveries - before}


def by_default() -> int:
    """How many groups a model of 8 MB has whose processes say nothing about them."""
    os.environ.pop("GRADD_GROUP_BYTES")
    model = DistributedDataParallel(ORTModule(Stack(640, False).to(DEVICE), strict=True))
    for _ in range(2):
        model(batch(1, 0, 8, 640).to(DEVICE)).backward()
    return _groups_done()


def traced(file: Path) -> dict[str, Any]:
    """When reductions of groups begin, and when backwards end in a trace, in nanoseconds."""
    rows, wide = 1024, 640
    os.environ["GRADD_GROUP_BYTES"] = str(4 * wide * wide + 1)
    model = DistributedDataParallel(ORTModule(Stack(wide, False), strict=True), bucket_cap_mb=1)
    begun: list[int] = []

    def reduce(state, bucket):  # torch wants types as such, not as text
        begun.append(time.perf_counter_ns())
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, reduce)
    x = batch(1, torch.distributed.get_rank(), rows, wide)
    model(x).backward()  # buckets get their order, and the first backward comes as a whole
    begun.clear()
    trace = gradd.trace(file)  # imports more
    start = time.perf_counter_ns()
    with trace:
        for _ in range(STEPS):
            model(x).backward()
    events = [e for e in json.loads(file.read_text()) if e.get("ph") == "X"]
    done = [e for e in events if e["name"] == "backward" and e["tid"] == _BACKWARDS]
    ends = [start + int(1000 * (e["ts"] + e["dur"])) for e in done]
    return {"begun": begun, "ends": ends}


def killed_often(folder: Path) -> dict[str, Any]:
    """All gradients of KILLS steps, in each of which this rank's own daemon dies, and of none."""
    os.environ["GRADD_DIR"] = str(own_directory(folder, torch.distributed.get_rank()))
    os.environ["GRADD_GROUP_BYTES"] = str(4 * WIDTH * WIDTH + 1)
    client = _client()
    found: dict[str, Any] = {"pids": []}
    for kills in (False, True):
        model = DistributedDataParallel(ORTModule(stack("plain"), strict=True), bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found[str(kills)] = gradients = []
        for step in range(KILLS):
            # In this order a daemon is asked for something before its turn comes.
            place = -(step + torch.distributed.get_rank()) % 3 if kills and step else None
            optimizer.zero_grad()
            _step_with_death(model, step, place, client, found["pids"])
            gradients += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
    found["recoveries"] = client.recoveries
    return found


def own_directory(folder: Path, rank: int) -> Path:
    """Of the daemon that a rank has alone."""
    return folder / f"daemon{rank}"


def _step_with_death(
    model: nn.Module, step: int, place: int | None, client: Client, pids: list[int]
) -> None:
    """Forward and backward; the daemon dies before them, between them, or behind a group."""

    def kill(*_: Any) -> None:
        if handle is not None:
            handle.remove()
        pids.append(client.daemon_pid)
        os.kill(client.daemon_pid, signal.SIGKILL)

    handle = None
    if place == 0:
        kill()
    loss = model(batch(step, torch.distributed.get_rank()))
    if place == 1:
        client.flush()
        kill()
    if place == 2:
        weight = model.module.layers[-1].weight
        handle = weight.register_post_accumulate_grad_hook(kill)
    loss.backward()


def _groups_done() -> int:
    timeline = _client().timeline
    return timeline.words.read(HostWords.GROUPS) & 0xFFFF if timeline is not None else 0


def work(case: str, folder: Path) -> dict[str, Any]:
    """What this rank finds in a case, without groups and with them."""
    if case == "traced":
        return traced(folder / f"trace{torch.distributed.get_rank()}.json")
    if case == "killed_often":
        return killed_often(folder)
    if case.startswith("killed"):
        options = {"gradient_as_bucket_view": case.endswith("view")}
        return {str(kills): killed(options, kills) for kills in (False, True)}
    if case == "default":
        return {"groups": by_default()}
    found = {}
    for grouped in (False, True):
        found[str(grouped)] = Rank(case, grouped).train()
        found[str(grouped)]["groups"] = _groups_done()
    return found


def _client() -> Client:
    return get_client(device=torch.device(DEVICE))


def main(folder: Path, device: str, cases: list[str]) -> None:
    """Does the work of this rank."""
    global DEVICE
    rank = int(os.environ["RANK"])
    if device == "emu":
        emu_group.register()
        DEVICE = f"emu:{rank}"
        torch.accelerator.set_device_index(rank)
    torch.distributed.init_process_group("gloo" if device == "cpu" else device)
    found = {}
    for case in cases:
        found[case] = work(case, folder)
        gc.collect()
        torch.distributed.barrier()
    found["daemon"] = _client().daemon_pid
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()
    # A thread of torch that waits for an interpreter which ends aborts the process now and then.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])

"""Trainers with their tensors on a GPU, beside PyTorch: what is right, how fast, how much memory.

    trainers.py mlp DEVICE                       losses of a small model beside PyTorch's
    trainers.py killed DEVICE                    the daemon is killed in steps: no bit differs
    trainers.py two DEVICE                       two trainers of one daemon at once
    trainers.py averages DEVICE                  one rank, by NCCL in the daemon: no bit differs
    trainers.py peers DEVICE SHAPE SIZE ENGINE.. steps of a Llama in bf16, engines in turns
    trainers.py lora DEVICE SHAPE SIZE ENGINE..  the same with LoRA on all projections

DEVICE is `cuda`, or `emu` of the tests (tests/python on the path). SHAPE is one of shapes.py, SIZE
ROWSxTOKENS, ENGINE `gradd`, `eager`, `compile` or `liger`. Each engine is a process of its own; all
make their first call at once, and then one works at a time. GRADD_BIN names the daemon, which
starts by itself. Results are lines of JSON; exit status 1 if something does not hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from shapes import SHAPES

ROUNDS, STEPS = 4, 3
NEAR = {"float32": 1e-4, "bfloat16": 2e-2}  # of losses, relative


def tell(**values: Any) -> None:
    """A line of JSON."""
    print(json.dumps(values), flush=True)


def open_device(kind: str) -> Any:
    """The device's module of torch; `emu` becomes a device of this process."""
    import torch

    if kind == "emu":
        from helpers import emu_torch

        return emu_torch.load()
    return getattr(torch, kind)


# ---- a small model ----


class Small:
    """An MLP and its batches, the same in every process."""

    def __init__(self, device: str, engine: str, group: Any = None) -> None:
        """`group`: over which the daemon averages gradients."""
        import torch
        from torch import nn

        torch.manual_seed(5)
        self._width, inner = (40, 24) if device == "emu" else (784, 500)
        first, second = nn.Linear(self._width, inner), nn.Linear(inner, 10)
        layers = nn.Sequential(first, nn.ReLU(), second).to(device)
        self._device, self.model, self.wrapped = device, layers, layers
        if engine == "gradd":
            from gradd import ORTModule
            from gradd.optim import AdamWMode, FusedAdam

            self.wrapped = ORTModule(layers, strict=True, process_group=group)
            self.optimizer: Any = FusedAdam(
                layers.parameters(), lr=1e-3, adam_w_mode=AdamWMode.ADAMW_TORCH, eps=1e-8
            )
        else:
            self.optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3, weight_decay=0.0)

    def step(self, number: int, before_backward: Callable[[], None] | None = None) -> Any:
        """One step of training; the loss, on the device."""
        import torch

        draw = torch.Generator().manual_seed(number % 2)
        x = torch.randn(64, self._width, generator=draw).to(self._device)
        y = torch.randint(10, (64,), generator=draw).to(self._device)
        loss = torch.nn.functional.cross_entropy(self.wrapped(x), y)
        if before_backward:
            before_backward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def train(self, steps: int) -> list[float]:
        """Losses."""
        return [float(self.step(i)) for i in range(steps)]


def mlp(device: str, steps: int = 20) -> bool:
    """Losses near PyTorch's, nothing run by PyTorch, and the time of a step."""
    module = open_device(device)
    ours, theirs = Small(device, "gradd"), Small(device, "eager")
    losses, expected = ours.train(steps), theirs.train(steps)
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    took = {}
    for name, side in (("gradd", ours), ("eager", theirs)):
        module.synchronize()
        began = time.perf_counter()
        for i in range(steps):
            side.step(i)
        module.synchronize()
        took[name] = round(1e3 * (time.perf_counter() - began) / steps, 3)
    stats = ours.wrapped.gradd_stats()
    whole = stats["fallbacks"] == {} and stats["parts_in_torch"] == {} and stats["mirrored"] == 0
    held = apart <= NEAR["float32"] and whole and losses[-1] < losses[0]
    tell(what="mlp", held=held, apart=apart, loss=losses[-1], in_daemon=whole, step_ms=took)
    return held


def killed(device: str, steps: int = 8) -> bool:
    """kill -9 between forward and backward, and behind a step that is not waited for."""
    import torch

    open_device(device)
    from gradd.session import client as clients

    expected = Small(device, "gradd")
    losses = expected.train(steps)
    ours, got = Small(device, "gradd"), []
    client = clients.get_client(device=torch.device(device, 0))

    def kill() -> None:
        os.kill(client.daemon_pid, signal.SIGKILL)

    for i in range(steps):
        loss = ours.step(i, kill if i in (2, 5) else None)
        if i == 3:
            kill()
        got.append(loss)
    found = [float(loss) for loss in got]
    pairs = zip(ours.model.parameters(), expected.model.parameters(), strict=True)
    same = found == losses and all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)
    tell(what="killed", held=same, recoveries=client.recoveries, losses=found)
    return same and client.recoveries >= 3


def averages(device: str, steps: int = 8) -> bool:
    """The daemon averages over this process alone: that changes no loss and no parameter."""
    import torch

    open_device(device)
    if device == "emu":
        from helpers import emu_group

        emu_group.register()
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else device,
        rank=0,
        world_size=1,
        store=torch.distributed.HashStore(),
    )
    os.environ["GRADD_GROUP_BYTES"] = "4096"
    alone = Small(device, "gradd")
    ours = Small(device, "gradd", torch.distributed.group.WORLD)
    losses, expected = ours.train(steps), alone.train(steps)
    pairs = zip(ours.model.parameters(), alone.model.parameters(), strict=True)
    same = losses == expected and all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)
    tell(what="averages of one rank", held=same, loss=losses[-1])
    torch.distributed.destroy_process_group()
    return same


def one(device: str, steps: int = 30) -> bool:
    """One of two trainers: its losses."""
    open_device(device)
    small = Small(device, "gradd")
    small.train(1)  # the capture
    tell(ready=True)
    sys.stdin.readline()
    began = time.perf_counter()
    losses = small.train(steps)
    tell(losses=losses, seconds=time.perf_counter() - began)
    return True


def two(device: str) -> bool:
    """Two trainers at once have the losses of one that is alone."""
    found = {}
    for count in (1, 2):
        children = [_child(["one", device]) for _ in range(count)]
        try:
            for child in children:
                _answer(child)
            for child in children:
                _say(child, "go")
            found[count] = [_answer(child) for child in children]
        finally:
            _end(children)
    alone = found[1][0]
    same = all(answer["losses"] == alone["losses"] for answer in found[2])
    seconds = [round(answer["seconds"], 3) for answer in (alone, *found[2])]
    tell(what="two trainers", held=same, seconds_alone=seconds[0], seconds_at_once=seconds[1:])
    return same


# ---- processes ----


def _child(arguments: list[str]) -> subprocess.Popen:
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes)


def _say(child: subprocess.Popen, word: str) -> None:
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(f"{word}\n")
        child.stdin.flush()


def _answer(child: subprocess.Popen) -> dict[str, Any]:
    """The next line of JSON; `failed` if the process ends without one."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("{"):
            return json.loads(line)
    return {"failed": f"the process ended with status {child.wait()}"}


def _end(children: list[subprocess.Popen]) -> None:
    for child in children:
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


# ---- Llamas ----


def _with_lora(model: Any, rank: int = 16) -> None:
    """Low-rank parts beside all linear layers but the head; all else is frozen."""
    import torch
    from torch import nn

    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            like = {"device": base.weight.device, "dtype": base.weight.dtype}
            self.base = base
            self.down = nn.Linear(base.in_features, rank, bias=False, **like)
            self.up = nn.Linear(rank, base.out_features, bias=False, **like)
            nn.init.normal_(self.up.weight, std=0.02)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x)) * 2

    model.requires_grad_(False)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(part, name, Lora(linear))


class Peer:
    """One engine with its model and a batch."""

    def __init__(self, engine: str, device: str, shape: str, size: str, lora: bool) -> None:
        import torch

        self.module = open_device(device)
        self.engine = engine
        rows, length = map(int, size.split("x"))
        if engine == "liger":
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama()
        import llama

        model = llama.build(shape, "cpu" if device == "emu" else device)
        torch.manual_seed(1)
        if lora:
            _with_lora(model)
        model = model.to(device)
        if SHAPES[shape].tied:
            model.tie_weights()
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.run: Any = model
        if engine == "gradd":
            from gradd import ORTModule

            self.run = ORTModule(model, strict=True)
        elif engine == "compile":
            self.run = torch.compile(model)
        draw = torch.Generator().manual_seed(2)
        ids = torch.randint(3, SHAPES[shape].vocabulary, (rows, length), generator=draw)
        self.ids, self.optimizer = ids.to(device), None

    def step(self) -> Any:
        """Forward and backward, and the optimizer's step if there is one."""
        for p in self.trained:
            p.grad = None
        loss = self.run(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        if self.optimizer:
            self.optimizer.step()
        return loss.detach()

    def first(self) -> dict[str, Any]:
        """The first call, which captures or compiles, and one more."""
        began = time.perf_counter()
        loss = float(self.step())
        self.module.synchronize()
        seconds = time.perf_counter() - began
        self.step()
        self.module.synchronize()
        return {"first_s": round(seconds, 2), "loss": loss, "trained": self._count()}

    def _count(self) -> int:
        return sum(p.numel() for p in self.trained)

    def time(self) -> dict[str, Any]:
        """Milliseconds of some steps."""
        self.step()  # what other engines have done since then is not its fault
        self.module.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        self.module.synchronize()
        return {"ms": 1e3 * (time.perf_counter() - began) / STEPS}

    def with_optimizer(self) -> dict[str, Any]:
        """From now on a step includes AdamW's."""
        import torch

        if self.engine == "gradd":
            from gradd.optim import AdamWMode, FusedAdam

            self.optimizer = FusedAdam(self.trained, lr=1e-6, adam_w_mode=AdamWMode.ADAMW_TORCH)
        else:
            fused = self.ids.device.type == "cuda"
            self.optimizer = torch.optim.AdamW(self.trained, lr=1e-6, fused=fused)
        self.step()
        self.module.synchronize()
        return {}

    def memory(self) -> dict[str, Any]:
        """What torch holds at most, and what ran in PyTorch in gradd's place."""
        most = getattr(self.module, "max_memory_allocated", lambda: 0)()
        found: dict[str, Any] = {"torch_peak_mib": round(most / 2**20)}
        if self.engine == "gradd":
            stats = self.run.gradd_stats()
            found["in_torch"] = stats["fallbacks"] | stats["parts_in_torch"]
        return found


def peer(engine: str, device: str, shape: str, size: str, lora: str) -> bool:
    """Does what its parent says, a word a line, until there is nothing more."""
    held = Peer(engine, device, shape, size, lora == "lora")
    tell(ready=True)
    for line in sys.stdin:
        tell(**getattr(held, line.strip())())
    return True


def _used_mib(device: str) -> int | None:
    """Memory of the whole GPU that is taken; None: there is no nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return int(text.stdout.split()[0])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


class Peers:
    """Engines that take turns; one that fails leaves the others to go on."""

    def __init__(self, device: str, shape: str, size: str, engines: list[str], lora: str) -> None:
        self._device = device
        self.children = {e: _child(["peer", e, device, shape, size, lora]) for e in engines}
        self.found: dict[str, dict[str, Any]] = {e: {} for e in engines}

    def _take(self, engine: str, word: str) -> dict[str, Any]:
        """Says a word to an engine that has not failed, and waits for its answer."""
        self._tell(engine, word)
        return self._hear(engine)

    def _tell(self, engine: str, word: str) -> None:
        if word and "failed" not in self.found[engine]:
            _say(self.children[engine], word)

    def _hear(self, engine: str) -> dict[str, Any]:
        if "failed" in self.found[engine]:
            return {}
        answer = _answer(self.children[engine])
        self.found[engine] |= {k: v for k, v in answer.items() if k not in ("ready", "ms")}
        return answer

    def at_once(self, word: str) -> None:
        """All engines do that at the same time."""
        for engine in self.children:
            self._tell(engine, word)
        for engine in self.children:
            self._hear(engine)

    def all(self, word: str) -> None:
        """Each engine does that, one after the other."""
        for engine in self.children:
            self._take(engine, word)

    def rounds(self, name: str) -> None:
        """Times them in turns, another one first each round."""
        times: dict[str, list[float]] = {e: [] for e in self.children}
        order = list(self.children)
        for _ in range(ROUNDS):
            for engine in order:
                if "ms" in (answer := self._take(engine, "time")):
                    times[engine].append(answer["ms"])
            order = order[1:] + order[:1]
        for engine, ms in times.items():
            if ms:
                self.found[engine][name] = round(statistics.median(ms), 3)

    def leave(self) -> None:
        """Ends them one by one: what the GPU has free then was theirs."""
        for engine, child in self.children.items():
            before = _used_mib(self._device)
            _end([child])
            if engine == "gradd":
                command = [os.environ.get("GRADD_BIN", "gradd"), "stop"]
                subprocess.run(command, capture_output=True, check=False, timeout=60)
            after = _used_mib(self._device)
            if before is not None and after is not None:
                self.found[engine]["memory_mib"] = before - after


class _OutOfTimeError(Exception):
    """The part's limit: what is known is reported."""


def _out_of_time(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it comes to the process and to its group
    raise _OutOfTimeError


def peers(device: str, shape: str, size: str, *engines: str, lora: str = "full") -> bool:
    """Losses that agree, milliseconds of a step with and without AdamW, and memory."""
    signal.signal(signal.SIGTERM, _out_of_time)  # the other processes end by it
    group = Peers(device, shape, size, list(engines), lora)
    try:
        group.at_once("")
        group.at_once("first")
        group.rounds("step_ms")
        group.all("with_optimizer")
        group.rounds("adamw_step_ms")
        group.all("memory")
    except _OutOfTimeError:
        for found in group.found.values():
            found.setdefault("failed", "no time was left")
    else:
        group.leave()
    rows, length = map(int, size.split("x"))
    expected = group.found.get("eager", {}).get("loss")
    held = True
    for engine, found in group.found.items():
        good = "failed" not in found and not found.get("in_torch")
        if good and expected is not None:
            good = abs(found["loss"] - expected) <= NEAR["bfloat16"] * abs(expected)
        if "step_ms" in found:
            found["tokens_per_s"] = round(1e3 * rows * length / found["step_ms"])
        tell(what=lora, engine=engine, shape=shape, size=size, held=good, **found)
        held &= good
    return held


def lora(device: str, shape: str, size: str, *engines: str) -> bool:
    """See `peers`; the base is frozen."""
    return peers(device, shape, size, *engines, lora="lora")


TASKS = {f.__name__: f for f in (mlp, killed, averages, one, two, peer, peers, lora)}


def main() -> int:
    """What the first argument names; a daemon that this process has started goes with it."""
    if "GRADD_DIR" in os.environ:
        return 0 if TASKS[sys.argv[1]](*sys.argv[2:]) else 1
    with tempfile.TemporaryDirectory(prefix="gradd-") as folder:
        os.environ["GRADD_DIR"] = folder
        try:
            return 0 if TASKS[sys.argv[1]](*sys.argv[2:]) else 1
        finally:
            command = [os.environ.get("GRADD_BIN", "gradd"), "stop"]
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(command, capture_output=True, check=False, timeout=60)


if __name__ == "__main__":
    sys.exit(main())

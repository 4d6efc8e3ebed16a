"""One engine and one workload in a process of their own, told by its parent when to run.

Separate processes keep the memory of the engines apart; the parent lets one of them run at a time.
Commands and answers are lines of JSON on stdin and stdout (anything else that is printed goes to
stderr):
    {"do": "warm", "steps": n} -> {"first_s", "loss", "memory": {...bytes}}
    {"do": "time", "steps": n} -> {"ms": [...]}
    {"do": "memory", "steps": n} -> {"trainer", "daemon", ...bytes}
    {"do": "end"}
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import workloads

MODES = ("fwd+bwd", "with AdamW")
OURS = ("gradd", "plain", "ORTTrainer")  # engines with a daemon


class Worker:
    """Holds the module, its batch and the step that is measured."""

    def __init__(self, engine: str, workload: str, quick: bool, precision: str) -> None:
        import torch

        from optimum.gradd import memory

        self._torch, self._memory = torch, memory
        self._autocast = precision == "autocast"
        self._engine = engine
        self._load_code()
        self._base = sum(memory.pss_bytes(pid) for pid in self._pids().values())
        self.load = workloads.make(workload, quick)
        self.module, self.batch = workloads.in_precision(*self.load.build(), precision)
        if engine == "last":  # PyTorch's other layout of pictures
            layout = torch.channels_last
            self.module.to(memory_format=layout)
            pictures = {k: x for k, x in self.batch.items() if x.dim() == 4}
            self.batch |= {k: x.contiguous(memory_format=layout) for k, x in pictures.items()}
        self.module.train()
        self._call = self._wrap(engine)
        self._trained = [p for p in self.module.parameters() if p.requires_grad]
        self._optimizer: Any = None

    def _wrap(self, engine: str) -> Callable[..., Any]:
        if engine in ("eager", "last"):
            return self.module
        if engine == "compile":
            return self._torch.compile(self.module)
        if engine in ("gradd", "plain"):  # plain: GRADD_FUSE is 0
            from gradd import ORTModule

            return ORTModule(self.module, strict=True)
        raise ValueError(f"no engine {engine!r}")

    def step(self) -> Any:
        """One forward, backward and, in that mode, one optimizer step."""
        for p in self._trained:
            p.grad = None
        with self._torch.autocast("cpu", self._torch.bfloat16, enabled=self._autocast):
            out = self._call(**self.batch)
        loss = out["loss"] if isinstance(out, dict) else out[0]
        loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()
        return loss

    # ---- commands ----

    def warm(self, steps: int) -> dict[str, Any]:
        """First call apart, then more steps; the loss shows that all engines compute the same."""
        with self._memory.PeakSampler(self._pids, period=0.03) as sampler:
            began = time.perf_counter()
            loss = float(self.step().detach())
            first = time.perf_counter() - began
        memory = self._above(sampler)
        for _ in range(steps - 1):
            self.step()
        return {"first_s": first, "loss": loss, "memory": memory}

    def time(self, steps: int) -> dict[str, Any]:
        """Times `steps` samples of `repeat` steps each."""
        samples = []
        repeat = self.load.repeat
        for _ in range(steps):
            began = time.perf_counter()
            for _ in range(repeat):
                self.step()
            samples.append(1000 * (time.perf_counter() - began) / repeat)
        return {"ms": samples}

    def optimizer(self, steps: int) -> dict[str, Any]:
        """Adds AdamW to the step from now on."""
        self._optimizer = self._make_optimizer()
        self.step()
        return {}

    def _make_optimizer(self) -> Any:
        if self._engine in ("gradd", "plain"):
            from gradd.optim import AdamWMode, FusedAdam

            return FusedAdam(self._trained, lr=1e-5, adam_w_mode=AdamWMode.ADAMW_TORCH)
        return self._torch.optim.AdamW(self._trained, lr=1e-5, fused=True)

    def memory(self, steps: int) -> dict[str, Any]:
        """Peak PSS of all processes while stepping, and what of it training cannot avoid."""
        with self._memory.PeakSampler(self._pids, period=0.004) as sampler:
            for _ in range(steps * self.load.repeat):
                self.step()
        return self._above(sampler)

    def _above(self, sampler: Any) -> dict[str, Any]:
        state = sum(p.numel() * p.element_size() for p in self.module.parameters())
        state += sum(p.numel() * p.element_size() for p in self._trained)  # gradients
        if self._optimizer is not None:
            state += 2 * sum(p.numel() * p.element_size() for p in self._trained)
        return {
            "peaks": sampler.peaks,
            "peak": sampler.peak_sum,
            "base": self._base,
            "state": state,
            "above": sampler.peak_sum - self._base - state,
        }

    def _pids(self) -> dict[str, int]:
        pids = {"trainer": os.getpid()}
        daemon = self._memory.worker_pid() if self._engine in OURS else None
        if daemon:
            pids["daemon"] = daemon
        compilers = set(_children(os.getpid())) - {daemon}
        return pids | {f"child {pid}": pid for pid in compilers}

    def _load_code(self) -> None:
        """Loads what belongs to no model (libraries, thread pools, a compiler, the daemon).

        A trivial module goes through the engine, so that the baseline of memory holds its code.
        """
        import peft  # noqa: F401
        from transformers import BertForMaskedLM, LlamaForCausalLM  # noqa: F401

        self.module = self._torch.nn.Linear(256, 256)
        self._wrap(self._engine)(self._torch.randn(64, 256)).sum().backward()


def _children(pid: int) -> list[int]:
    """Processes that a process has started, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return [p for child in found for p in (child, *_children(child))]


def main(kind: type[Worker] = Worker) -> int:
    """Reads commands until `end`, for a worker of that class."""
    engine, workload, size, precision = sys.argv[1:5]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # prints of libraries must not reach the parent's parser
    worker = kind(engine, workload, size == "quick", precision)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "end":
            break
        result = getattr(worker, command["do"])(command.get("steps", 1))
        print(json.dumps(result), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Models of real sizes on one machine: does it fit, and what does a step cost?

    python benchmarks/real_sizes.py [--only lora,full] [--engines gradd,eager,compile] [--steps 3]
    python benchmarks/real_sizes.py --sweep [--engines gradd]

`lora` is a Llama of 1.1 billion parameters with LoRA r=16 on all projections (base frozen), `full`
one of 0.5 billion of which all are trained with Adam; both in bf16, with random weights, two
sequences of 512 tokens. `small` checks the machinery. Each runs in a process of its own and prints
one line of JSON: seconds and peak memory of trainer and daemon together (PSS, samples), phase by
phase, which appear on stderr as they end. The sweep takes a narrow model from 128 to 8,192 tokens
per step and from 2 to 32 layers, and prints planned bytes and microseconds per token: neither may
jump.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import run  # noqa: E402

MIB = 1 << 20
# layers, hidden, inner, heads, heads of keys, vocabulary, rows, tokens of a row
SIZES = {
    "lora": (22, 2048, 5632, 32, 4, 32000, 2, 512),
    "full": (22, 1280, 3456, 20, 20, 32000, 2, 512),
    "small": (2, 128, 344, 4, 2, 2000, 2, 64),
}
TOKENS = (128, 512, 1024, 2048, 4096, 8192)
LAYERS = (2, 4, 8, 16, 32)


def build(size: tuple[int, ...], lora: bool) -> tuple[Any, dict[str, Any]]:
    """A Llama in bf16 with random weights, and a batch for it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, hidden, inner, heads, kv_heads, vocabulary, rows, length = size
    torch.manual_seed(20)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # never a second copy in f32
    try:
        module = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=hidden,
                intermediate_size=inner,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                max_position_embeddings=max(512, length),
                use_cache=False,
            )
        )
    finally:
        torch.set_default_dtype(before)
    if lora:
        from peft import LoraConfig, get_peft_model

        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=names)
        module = get_peft_model(module, config, autocast_adapter_dtype=False)
    ids = torch.randint(3, vocabulary, (rows, length))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    return module.train(), batch


class Phases:
    """Seconds, and the peak of all processes, of one phase after the other."""

    def __init__(self) -> None:
        from optimum.gradd import memory

        self._memory = memory
        self.found: dict[str, dict[str, float]] = {}

    def _pids(self) -> dict[str, int]:
        daemon = self._memory.worker_pid()
        return {"trainer": os.getpid(), **({"daemon": daemon} if daemon else {})}

    def now(self) -> int:
        """PSS of all processes, in bytes."""
        return sum(map(self._memory.pss_bytes, self._pids().values()))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures what runs in the context."""
        began = time.perf_counter()
        with self._memory.PeakSampler(self._pids, period=0.1) as sampler:
            yield
        self.found[name] = {
            "seconds": round(time.perf_counter() - began, 3),
            "peak_mib": round(sampler.peak_sum / MIB),
        }
        print(name, self.found[name], file=sys.stderr, flush=True)


def train(name: str, engine: str, steps: int) -> dict[str, Any]:
    """Builds, wraps and trains one of SIZES in this process."""
    import torch

    from gradd.memory import unused
    from gradd.session import client  # noqa: F401  the samples ask it for the daemon

    phases = Phases()
    module, batch = build(SIZES[name], lora=name != "full")
    unused.trim()
    parameters = sum(p.numel() * p.element_size() for p in module.parameters())
    trained = [p for p in module.parameters() if p.requires_grad]
    before = phases.now()
    call: Any = module
    if engine == "gradd":
        with phases.phase("wrap"):
            from gradd import ORTModule

            call = ORTModule(module, strict=True)
        phases.found["wrap"]["more_mib"] = phases.found["wrap"]["peak_mib"] - round(before / MIB)
        from gradd.optim import AdamWMode, FusedAdam

        optimizer: Any = FusedAdam(trained, lr=1e-4, adam_w_mode=AdamWMode.ADAMW_TORCH)
    else:
        if engine == "compile":
            call = torch.compile(module)
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    losses = []
    for step in range(steps):
        with phases.phase(f"step {step + 1}"):
            loss = call(**batch)["loss"]
            loss.backward()
            losses.append(float(loss.detach()))
            del loss
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return {
        "model": name,
        "engine": engine,
        "parameters": sum(p.numel() for p in module.parameters()),
        "parameters_mib": round(parameters / MIB),
        "trained": sum(p.numel() for p in trained),
        "before_mib": round(before / MIB),
        "phases": phases.found,
        "losses": [round(x, 5) for x in losses],
    }


def sweep(engine: str, steps: int) -> Iterator[dict[str, Any]]:
    """Steps of a narrow model: many tokens at few layers, many layers at few tokens."""
    points = [(4, tokens) for tokens in TOKENS] + [(layers, 512) for layers in LAYERS]
    for layers, tokens in points:
        rows = max(2, tokens // 512)
        size = (layers, 128, 344, 4, 2, 2000, rows, tokens // rows)
        module, batch = build(size, lora=False)
        yield {"layers": layers, "tokens": tokens, **_point(module, batch, engine, steps)}


def _point(module: Any, batch: dict, engine: str, steps: int) -> dict[str, Any]:
    from gradd import ORTModule

    call = ORTModule(module, strict=True) if engine == "gradd" else module
    tokens = batch["input_ids"].numel()
    took = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        call(**batch)["loss"].backward()
        module.zero_grad(set_to_none=True)
        took.append(time.perf_counter() - began)
    found: dict[str, Any] = {"us_per_token": round(1e6 * min(took[1:]) / tokens, 2)}
    if engine == "gradd":
        from gradd import estimate

        planned = estimate(call, batch, optimizer="sgd")
        found |= {"arena_kib_per_token": round(planned.activations / 1024 / tokens, 2)}
        found |= {"first_s": round(took[0], 2)}
    return found


def _one(arguments: list[str], env: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    print("\n".join(line for line in lines if line.startswith("{")), flush=True)
    if done.returncode:
        print(f"{' '.join(arguments)} failed", flush=True)


def main() -> int:
    """Runs the chosen models, each in a process and with a daemon of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="lora,full", help="of " + ", ".join(SIZES))
    parser.add_argument("--engines", default="gradd,eager", help="of gradd, eager, compile")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--sweep", action="store_true", help="tokens and layers of a narrow model")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside == "sweep":
        for point in sweep(options.engines, options.steps):
            print(json.dumps(point), flush=True)
        return 0
    if options.inside:
        print(json.dumps(train(options.inside, options.engines, options.steps)), flush=True)
        return 0
    names = ["sweep"] if options.sweep else options.only.split(",")
    for name in names:
        for engine in options.engines.split(","):
            with tempfile.TemporaryDirectory(prefix="gradd-bench-") as folder:
                env = run.environment(folder, options.threads)
                try:
                    arguments = ["--inside", name, "--engines", engine]
                    _one([*arguments, "--steps", str(options.steps)], env)
                finally:
                    run.stop_daemons(env)
    return 0


if __name__ == "__main__":
    sys.exit(main())

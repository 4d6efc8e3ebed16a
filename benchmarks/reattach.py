"""How soon a session of 1 GiB is back after its trainer was killed, and with which bits.

    .venv/bin/python benchmarks/reattach.py [--kills 5] [--layers 22] [--steps 4]

A trainer keeps its session (`gradd.keep`): by default 352 MiB of parameters in 44 tensors, with the
moments of FusedAdam 1056 MiB. It is killed after some steps, and the next one, which has made a
model and an optimizer, takes over: one line says how long after the kill parameters, optimizer
state and step were back, how much of that `gradd.reattach` took, how long it took to read every
byte once, and what the first step took, which captures the model, beside the later ones. Losses,
parameters and moments must have the bits of a trainer that nothing disturbs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "adapters/python"))

WIDTH, ROWS = 2048, 8
NAME = "benchmark"


def tell(**what: Any) -> None:
    """One line for the parent."""
    print(json.dumps(what), flush=True)


def train(layers: int, first: bool, kept: bool, until: int) -> None:
    """One trainer; it waits for a line before it begins, and at its end to be killed."""
    import torch
    from torch import nn

    import gradd
    from gradd import ORTModule, optim

    torch.manual_seed(0 if first else 1)
    parts = [part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    wrapped = ORTModule(nn.Sequential(*parts), strict=True)
    optimizer = optim.FusedAdam(wrapped.parameters(), lr=1e-4)
    tell(ready=True)
    sys.stdin.readline()
    asked = time.monotonic()
    session = None if first else gradd.reattach(NAME, wrapped, optimizer)
    if first and kept:
        session = gradd.keep(NAME, wrapped, optimizer)
    back = time.monotonic()
    tensors = list(wrapped.parameters())
    for state in optimizer.state.values():
        tensors += [t for _, t in sorted(state.items()) if torch.is_tensor(t)]
    tell(asked=asked, back=back, bytes=sum(t.numel() * t.element_size() for t in tensors))
    for tensor in tensors:
        tensor.sum()
    read = time.monotonic()
    took, losses = [], []
    for step in range(session.steps if session else 0, until):
        began = time.monotonic()
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = wrapped(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().numpy().tobytes().hex())
        took.append(time.monotonic() - began)
    digest = hashlib.sha256()
    for tensor in wrapped.parameters():
        digest.update(tensor.detach().numpy())
        for _, held in sorted(optimizer.state[tensor].items()):
            digest.update(held.numpy() if torch.is_tensor(held) else str(held).encode())
    tell(read=read, took=took, losses=losses, digest=digest.hexdigest())
    sys.stdin.readline()


class Trainer:
    """A process with one."""

    def __init__(self, layers: int, first: bool, kept: bool, until: int) -> None:
        words = [str(int(word)) for word in (layers, first, kept, until)]
        pipe = subprocess.PIPE
        command = [sys.executable, __file__, "--train", *words]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.hear("ready")

    def hear(self, key: str) -> dict[str, Any]:
        """What it says next."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line or key not in (said := json.loads(line)):
            raise RuntimeError(f"the trainer has ended: {line}")
        return said

    def begin(self) -> dict[str, Any]:
        """It begins; what it says when all is there."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.hear("back")

    def kill(self) -> None:
        """Without a word."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def measure(args: argparse.Namespace) -> None:
    """All lines."""
    last = args.steps * (args.kills + 1)
    alone = Trainer(args.layers, True, False, last)
    alone.begin()
    expected = alone.hear("digest")
    alone.kill()
    trainer = Trainer(args.layers, True, True, args.steps)
    trainer.begin()
    found = trainer.hear("digest")
    losses = found["losses"]
    for n in range(args.kills):
        following = Trainer(args.layers, False, True, args.steps * (n + 2))
        killed = time.monotonic()
        trainer.kill()
        said = following.begin()
        trainer, found = following, following.hear("digest")
        losses += found["losses"]
        later = sorted(found["took"][1:])[len(found["took"][1:]) // 2]
        print(
            f"kill {n + 1}: {said['bytes'] >> 20} MiB back {said['back'] - killed:.3f} s after it"
            f" (reattach {said['back'] - said['asked']:.3f} s);"
            f" read once {found['read'] - said['back']:.3f} s;"
            f" first step {found['took'][0]:.3f} s, later ones {later:.3f} s",
            flush=True,
        )
    trainer.kill()
    same = losses == expected["losses"] and found["digest"] == expected["digest"]
    print(f"{len(losses)} steps: {'the same bits' if same else 'OTHER BITS'}", flush=True)
    sys.exit(not same)


def main() -> None:
    """Measures."""
    if sys.argv[1:2] == ["--train"]:
        layers, first, kept, until = map(int, sys.argv[2:])
        train(layers, bool(first), bool(kept), until)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--layers", type=int, default=22, help="48 MiB each, with the moments")
    parser.add_argument("--steps", type=int, default=4, help="between two kills")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gradd-reattach-"))
    os.environ["GRADD_DIR"] = str(folder)
    from gradd.session import daemon

    daemon.connect(folder).close()
    try:
        measure(args)
    finally:
        os.kill(int((folder / "lock").read_text()), signal.SIGTERM)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

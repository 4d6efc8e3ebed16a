"""Measures the messages of a training step: a model of 300 small parameters with FusedAdam.

    .venv/bin/python benchmarks/messages.py [steps]

A daemon of its own is started. One line per verb: bytes of the envelope, microseconds to pack it
(the least of many), the whole request, and what of it the daemon's engine took. The parameters have
4 or 16 elements each, so hardly anything is computed. `PYTHONPATH` decides whose adapter it is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
import timeit
from typing import Any

WARM_UP = 50
PACKS = 1000


def main() -> None:
    """Trains, and prints the table."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    os.environ["GRADD_DIR"] = folder = tempfile.mkdtemp(prefix="gradd-messages-")
    try:
        _train(steps)
    finally:
        from gradd.session import client, control, daemon

        client.close_all()
        with contextlib.suppress(Exception):
            control.ask_daemon(daemon.directory(), "stop")
        shutil.rmtree(folder, ignore_errors=True)


def _train(steps: int) -> None:
    import torch

    from gradd import ORTModule
    from gradd.optim import FusedAdam
    from gradd.session import client

    class Many(torch.nn.Module):
        """150 linear layers of width 4."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(150))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = x + 0.01 * layer(x)
            return (x * x).mean()

    torch.set_num_threads(1)
    model = ORTModule(Many(), strict=True)
    optimizer = FusedAdam(model.parameters(), lr=1e-4)
    noted = _note(client.Client)
    for i in range(WARM_UP + steps):
        if i == WARM_UP:
            noted.clear()
        model(torch.ones(2, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    _print(noted)


def _note(kind: type) -> dict[str, list]:
    """From now on (microseconds, reply, fields) of every request of that class, by verb."""
    noted: dict[str, list] = {}
    ask = kind.ask

    def timed(self: Any, verb: str, fields: dict[str, Any], *rest: Any) -> dict[str, Any]:
        start = time.perf_counter()
        reply = ask(self, verb, fields, *rest)
        took = (time.perf_counter() - start) * 1e6
        noted.setdefault(verb, []).append((took, reply, fields))
        return reply

    kind.ask = timed
    return noted


def _print(noted: dict[str, list]) -> None:
    from gradd.session import protocol

    print(f"{'verb':<10} {'bytes':>6} {'pack us':>8} {'request us':>11} {'engine us':>10}")
    for verb in ("forward", "backward", "step"):
        envelope = {"v": verb, "q": 1000, "t": bytes(16), **noted[verb][-1][2]}
        packs = timeit.repeat(lambda e=envelope: protocol.pack(e), number=PACKS, repeat=5)
        took = statistics.median(t for t, _, _ in noted[verb])
        ran = statistics.median(reply["us"]["ran"] for _, reply, _ in noted[verb])
        size = len(protocol.pack(envelope))
        print(f"{verb:<10} {size:6} {min(packs) / PACKS * 1e6:8.1f} {took:11.0f} {ran:10.0f}")


if __name__ == "__main__":
    main()

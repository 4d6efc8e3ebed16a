"""A trainer in a process of its own whose forward takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from conftest import PYTHONPATH

SLOW = """
import json, os, sys, torch
from gradd import ORTModule
from gradd.session import client

class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 1200 * 1200).reshape(1200, 1200))

    def forward(self, x):
        for _ in range(40):
            x = torch.tanh(x @ self.weight)
        return x

torch.set_num_threads(1)
model = ORTModule(Slow(), strict=True)
x = torch.linspace(1, -1, 1200 * 1200).reshape(1200, 1200)
for line in sys.stdin:
    with torch.no_grad():
        total = model(x).double().sum().item()
    stats = model.gradd_stats()
    print(json.dumps({"total": total, "recoveries": stats["recoveries"]}), flush=True)
client.close_all()
"""


class Slow:
    """The process. Variables of its environment may be given."""

    def __init__(self, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SLOW],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # The daemon of this test must be one that the test knows and can end.
            env={
                **os.environ,
                "PYTHONPATH": PYTHONPATH,
                "GRADD_AUTOSTART": "0",
                "GRADD_SELF_CHECK": "0",
                **variables,
            },
        )

    def begin(self) -> None:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, f"the slow trainer ended with status {self.process.wait(60)}"
        return json.loads(line)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)
        self.process.stdin.close()
        self.process.stdout.close()

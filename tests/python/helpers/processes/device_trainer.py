"""Trains a tiny model in a process of its own, on the CPU or a GPU.

    python -m helpers.processes.device_trainer NAME TYPE FOLDER DEVICE...

On each device in turn, by a daemon that the client starts in FOLDER/DEVICE (GRADD_BIN says which).
Prints a line of JSON for each: losses, and what ran in PyTorch.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from gradd import ORTModule
from gradd.optim import FusedAdam
from gradd.session import client
from helpers.models import families

STEPS = 4


def train(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Four steps with Adam and clipping; the first batch has another shape. NAME_chunks: so many
    rows and words that the loss makes its logits in chunks.
    """
    torch.manual_seed(3)
    family, chunks = name.removesuffix("_chunks"), name.endswith("_chunks")
    module, make_batch = families.build(family, **({"vocab_size": 1200} if chunks else {}))
    model = ORTModule(module.to(dtype), strict=True)
    optimizer = FusedAdam(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    losses = []
    for step in range(STEPS):
        batch = make_batch(2, (8 if step else 5) * (32 if chunks else 1), step)
        batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
        out = model(**batch)
        loss = out.loss if hasattr(out, "loss") else out[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    made = {"losses": losses, "fallbacks": model.gradd_stats()["fallbacks"]}
    return made | {"chunks": "LinearCrossEntropy" in model.gradd_explain().counts()}


def main() -> None:
    """Every device that the command line names."""
    name, dtype, folder, *devices = sys.argv[1:]
    for device in devices:
        os.environ |= {"GRADD_DEVICE": device, "GRADD_DIR": os.path.join(folder, device)}
        print(json.dumps(train(name, getattr(torch, dtype))))
        client.close_all()


if __name__ == "__main__":
    main()

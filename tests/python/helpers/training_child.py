"""Trains a tiny model in a process of its own and prints the losses: `training_child.py NAME`.

Which device computes is the environment's (GRADD_DEVICE, GRADD_BIN, GRADD_DIR); a daemon is started
by the client. Prints one line of JSON: losses, and what ran in PyTorch.
"""

from __future__ import annotations

import json
import sys

import models
import torch

from gradd import ORTModule
from gradd.optim import FusedAdam

STEPS = 4


def main() -> None:
    """Four steps with Adam and clipping; the first batch has another shape. NAME_chunks: so many
    rows and words that the loss makes its logits in chunks.
    """
    name, dtype = sys.argv[1], getattr(torch, sys.argv[2])
    torch.manual_seed(3)
    family, chunks = name.removesuffix("_chunks"), name.endswith("_chunks")
    module, make_batch = models.build(family, **({"vocab_size": 1200} if chunks else {}))
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
    stats = model.gradd_stats()
    made = {"losses": losses, "fallbacks": stats["fallbacks"]}
    made["chunks"] = "LinearCrossEntropy" in model.gradd_explain().counts()
    print(json.dumps(made))


if __name__ == "__main__":
    main()

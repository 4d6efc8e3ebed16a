"""One of several trainers that share a daemon: trains when it is told to and reports the bits.

    python -m helpers.processes.session_trainer FAMILY SEED

FAMILY:bf16 has its parameters in bf16. Reads commands from standard input, one per line, and
answers each with one JSON line: "ready" builds and captures the model, "train N" trains N steps
from the same start and gives the digest of all losses, gradients and final weights, with the times
at which it began and ended. GRADD_TEST_TENSORS=emu: on the emulated GPU. session_children.py starts
it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
import time

import torch

from helpers import emu_torch, gpu_tensors

if gpu_tensors.is_on():
    emu_torch.load()  # autograd's first backward counts the devices of the process
    torch.set_default_device("emu")
from gradd import ORTModule
from gradd.session import client
from helpers.models import families

torch.set_num_threads(1)


class Trainer:
    """A model in the daemon that can be trained again and again from the same start."""

    def __init__(self, family: str, seed: int) -> None:
        family, _, precision = family.partition(":")
        dropout = {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
        model, self.make = families.build(
            family, seed=seed, **(dropout if family == "gpt2" else {})
        )
        if precision == "bf16":
            model = model.bfloat16()
        self.seed = seed
        self.start = copy.deepcopy(model.state_dict())
        self.model = ORTModule(model, strict=True)
        self.model(**self.make(3, 12, seed))

    def train(self, steps: int) -> dict:
        """Trains from the start; sizes change from step to step."""
        self.model.load_state_dict(self.start)
        torch.manual_seed(self.seed)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        digest = hashlib.sha256()
        begin = time.monotonic()
        for step in range(steps):
            optimizer.zero_grad()
            result = self.model(**self.make(2 + step % 3, 8 + step % 5, step))
            loss = result[0] if isinstance(result, tuple) else result.loss
            loss.backward()
            for tensor in (loss, *(p.grad for p in self.model.parameters())):
                digest.update(_bytes(tensor))
            optimizer.step()
        end = time.monotonic()
        for parameter in self.model.parameters():
            digest.update(_bytes(parameter))
        stats = self.model.gradd_stats()
        return {
            "digest": digest.hexdigest(),
            "loss": float(loss.detach()),
            "begin": begin,
            "end": end,
            "captures": stats["captures"],
            "fallbacks": stats["fallbacks"],
        }


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def main() -> None:
    """Obeys until standard input ends."""
    trainer: Trainer | None = None
    for line in sys.stdin:
        verb, *rest = line.split()
        if verb == "ready":
            trainer = Trainer(sys.argv[1], int(sys.argv[2]))
            answer: dict = {"ready": True}
        else:
            answer = trainer.train(int(rest[0]))
        print(json.dumps(answer), flush=True)
    del trainer
    client.close_all()


if __name__ == "__main__":
    main()

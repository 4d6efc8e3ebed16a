"""Trains MNIST with gradd.train: python mnist.py DATA FILES [EPOCHS]."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from gradd.train import CheckpointState, Module, Optimizer

ROWS = 64


def read(data: Path, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Pictures f32[n, 784] of 0 to 1, and their labels."""
    pictures = np.fromfile(data / f"{kind}-images-idx3-ubyte", np.uint8)[16:].reshape(-1, 784)
    labels = np.fromfile(data / f"{kind}-labels-idx1-ubyte", np.uint8)[8:]
    return pictures.astype(np.float32) / 255, labels.astype(np.int64)


def main(data: Path, files: Path, epochs: int = 1) -> None:
    """Prints the mean loss of each epoch, and how many of the test's pictures are read rightly."""
    state = CheckpointState.load_checkpoint(files / "checkpoint")
    module = Module(files / "training_model.onnx", state, files / "eval_model.onnx")
    optimizer = Optimizer(files / "optimizer_model.onnx", module)
    (x, labels), (test, expected) = read(data, "train"), read(data, "t10k")
    for epoch in range(1, epochs + 1):
        losses = []
        module.train()
        for at in range(0, len(x), ROWS):
            losses.append(float(module(x[at : at + ROWS], labels[at : at + ROWS])[0]))
            optimizer.step()
            module.lazy_reset_grad()
        module.eval()
        _, scores = module(test, expected)
        right = int((scores.argmax(1) == expected).sum())
        print(f"epoch {epoch}: loss {np.mean(losses):.4f}, {right} of {len(test)} right")
    module.export_model_for_inferencing(files / "mnist.onnx", ["scores"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))

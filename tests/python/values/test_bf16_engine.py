"""Whole models with bf16 parameters in the engine, against torch in bf16 and in fp32.

The distance of a gradient is its relative L2 distance from torch's fp32 gradient (same rounded
parameters), with a floor at 1e-4 of the largest gradient's norm. The engine may be at most twice as
far away as torch's own bf16 is.
"""

from __future__ import annotations

import copy

import ml_dtypes
import numpy as np
import pytest
import torch

from helpers.graphs import captures
from helpers.graphs import engine as E
from helpers.models import families
from helpers.selection import every_run

FLOOR = 1e-4
TWICE = 2.0


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """The elements as numpy, bf16 included."""
    flat = tensor.detach().contiguous()
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return flat.numpy()


def torch_gradients(module, batch):
    module.zero_grad()
    loss = module(**batch).loss
    loss.backward()
    grads = {n: p.grad.float() for n, p in module.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads


def engine_gradients(module, batch, plain=False, threads=0):
    made = captures.capture(module, (), batch)
    model, feed = E.Model(made.cap.onnx), {n: array_of(v) for n, v in made.values.items()}
    loss = made.loss
    names = [n for n in made.cap.params if n in model.inputs]
    plan = E.Plan(model, feed, names, [loss], [loss], threads=threads, plain=plain)
    run = E.Run(plan)
    value = run.forward(feed)[loss]
    grads = run.backward({loss: np.ones((), value.dtype)})
    assert all(g is None or g.dtype == feed[n].dtype for n, g in grads.items())
    wide = {n: torch.from_numpy(g.astype(np.float32)) for n, g in grads.items() if g is not None}
    return float(value), wide


def distances(got, exact):
    floor = FLOOR * max(float(g.norm()) for g in exact.values())
    return {n: float((got[n] - g).norm()) / max(float(g.norm()), floor) for n, g in exact.items()}


@pytest.mark.parametrize("plain", every_run((False,), [False, True]), ids=["fused", "plain"])
@pytest.mark.parametrize(
    "family", every_run(("gemma2",), ("llama", "gpt2", "bert_mlm", "qwen3", "gemma2"))
)
def test_bf16_model_is_as_near_to_fp32_as_torch(family: str, plain: bool) -> None:
    module, make_batch = families.build(family)
    module = module.bfloat16()
    batch = make_batch(3, 16, 5)
    exact_loss, exact = torch_gradients(copy.deepcopy(module).float(), batch)
    torch_loss, theirs = torch_gradients(module, batch)
    loss, ours = engine_gradients(module, batch, plain)
    assert abs(loss - exact_loss) <= TWICE * max(abs(torch_loss - exact_loss), 2**-9 * exact_loss)
    assert ours.keys() == exact.keys() == theirs.keys()
    own, bound = distances(ours, exact), distances(theirs, exact)
    worst = max(own, key=lambda n: own[n] / max(bound[n], 1e-9))
    print(
        f"{family}: {worst} {own[worst]:.3g}, torch {bound[worst]:.3g}; median "
        f"{np.median(list(own.values())):.3g}, torch {np.median(list(bound.values())):.3g}"
    )
    for name in exact:
        assert own[name] <= TWICE * bound[name], f"{name}: {own[name]:.3g} > {bound[name]:.3g}"

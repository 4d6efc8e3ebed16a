"""Dropout in whole models: the distribution of losses and gradients is PyTorch's.

Masks cannot be equal (another generator draws them), so means and deviations of many passes are
compared by z-tests. Bounds are five standard deviations of the sampling error: a right
implementation fails one comparison in 1.7 million; there are about 100. Each test also shows that
it would notice: against PyTorch with another rate the same comparison must fail.

The same seed gives the same masks in the recognised and in the plain plan, for any number of
threads: one different mask would move a loss by a thousand times the bound.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from helpers.graphs import captures
from helpers.graphs import engine as E
from helpers.models import families
from helpers.selection import every_run

pytestmark = pytest.mark.one_in(6)

SIGMAS = 5.0
PASSES = 200
ONE = np.ones((), np.float32)

RATES = {
    "bert_mlm": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
}


class Sample(NamedTuple):
    """Losses [passes], and per parameter a fixed projection of its gradient [passes]."""

    losses: np.ndarray
    projections: dict[str, np.ndarray]


def build(family: str, rate: float) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Large weights make the loss depend on the masks."""
    over = dict.fromkeys(RATES[family], rate) | {"initializer_range": 0.15}
    module, make_batch = families.build(family, **over)
    return module, make_batch(2, 8, 0)


@functools.cache
def direction(name: str, shape: tuple[int, ...]) -> np.ndarray:
    seed = sum(name.encode())
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Ours:
    """A captured model in the engine."""

    def __init__(self, family: str, rate: float, plain: bool = False, threads: int = 1) -> None:
        module, batch = build(family, rate)
        made = captures.capture(module, (), batch)
        self.feed = {n: v.detach().numpy() for n, v in made.values.items()}
        self.loss = made.loss
        self.params = list(made.cap.params)
        self.model = E.Model(made.cap.onnx)
        self.plan(plain, threads)

    def plan(self, plain: bool, threads: int) -> Ours:
        args: dict[str, Any] = {"threads": threads, "plain": plain}
        self.plans = E.Plan(
            self.model, self.feed, self.params, [self.loss], [self.loss], **args
        )  # fmt: skip
        return self

    def passes(self, seed: int) -> tuple[float, dict[str, np.ndarray]]:
        run = E.Run(self.plans)
        loss = float(run.forward(self.feed, seed)[self.loss])
        return loss, run.backward({self.loss: ONE})

    def sample(self) -> Sample:
        losses, projections = [], {n: [] for n in self.params}
        for seed in range(PASSES):
            loss, grads = self.passes(seed)
            losses.append(loss)
            for name, values in projections.items():
                values.append(project(name, grads[name]))
        return Sample(np.array(losses), {n: np.array(v) for n, v in projections.items()})


def project(name: str, grad: np.ndarray) -> float:
    return float((grad * direction(name, grad.shape)).sum(dtype=np.float64))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models: threads cost more than they give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def torch_sample(family: str, rate: float) -> Sample:
    module, batch = build(family, rate)
    named = dict(module.named_parameters())
    losses, projections = [], {n: [] for n in named}
    torch.manual_seed(17)
    for _ in range(PASSES):
        module.zero_grad()
        loss = module(**batch).loss
        loss.backward()
        losses.append(float(loss.detach()))
        for name, parameter in named.items():
            projections[name].append(project(name, parameter.grad.numpy()))
    return Sample(np.array(losses), {n: np.array(v) for n, v in projections.items()})


def mean_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Difference of means in standard errors."""
    error = math.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))
    return abs(a.mean() - b.mean()) / error if error else float("inf")


def deviation_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Difference of log standard deviations in standard errors, with the measured kurtosis."""
    both = np.concatenate([(x - x.mean()) / x.std() for x in (a, b)])
    error = math.sqrt(max((both**4).mean() - 1.0, 0.5) / 4.0 * (1.0 / len(a) + 1.0 / len(b)))
    return abs(math.log(a.std() / b.std())) / error


def distances(ours: Sample, theirs: Sample) -> dict[str, float]:
    """Every comparison by name."""
    out = {
        "mean loss": mean_distance(ours.losses, theirs.losses),
        "deviation of the loss": deviation_distance(ours.losses, theirs.losses),
    }
    for name, values in ours.projections.items():
        if np.abs(values).max() > 1e-4:  # BERT's key biases have no gradient but rounding
            out[f"mean of {name}"] = mean_distance(values, theirs.projections[name])
    return out


@pytest.mark.parametrize("family", every_run(("gpt2",), RATES))
def test_losses_and_gradients_are_distributed_as_torchs(family: str) -> None:
    ours = Ours(family, 0.1).sample()
    found = distances(ours, torch_sample(family, 0.1))
    assert len(found) > 25
    worst = max(found, key=found.__getitem__)
    assert found[worst] <= SIGMAS, f"{worst}: {found[worst]:.1f} standard errors"
    other = distances(ours, torch_sample(family, 0.25))
    assert sum(d > SIGMAS for d in other.values()) >= 3, "another rate went unnoticed"


@pytest.mark.parametrize("family", every_run(("gpt2",), RATES))
def test_masks_do_not_depend_on_recognition_or_threads(family: str) -> None:
    ours = Ours(family, 0.3)
    results = []
    for plain, threads in ((False, 1), (True, 1), (False, 2), (True, 3)):
        ours.plan(plain, threads)
        results.append([ours.passes(seed) for seed in (1, 2)])
    assert abs(results[0][0][0] - results[0][1][0]) > 1e-3
    for other in results[1:]:
        for (loss, grads), (want, want_grads) in zip(other, results[0], strict=True):
            assert math.isclose(loss, want, rel_tol=1e-5)
            largest = max(float(np.abs(g).max()) for g in want_grads.values())
            for name, grad in want_grads.items():
                scale = max(float(np.abs(grad).max()), 1e-3 * largest)
                np.testing.assert_allclose(grads[name] / scale, grad / scale, atol=1e-4)


def test_the_same_seed_gives_the_same_bits() -> None:
    ours = Ours("gpt2", 0.2)
    first, other, again = (ours.passes(seed) for seed in (7, 8, 7))
    assert first[0] == again[0] and first[0] != other[0]
    for name, grad in first[1].items():
        assert grad.tobytes() == again[1][name].tobytes()
        assert grad.tobytes() != other[1][name].tobytes()

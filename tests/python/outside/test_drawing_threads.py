"""Threads that draw random numbers while a module is captured: neither loses anything by the other.

A thread that augments data draws from the generators of the process all the time.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from nets import assert_close
from torch import nn

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")
X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).tanh()


class Draws(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * (2.0 if random.random() < 0.5 else 3.0)


class DrawsFromNumpy(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * float(np.random.rand())


class Shuffles(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = [0, 1, 2]
        random.shuffle(order)
        return self.lin(x[order])


GENERATORS: dict[str, tuple[Callable, Callable, Callable]] = {
    "random": (random.seed, random.random, lambda: random.Random(7).random),
    "numpy": (np.random.seed, np.random.rand, lambda: np.random.RandomState(7).rand),
}


@contextmanager
def _drawing(name: str) -> Iterator[list[float]]:
    """A thread that draws, and what it has drawn."""
    seed, draw, _ = GENERATORS[name]
    seed(7)
    drawn: list[float] = []
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            drawn.append(draw())
            time.sleep(0.0005)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield drawn
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("name", GENERATORS)
def test_a_thread_gets_each_number_once(name: str) -> None:
    model = ORTModule(Plain(), strict=True)
    with _drawing(name) as drawn:
        for rows in (1, 3):  # two captures
            assert_close(model(X[:rows]), model.module(X[:rows]))
    assert len(drawn) > 10
    again = GENERATORS[name][2]()
    assert drawn == [again() for _ in drawn]
    assert model.gradd_stats()["captures"] == 2


@pytest.mark.parametrize("kind", [Draws, DrawsFromNumpy, Shuffles])
@pytest.mark.parametrize("beside", [False, True])
def test_a_forward_that_draws_is_still_noticed(kind: type, beside: bool) -> None:
    model = ORTModule(kind())
    if beside:
        with _drawing("random"):
            model(X)
    else:
        model(X)
    assert model.gradd_stats()["fallbacks"] == {"python_random": 1}


@pytest.mark.parametrize("kind", [Draws, DrawsFromNumpy, Shuffles])
def test_a_forward_that_draws_gets_its_numbers(kind: type) -> None:
    torch.manual_seed(0)
    found = []
    for wrap in (False, True):
        torch.manual_seed(0)
        model = ORTModule(kind()) if wrap else kind()
        random.seed(3), np.random.seed(3)
        found.append([model(X) for _ in range(3)])
    for a, b in zip(*found, strict=True):
        assert_close(a, b)

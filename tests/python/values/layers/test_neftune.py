"""NEFTune's noise on embeddings, by the hook of transformers: one graph for all lengths."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations import neftune

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")


class Model(nn.Module):
    """Embeddings with noise, and a loss."""

    def __init__(self, alpha: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(50, 16, dtype=dtype), nn.Linear(16, 1, dtype=dtype)
        self.table.neftune_noise_alpha = alpha
        self.table.register_forward_hook(neftune.neftune_post_forward_hook)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.table(ids)
        return self.head(x.tanh()).square().mean(), x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_noise_is_that_of_the_paper(dtype: torch.dtype) -> None:
    model = ORTModule(Model(5.0, dtype), strict=True)
    for length in (16, 20, 33):
        ids = torch.arange(8 * length).reshape(8, length) % 50
        loss, x = model(ids)
        loss.backward()
        bound = 5.0 / math.sqrt(length * 16)
        noise = (x - model.table.weight[ids]).detach().float()
        rounding = 0.0 if dtype == torch.float32 else 2.0**-7
        assert noise.abs().max() <= bound + 1e-6 + 4 * rounding
        assert 0.9 * bound < noise.abs().max()
        assert abs(noise.mean()) < 0.1 * bound
        assert noise.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
        assert not torch.equal(x, model(ids)[1]), "another call draws others"
    stats = model.gradd_stats()
    assert (stats["captures"], stats["breaks"]) == (1, 0) and stats["self_checks"]


def test_gradients_and_changes_of_it() -> None:
    theirs = Model(0.0)
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    ids = torch.arange(12).reshape(2, 6)
    for training, alpha in ((True, 0.0), (False, 5.0), (True, 1e-5), (False, 3.0)):
        found: list[Any] = []
        for net in (ours, theirs):
            net.train(training)
            net.zero_grad()
            net.table.neftune_noise_alpha = alpha
            loss, x = net(ids)
            loss.backward()
            found.append([loss, x, *(p.grad for p in net.parameters())])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    ours.train()
    ours.table.neftune_noise_alpha = 5.0
    assert (ours(ids)[1] - ours.table.weight[ids]).abs().max() > 0.2


def test_a_hook_that_a_script_has_put_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        return 2 * output

    monkeypatch.setattr(neftune, "neftune_post_forward_hook", doubled)
    model = ORTModule(Model(5.0), strict=True)
    ids = torch.arange(12).reshape(2, 6)
    torch.testing.assert_close(model(ids)[1], 2 * model.table.weight[ids])

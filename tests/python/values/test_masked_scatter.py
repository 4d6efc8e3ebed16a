"""masked_scatter(), by which models put features of pictures and sounds between words."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gradd import ORTModule, errors

pytestmark = pytest.mark.usefixtures("shared_daemon")
PICTURE = 7


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.features = nn.Embedding(20, 6), nn.Linear(5, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        h = self.words(ids)
        mask = (ids == PICTURE)[..., None].expand_as(h)
        return self.out(h.masked_scatter(mask, self.features(features)))


def _batch(length: int, pictures: int) -> torch.Tensor:
    ids = torch.randint(PICTURE + 1, 20, (2, length))
    ids.view(-1)[torch.randperm(2 * length)[:pictures]] = PICTURE
    return ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_between_words(dtype: torch.dtype) -> None:
    ours = Mixed().to(dtype)
    theirs = copy.deepcopy(ours)
    wrapped = ORTModule(ours, strict=True)
    for length, pictures, features in ((9, 2, 2), (12, 4, 6), (12, 0, 3), (5, 10, 10)):
        ids, given = _batch(length, pictures), torch.randn(features, 5).to(dtype)
        results = []
        for net, call in ((ours, wrapped), (theirs, theirs)):
            net.zero_grad()
            result = call(ids, given)
            result.float().square().sum().backward()
            results.append(result)
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
        torch.testing.assert_close(*results, **tolerance)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, **tolerance)


def test_too_few_features_are_an_error() -> None:
    wrapped = ORTModule(Mixed())
    wrapped(_batch(6, 2), torch.randn(2, 5)).sum().backward()
    with pytest.raises(errors.IndexOutOfRangeError, match="12 is out of range for size 12"):
        wrapped(_batch(6, 3), torch.randn(2, 5))
    wrapped(_batch(6, 2), torch.randn(2, 5)).sum().backward()

"""nn.EmbeddingBag with offsets of the call: values and gradients of PyTorch, and its errors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gradd import ORTModule
from gradd.errors import IndexOutOfRangeError
from gradd.spec import CaptureError

pytestmark = pytest.mark.usefixtures("shared_daemon")


class Bags(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags, self.last = nn.EmbeddingBag(20, 5, **options), nn.Linear(5, 1)

    def forward(self, indices, offsets, weights=None):
        return self.last(self.bags(indices, offsets, weights)).sum()


@pytest.mark.parametrize("options", [{"padding_idx": 3}, {"mode": "sum"}, {"mode": "max"}])
def test_bags_of_any_length(options) -> None:
    theirs = Bags(**options).double()
    ours = copy.deepcopy(theirs)
    model = ORTModule(ours, strict=True)
    generator = torch.Generator().manual_seed(1)
    for count, offsets in ((8, [0, 3, 3]), (5, [0, 1, 5]), (11, [0, 0, 8]), (0, [0, 0, 0])):
        indices = torch.randint(20, (count,), generator=generator)
        args = [indices, torch.tensor(offsets)]
        if options.get("mode") == "sum":
            args.append(torch.rand(count, generator=generator, dtype=torch.float64))
        for net in (ours, theirs):
            net.zero_grad()
        results = model(*args), theirs(*args)
        torch.testing.assert_close(*results)
        for result in results:
            result.backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert model.gradd_stats()["captures"] == 2  # of indices, and of none


def test_bags_of_a_known_length() -> None:
    """PyTorch leaves the bag of each index empty, which nothing reads."""

    class Known(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.EmbeddingBag(4, 3, mode="sum")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.bags(x.flatten(1)[:, :6].long())

    theirs = Known()
    model = ORTModule(copy.deepcopy(theirs), strict=True)
    x = 3 * torch.rand(1, 4, 5)
    for net in (model, theirs):
        net(x).square().sum().backward()
    torch.testing.assert_close(model.module.bags.weight.grad, theirs.bags.weight.grad)


def test_what_torch_refuses_is_an_error() -> None:
    model = ORTModule(Bags(), strict=True)
    good = torch.arange(4), torch.tensor([0, 2])
    model(*good)
    for indices, offsets in ((torch.tensor([1, 20, 3, 4]), good[1]), (good[0], good[1] + 1)):
        with pytest.raises(IndexOutOfRangeError):
            model(indices, offsets)
    model(*good)


def test_sparse_gradients_are_refused_by_name() -> None:
    model = ORTModule(Bags(mode="sum", sparse=True), strict=True)
    with pytest.raises(CaptureError, match=r"EmbeddingBag\(sparse=True\)"):
        model(torch.arange(4), torch.tensor([0, 2]))

"""Tensors of more axes than the daemon's have: by name in PyTorch, the rest in the daemon."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from gradd import ORTModule
from gradd.dynamo.refused import MAX_RANK
from gradd.spec import CaptureError
from helpers.graphs.captures import Lambda

pytestmark = pytest.mark.usefixtures("shared_daemon")
_ONES = (1,) * 4
_WIDE = (2,) * 4


def _five(h: torch.Tensor) -> torch.Tensor:
    return h.view(-1, *_WIDE)


def _eight(h: torch.Tensor) -> torch.Tensor:
    return h.view(-1, *_WIDE, 1, 1, 1)


# Of rows of 16: the rank is that of an operator's operands or results.
_SHOWN: dict[str, Callable] = {
    "views": lambda h: h.view(-1, *_WIDE, *_ONES).permute(0, 4, 3, 2, 1, 5, 6, 7, 8).flatten(1),
    "product": lambda h: torch.einsum("abcde,fghij->abcdefghij", _five(h), _five(h)).sum((1, 2)),
    "tensordot": lambda h: torch.tensordot(_five(h), _five(h), 0).flatten(1),
    "meshgrid": lambda h: sum(torch.meshgrid(*[h[0, i : i + 2] for i in range(9)], indexing="ij")),
    "embedding": lambda h: nn.functional.embedding((_eight(h) > 0).long(), h[:2, :3]),
    "index": lambda h: _five(h)[:, (h[0, :2] > 0).long().view(1, 2, 1, 1, 1)],
    "windows": lambda h: _eight(h).unfold(4, 2, 1),
    "stack": lambda h: torch.stack([_eight(h)] * 3, 4).flatten(1),
    "one_hot": lambda h: nn.functional.one_hot((_eight(h) > 0).long(), 2).flatten(1) * h[:, :1],
}
# What the translation, or the daemon's derivative, makes of an operator has the rank.
_INSIDE: dict[str, Callable] = {
    "einsum": lambda h: torch.einsum(
        "aixb,bjyc,ckzd->ijkxyz", h.view(1, -1, 4, 4), h.view(4, -1, 2, 2), h.view(2, -1, 8, 1)
    ).flatten(1),
    "repeat": lambda h: _five(h).repeat(2, 2, 2, 3, 2),
    "kron": lambda h: torch.kron(_five(h), _five(h)),
    "repeat_interleave": lambda h: _eight(h).repeat_interleave(2, 4),
}
# These are within the limit.
_FITTING: dict[str, Callable] = {
    "orders": lambda h: _eight(h).cumsum(3).sort(2).values.flip(1, 2).softmax(3).std(4),
    "roll": lambda h: _eight(h).roll((1, 1, 1), (1, 2, 3)),
    "matmul": lambda h: h.view(-1, *_ONES, 2, 2, 4) @ h.view(-1, *_ONES, 2, 4, 2),
    "expand": lambda h: h.view(-1, *_ONES, 2, 2, 4).expand(-1, 2, 2, 2, 2, 2, 2, 4).var(3),
}


def _module(function: Callable) -> nn.Module:
    torch.manual_seed(0)
    return Lambda(lambda self, x: function(self.lin(x)), lin=nn.Linear(16, 16))


def _compare(plain: nn.Module, x: torch.Tensor, **options: bool) -> ORTModule:
    wrapped = ORTModule(copy.deepcopy(plain), **options)
    ours, theirs = (x.clone().requires_grad_() for _ in "ab")
    got, want = wrapped(ours), plain(theirs)
    torch.testing.assert_close(got, want)
    for result in (got, want):
        result.square().mean().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    for mine, other in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    return wrapped


@pytest.mark.parametrize("name", [*_SHOWN, *_INSIDE])
def test_an_operator_of_too_many_axes_is_cut_out(name):
    plain = _module((_SHOWN | _INSIDE)[name])
    wrapped = _compare(plain, torch.randn(4, 16))
    stats = wrapped.gradd_stats()
    assert stats["parts_in_torch"].keys() == {"unsupported_operator"} and stats["graphs"] == 1
    with pytest.raises(CaptureError, match="rank|axes|entries"):
        ORTModule(plain, strict=True)(torch.randn(4, 16))


@pytest.mark.parametrize("name", _FITTING)
def test_as_many_axes_as_the_daemon_has(name):
    _compare(_module(_FITTING[name]), torch.randn(4, 16), strict=True)


@pytest.mark.parametrize("where", ["argument", "parameter", "buffer"])
def test_tensors_of_the_user_with_too_many_axes(where):
    many, lin = torch.randn((2,) * 9), nn.Linear(16, 16)
    if where == "argument":
        narrow = nn.Linear(2, 4)
        _compare(Lambda(lambda self, x: self.lin(x.sum((0, 1))), lin=narrow), many)
        return
    many = nn.Parameter(many) if where == "parameter" else many
    plain = Lambda(
        lambda self, x: self.lin(x) * self.many.square().mean() + self.lin(x), lin=lin, many=many
    )
    assert _compare(plain, torch.randn(3, 16)).gradd_stats()["graphs"] == 1


def test_the_limit_is_the_daemons():
    header = Path(__file__).parents[4] / "shm" / "tensor.h"
    (found,) = re.findall(r"#define GRADD_MAX_RANK +(\d+)", header.read_text())
    assert int(found) == MAX_RANK

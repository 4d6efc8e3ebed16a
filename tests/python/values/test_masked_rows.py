"""Attention whose mask leaves a row without keys, in a later step than the one that is compared.

torch's scaled_dot_product_attention gives 0 there, whether the mask is of booleans or of floats.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradd import ORTModule
from helpers.counts.plans import counts, explained

pytestmark = [pytest.mark.one_in(4), pytest.mark.usefixtures("shared_daemon")]
INF = float("inf")


class Attention(nn.Module):
    """Two heads of four; kind says how the padding p [B, S] comes into the scores."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv, self.bias = kind, nn.Linear(8, 24), nn.Parameter(torch.randn(5, 5))

    def mask(self, p: Tensor) -> Tensor:
        keep = ~p[:, None, None, :]
        if self.kind == "bool":
            return keep
        if self.kind == "float":
            return torch.zeros(p.shape)[:, None, None].masked_fill(~keep, -INF)
        if self.kind == "causal":
            return torch.full((5, 5), -INF).triu(1) + torch.where(keep, 0.0, -INF)
        if self.kind == "bias":
            return self.bias.masked_fill(~keep, -INF)
        return torch.where(keep, self.bias, -INF)

    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        mask = self.mask(p)
        mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        return self.inner(x, x, x, key_padding_mask=p, need_weights=False)[0]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)

    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        return self.inner(x, src_key_padding_mask=p)


KINDS = ("bool", "float", "causal", "bias", "where")
MODULES = {**{kind: lambda kind=kind: Attention(kind) for kind in KINDS}}
MODULES |= {"heads": Heads, "encoder": Encoder}


def padded(step: int) -> Tensor:
    p = torch.zeros(2, 5).bool()
    if step == 1:
        p[:, 4] = True
    if step == 2:
        p[0] = True  # a sample that is all padding
    if step == 3:
        p[:, :2] = True  # from the left
    return p


CASES = [(name, torch.float32) for name in MODULES]
CASES += [(name, torch.bfloat16) for name in (*KINDS, "heads")]


@pytest.mark.parametrize(
    ("name", "dtype"), [pytest.param(*CASES[0], marks=pytest.mark.quick), *CASES[1:]]
)
def test_rows_without_keys(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    eager = MODULES[name]().to(dtype)
    model = ORTModule(copy.deepcopy(eager), strict=True)
    tolerance = {} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    for step in range(4):
        x = torch.randn(2, 5, 8, dtype=dtype)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        got, want = model(ours, padded(step)), eager(theirs, padded(step))
        assert want.isfinite().all()
        torch.testing.assert_close(got, want, **tolerance)
        for out in (got, want):
            out.square().sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, **tolerance)
        for p, q in zip(model.parameters(), eager.parameters(), strict=True):
            if q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, **tolerance)


@pytest.mark.parametrize("name", ["float", "causal", "encoder"])
def test_such_attention_is_one_operator(name: str, tmp_path: Path) -> None:
    model = MODULES[name]()
    assert (
        counts(explained(model, (torch.randn(2, 5, 8), padded(1)), tmp_path / "m")).attention == 1
    )


def test_an_encoder_that_asks_for_nested_tensors() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
    x = torch.randn(2, 5, 8)
    for nested in (True, False):
        eager = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)
        model = ORTModule(copy.deepcopy(eager))
        for train in (True, False):
            for each in (model, eager):
                each.train(train)
            with torch.set_grad_enabled(train):
                ours, theirs = (e(x, src_key_padding_mask=padded(3)) for e in (model, eager))
            torch.testing.assert_close(ours, theirs)
        stats = model.gradd_stats()
        assert stats["fallbacks"] == {} and stats["parts_in_torch"] == {}


def test_torch_compile_gives_padded_rows_numbers_either() -> None:
    """PyTorch's fast path for evaluation fills them with zeros."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
    eager = nn.TransformerEncoder(layer, 1).eval()
    x, mask = torch.randn(2, 5, 8), torch.arange(5).expand(2, 5) > torch.tensor([[2], [4]])
    with torch.no_grad():
        zeros = eager(x, src_key_padding_mask=mask)
        theirs = torch.compile(copy.deepcopy(eager), backend="eager")(x, src_key_padding_mask=mask)
        ours = ORTModule(copy.deepcopy(eager))(x, src_key_padding_mask=mask)
    assert not zeros[mask].any()
    torch.testing.assert_close(ours[~mask], zeros[~mask])
    torch.testing.assert_close(ours, theirs)

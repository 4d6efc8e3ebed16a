"""A mask inside of a bias is taken out of it, and the bias is that of one sequence."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn

from gradd import ORTModule

pytestmark = [pytest.mark.one_in(6), pytest.mark.usefixtures("shared_daemon")]
H, S = 4, 23


def _agree(wrapped: nn.Module, plain: nn.Module, **batch: torch.Tensor) -> None:
    results = []
    for model in (wrapped, plain):
        model.zero_grad()
        out = model(**batch)
        loss = getattr(out, "loss", out)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for own, want in zip(*results, strict=True):
        scale = float(want.abs().max().clamp(min=1e-6))
        torch.testing.assert_close(own / scale, want / scale, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("lengths", [(S, 9, 1), (S, S, 0)])
def test_relative_positions(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a sequence is nothing but padding."""
    monkeypatch.setenv("GRADD_LIVE_ROWS", "0")
    sizes = {"vocab_size": 50, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2}
    config = transformers.T5Config(**sizes, num_heads=H, dropout_rate=0.0, num_labels=7)
    plain = transformers.T5ForTokenClassification(config).train()
    wrapped = ORTModule(copy.deepcopy(plain), strict=True)
    gen = torch.Generator().manual_seed(1)
    batch = {
        "input_ids": torch.randint(2, 50, (3, S), generator=gen),
        "attention_mask": (torch.arange(S) < torch.tensor(lengths)[:, None]).long(),
        "labels": torch.randint(7, (3, S), generator=gen),
    }
    _agree(wrapped, plain, **batch)
    shapes = [tuple(r.shape) for r in wrapped.gradd_explain().rows if r.kind == "run"]
    assert (3, H, S, S) not in shapes
    assert (1, H, S, S) in shapes


class Masked(nn.Module):
    """Attention that is given a bias with a mask in it."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = fill
        self.table = nn.Parameter(torch.randn(1, H, S, S, generator=torch.manual_seed(2)))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        bias = torch.where(mask[:, None, None, :], self.table, self.fill)
        y = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=bias)
        return y.square().sum()


@pytest.mark.parametrize("fill", [-torch.inf, -1e35, -5.0])
def test_fills(fill: float) -> None:
    """One that counts beside scores is no mask; rows without a key are zero beside an infinity."""
    plain = Masked(fill)
    wrapped = ORTModule(copy.deepcopy(plain), strict=True)
    x = torch.randn(2, H, S, 16, generator=torch.manual_seed(3))
    mask = torch.arange(S) < torch.tensor([[9], [0 if fill == -5.0 else 1]])
    _agree(wrapped, plain, x=x, mask=mask)

"""Complex numbers in a forward run in the daemon as pairs, with the values of PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradd import ORTModule
from gradd.spec import CaptureError
from helpers.selection import one_in

pytestmark = pytest.mark.usefixtures("shared_daemon")


def _complex(x: Tensor) -> Tensor:
    """[B, T, 8] as [B, T, 4]."""
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))


def _turned(net: Net, x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[1], device=x.device)[:, None] * net.steps
    turn = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(_complex(x) * turn[None]).flatten(2)


FORMS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "rotary": _turned,
    "table": lambda net, x: torch.view_as_real(
        _complex(x) * net.table[: x.shape[1]].to(x.device)
    ).flatten(-2),
    "parts": lambda net, x: _complex(x).real * _complex(x).imag.exp(),
    "abs": lambda net, x: _complex(x).abs() + torch.complex(x, x * 2).abs()[..., :4],
    "conjugate": lambda net, x: (_complex(x) * _complex(x.tanh()).conj()).real,
    "sums": lambda net, x: torch.view_as_real(
        (_complex(x).sum(1) + _complex(x).mean((0, 1)) - _complex(x)[:, 0]).sum()
    ),
    "numbers": lambda net, x: torch.view_as_real(-(2 * _complex(x) / 3) * x[..., :4]),
    "views": lambda net, x: torch.view_as_real(
        _complex(x)[..., None, 1:3].unsqueeze(1).transpose(-1, 1).expand(-1, -1, -1, 2, 1)
    ).sum((1, 2)),
    "sizes": lambda net, x: torch.view_as_real(
        _complex(x).reshape(x.shape[0], -1).permute(1, 0).flatten().view(-1, 2)
    ),
    "together": lambda net, x: torch.view_as_real(
        torch.cat([_complex(x), torch.stack([_complex(x)[..., 0]] * 2, -1)], -1)
    ).square(),
}


class Net(nn.Module):
    def __init__(self, form: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.form = nn.Linear(8, 8), form
        steps = 1 / 10 ** torch.arange(0.0, 4)
        self.register_buffer("steps", steps)
        angles = torch.arange(9.0)[:, None] * steps
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, self.lin(x))


def _compare(ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    results = []
    for net in (ours, theirs):
        net.zero_grad()
        result = net(x)
        (result * torch.arange(1.0, result.numel() + 1).view(result.shape).sin()).sum().backward()
        results.append(result.detach())
    torch.testing.assert_close(*results)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", one_in(2, sorted(FORMS)))
def test_forms_of_complex_numbers(name: str) -> None:
    theirs = Net(FORMS[name])
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    for batch, length in ((2, 5), (3, 7), (2, 5)):
        _compare(ours, theirs, torch.randn(batch, length, 8))
    stats = ours.gradd_stats()
    assert stats["in_torch"] == {} and stats["captures"] == 1


@pytest.mark.quick
def test_a_rotary_embedding_beside_bf16() -> None:
    theirs = Net(lambda net, x: _turned(net, x.float()).type_as(x))
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    with torch.autocast("cpu", torch.bfloat16):
        results = [net(torch.ones(2, 5, 8)) for net in (ours, theirs)]
    assert results[0].dtype is results[1].dtype is torch.bfloat16
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


def test_what_has_no_form_is_cut_out_by_name() -> None:
    def form(net: Net, x: Tensor) -> Tensor:
        z = _complex(x)
        return torch.fft.fft(z * 2).real + (z * net.table[: x.shape[1]]).imag

    theirs = Net(form)
    ours = ORTModule(copy.deepcopy(theirs))
    for _ in range(2):
        _compare(ours, theirs, torch.randn(2, 5, 8))
    assert set(ours.gradd_stats()["in_torch"]) == {"unsupported_operator"}
    strict = ORTModule(copy.deepcopy(theirs), strict=True)
    with pytest.raises(CaptureError, match="computes with torch.complex64"):
        strict(torch.randn(2, 5, 8))

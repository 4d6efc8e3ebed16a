"""A long notebook session: many models, many kept outputs, many parameters, one daemon."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradd import ORTModule, errors
from gradd.optim import FusedAdam
from helpers import sessions
from helpers.nets import Net, assert_close, assert_same_grads, batch, loss_of

pytestmark = pytest.mark.usefixtures("daemon")
_LIMIT = 64  # of graphs in the daemon


def _wide(width: int) -> tuple[ORTModule, nn.Module]:
    return ORTModule(Net(width), strict=True), Net(width)


@pytest.mark.nightly  # eighty captures
def test_more_graphs_than_the_daemon_keeps(daemon: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    x, y = batch()
    first, expected = _wide(7)
    held = loss_of(first(x, y))  # its graph goes while the run is open
    for width in range(8, 10 + _LIMIT):
        loss_of(ORTModule(Net(width), strict=True)(x, y)).backward()
    held.backward()
    loss_of(expected(x, y)).backward()
    assert_same_grads(first, expected)
    assert_close(first(x[:3], y[:3])[0], expected(x[:3], y[:3])[0])  # needs another plan
    loss = loss_of(first(x, y))
    daemon.kill()
    for model in (first, expected):
        model.zero_grad()
    loss.backward()
    loss_of(expected(x, y)).backward()
    assert_same_grads(first, expected)


def test_many_kept_outputs_share_segments() -> None:
    layer = nn.Linear(8, 4096)
    model = ORTModule(layer, strict=True)
    inputs = [torch.randn(100, 8) for _ in range(3 * _LIMIT)]
    with torch.no_grad():
        kept = [model(x) for x in inputs]
        for x, output in zip(inputs, kept, strict=True):
            assert_close(output, layer(x))
    session = sessions.session()
    used = sum(t.numel() * 4 for t in kept)
    assert len(session.segment_ids()) < len(kept) // 4 and session.segment_bytes() < 2 * used


def test_the_state_of_many_parameters_shares_a_segment() -> None:
    torch.manual_seed(0)
    model = ORTModule(nn.Sequential(*[nn.Linear(8, 8) for _ in range(_LIMIT)]), strict=True)
    optimizer = FusedAdam(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    assert sum(not torch.equal(p, q) for p, q in zip(model.parameters(), before)) > _LIMIT
    assert len(sessions.session().segment_ids()) < 8


class Lookup(nn.Module):
    """Its first node has the name of the first node of a Net."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.table(index).sum()


def test_an_error_names_the_source_of_its_own_graph() -> None:
    ORTModule(Net(), strict=True)(*batch())
    lookup = ORTModule(Lookup(), strict=True)
    lookup(torch.tensor([3, 1]))
    with pytest.raises(
        errors.IndexOutOfRangeError, match="index 11 is out of range for size 10"
    ) as caught:
        lookup(torch.tensor([3, 11]))
    assert "test_many_models.py" in str(caught.value) and "nets.py" not in str(caught.value)

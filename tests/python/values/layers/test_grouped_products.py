"""Products of groups of rows: values and gradients of PyTorch, errors, and layers of experts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradd import ORTModule
from gradd.errors import IndexOutOfRangeError
from helpers.nets import assert_close, assert_same_grads

pytestmark = [
    pytest.mark.usefixtures("shared_daemon"),
    pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch has no grouped_mm"),
]


class Groups(nn.Module):
    """Weights [E, N, K], as layers keep them, or [E, K, N]; torch compiles bf16 alone."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turned = turned
        weights = torch.randn(3, 16, 8) if turned else torch.randn(3, 8, 16)
        self.weights = nn.Parameter(weights.bfloat16())

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        weights = self.weights.mT if self.turned else self.weights
        return F.grouped_mm(x, weights, offs=ends)


@pytest.mark.parametrize("turned", [True, False])
def test_groups_of_any_size(turned: bool) -> None:
    theirs = Groups(turned)
    model = ORTModule(copy.deepcopy(theirs), strict=True)
    for ends in ([2, 5, 9], [0, 0, 9], [4, 4, 4], [9, 9, 9]):
        x, last = torch.randn(9, 8).bfloat16(), ends[-1]
        offs = torch.tensor(ends, dtype=torch.int32)
        xs = [x.clone().requires_grad_() for _ in range(2)]
        for net, given in zip((model, theirs), xs, strict=True):
            net.zero_grad()
            net(given, offs)[:last].square().sum().backward()
        assert_same_grads(model.module, theirs)
        assert_close(xs[0].grad[:last], xs[1].grad[:last])
    assert model.gradd_stats()["captures"] == 1


def test_rows_behind_the_last_group_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch they are whatever the memory held, which no check can compare."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    model = ORTModule(Groups(False), strict=True)
    x = torch.randn(6, 8).bfloat16().requires_grad_()
    y = model(x, torch.tensor([1, 2, 4], dtype=torch.int32))
    y.sum().backward()
    assert not y[4:].any() and not x.grad[4:].any() and x.grad[:4].any()


@pytest.mark.parametrize(("ends", "group"), [([2, 1, 6], 1), ([2, 4, 7], 2), ([-1, 3, 6], 0)])
def test_ends_out_of_order_are_named(ends: list[int], group: int) -> None:
    model = ORTModule(Groups(False), strict=True)
    model(torch.randn(6, 8).bfloat16(), torch.tensor([2, 4, 6], dtype=torch.int32)).sum().backward()
    with pytest.raises(IndexOutOfRangeError, match=f"group {group} ends at row {ends[group]},"):
        model(torch.randn(6, 8).bfloat16(), torch.tensor(ends, dtype=torch.int32)).sum().backward()


def test_experts_of_transformers() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(1)
    config = MixtralConfig(
        **{"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 5},
    )
    theirs = MixtralForCausalLM(config)
    model = ORTModule(copy.deepcopy(theirs), strict=True)
    for length in (7, 9):
        ids = torch.randint(61, (2, length))
        for net in (model, theirs):
            net.zero_grad()
            net(input_ids=ids, labels=ids).loss.backward()
        assert_same_grads(model.module, theirs)

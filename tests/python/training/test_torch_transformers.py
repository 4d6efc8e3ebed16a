"""nn.Transformer and its parts with masks, which torch compares with the causal one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradd import ORTModule
from helpers.selection import every_run

pytestmark = pytest.mark.usefixtures("shared_daemon")
causal = nn.Transformer.generate_square_subsequent_mask


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def padding(length: int) -> Tensor:
    """[3, length]: the last two positions of the first row."""
    found = torch.zeros(3, length, dtype=torch.bool)
    found[0, -2:] = True
    return found


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Inside(nn.Module):
    """Makes the mask itself, and calls a decoder by place."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Tensor, memory: Tensor, pad: Tensor | None = None) -> Tensor:
        return self.decoder(x, memory, causal(x.shape[1]), None, pad)


class Own(nn.TransformerEncoder):
    """Has another forward, without a hint."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return x


def whole(model: nn.Module, i: int) -> Tensor:
    source, target = numbers(i, 3, 7, 16), numbers(i + 50, 3, 4 + i, 16)
    masks = {"src_mask": torch.zeros(7, 7, dtype=torch.bool), "tgt_mask": causal(4 + i)}
    masks |= {"src_key_padding_mask": padding(7), "tgt_key_padding_mask": padding(4 + i)}
    return model(source, target, memory_key_padding_mask=padding(7), **masks)


def own(model: nn.Module, i: int) -> Tensor:
    return model(numbers(i, 3, 7, 16), causal(7))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor]]] = {
    "whole": (lambda: nn.Transformer(16, 2, 2, 2, 32, 0.0, batch_first=True), whole),
    "mask": (encoder, lambda m, i: m(numbers(i, 3, 5 + i, 16), causal(5 + i))),
    "not causal": (
        encoder,
        lambda m, i: m(numbers(i, 3, 7, 16), mask=numbers(i, 7, 7), is_causal=None),
    ),
    "two kinds": (
        encoder,
        lambda m, i: m(numbers(i, 3, 7, 16), causal(7), src_key_padding_mask=padding(7)),
    ),
    "hint": (encoder, lambda m, i: m(numbers(i, 3, 7, 16), causal(7), None, True)),
    "inside": (Inside, lambda m, i: m(numbers(i, 3, 6, 16), numbers(i + 9, 3, 4, 16), padding(6))),
    "own forward": (lambda: Own(encoder().layers[0], 2), own),
}


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("name", every_run(("whole", "two kinds"), list(CASES)))
def test_masks_break_no_graph(name: str) -> None:
    make, call = CASES[name]
    torch.manual_seed(1)
    twin = make()
    plain: Any = copy.deepcopy(twin)
    model = ORTModule(twin, strict=True)
    for i in range(3):
        losses = [call(m, i).square().mean() for m in (plain, model)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[0], losses[1])
        for (name, p), q in zip(plain.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, atol=1e-5, rtol=1e-4, msg=name)
    stats = model.gradd_stats()
    assert stats["breaks"] == 0 and not stats["in_torch"]

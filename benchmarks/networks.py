"""Networks that are not of text, as workloads: pictures, sounds, recurrent layers and scans.

Modules of transformers in the sizes that their papers name, random weights; each has its loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

Batch = dict[str, torch.Tensor]


class Network(NamedTuple):
    """One of them.

    Attributes:
        what: Says it in a line.
        build: Returns the module and the batch.
        count: Rows of the batch, for throughput.
    """

    what: str
    build: Callable[[], tuple[nn.Module, Batch]]
    count: int


def network(name: str, quick: bool) -> Network:
    """That of a name.

    Args:
        name: One of NAMES.
        quick: With few layers and small inputs.
    """
    return _MAKERS[name](quick)


def _pictures(count: int, size: int) -> Batch:
    return {
        "pixel_values": torch.randn(count, 3, size, size),
        "labels": torch.randint(0, 10, (count,)),
    }


def _of_pictures(
    what: str, make: Callable[[bool], nn.Module], count: int
) -> Callable[[bool], Network]:
    def made(quick: bool) -> Network:
        rows, size = (2, 32) if quick else (count, 224)
        text = f"{what}, {rows} pictures of {size} x {size}"
        return Network(text, lambda: (make(quick), _pictures(rows, size)), rows)

    return made


def _resnet(quick: bool) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    small: dict[str, Any] = {"depths": [1, 1], "hidden_sizes": [16, 32], "embedding_size": 8}
    return ResNetForImageClassification(ResNetConfig(num_labels=10, **(small if quick else {})))


def _mobilenet(quick: bool) -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return MobileNetV2ForImageClassification(
        MobileNetV2Config(
            num_labels=10, classifier_dropout_prob=0.0, depth_multiplier=0.25 if quick else 1.0
        )
    )


def _convnext(quick: bool) -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    small: dict[str, Any] = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 16]}
    return ConvNextForImageClassification(ConvNextConfig(num_labels=10, **(small if quick else {})))


def _vit(quick: bool) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    small = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "image_size": 32,
    }
    return ViTForImageClassification(ViTConfig(num_labels=10, **(small if quick else {})))


def _whisper(quick: bool) -> Network:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    small = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "d_model": 36,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_source_positions": 50,
    }
    # The tiny one has four layers of each kind, as is the configuration's default.
    frames, rows, tokens = (100, 2, 8) if quick else (3000, 2, 64)

    def build() -> tuple[nn.Module, Batch]:
        module = WhisperForConditionalGeneration(WhisperConfig(**(small if quick else {})))
        return module, {
            "input_features": torch.randn(rows, 80, frames),
            "labels": torch.randint(0, 50257, (rows, tokens)),
        }

    return Network(f"Whisper-tiny, {rows} sounds of {frames // 100} s", build, rows)


class Recurrent(nn.Module):
    """Two layers of LSTM, and the mean square of their results as a loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.LSTM(width, width, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        """(loss,) of (rows, steps, width)."""
        return (self.layers(x)[0].square().mean(),)


def _lstm(quick: bool) -> Network:
    rows, steps, width = (2, 5, 16) if quick else (32, 128, 512)
    text = f"two layers of LSTM of {width}, {rows} x {steps}"
    return Network(text, lambda: (Recurrent(width), {"x": torch.randn(rows, steps, width)}), rows)


def _mamba(quick: bool) -> Network:
    from transformers import MambaConfig, MambaForCausalLM

    small = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 100}
    # The smallest published one has 24 layers of 768, which 32 is not.
    large = {"hidden_size": 768, "num_hidden_layers": 24}
    rows, steps = (2, 16) if quick else (4, 512)

    def build() -> tuple[nn.Module, Batch]:
        module = MambaForCausalLM(MambaConfig(use_cache=False, **(small if quick else large)))
        ids = torch.randint(0, 100, (rows, steps))
        return module, {"input_ids": ids, "labels": ids.clone()}

    return Network(f"Mamba-130M, {rows} x {steps}", build, rows)


_MAKERS: dict[str, Callable[[bool], Network]] = {
    "resnet50": _of_pictures("ResNet-50", _resnet, 16),
    "mobilenet": _of_pictures("MobileNetV2", _mobilenet, 16),
    "convnext": _of_pictures("ConvNeXt-T", _convnext, 8),
    "vit": _of_pictures("ViT-B/16", _vit, 8),
    "whisper": _whisper,
    "lstm": _lstm,
    "mamba": _mamba,
}
NAMES = tuple(_MAKERS)

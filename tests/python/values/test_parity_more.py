"""Models and tasks beyond the list of families that needed something of their own.

T5's attention (a bias with a gradient, a result that is copied), question answering (an ignored
label that is a size), an encoder of torch.nn, and pictures, whose sizes are constants.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradd import ORTModule
from gradd.spec import CaptureError
from helpers.graphs.captures import capture
from helpers.parity import steps

pytestmark = pytest.mark.usefixtures("shared_daemon")

VOCAB = 64
STEPS = 3


def _ids(rows: int, length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (rows, length), generator=generator)


def _compare(model: nn.Module, make: object) -> None:
    first = [make(2, 8, seed) for seed in range(STEPS)]
    steps.run(model.train(), first, [make(1, 11, 50), make(3, 6, 51)])


@pytest.mark.nightly
def test_t5() -> None:
    import transformers

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(
        vocab_size=VOCAB, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, **sizes
    )
    torch.manual_seed(0)

    def make(rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
        ids = _ids(rows, length, seed)
        mask = torch.ones_like(ids)
        mask[1::2, -2:] = 0
        labels = _ids(rows, length + 3, seed + 100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    _compare(transformers.T5ForConditionalGeneration(config), make)


def test_question_answering() -> None:
    import transformers

    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        **off,
    )
    torch.manual_seed(1)

    def make(rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
        start = torch.arange(rows) % length
        end = start + 2
        if rows > 1:
            end[-1] = length + 5  # cut off by truncation: ignored
        ids = _ids(rows, length, seed)
        return {"input_ids": ids, "start_positions": start, "end_positions": end}

    _compare(transformers.BertForQuestionAnswering(config), make)


class Encoder(nn.Module):
    """torch's own encoder, batch first, with a classifier on the mean."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.outer = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.outer(self.inner(x).mean(1))
        return nn.functional.cross_entropy(scores, y), scores


def test_transformer_encoder_of_torch() -> None:
    def make(rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
        x = torch.randn(rows, length, 16, generator=torch.Generator().manual_seed(seed))
        return {"x": x, "y": torch.arange(rows) % 3}

    torch.manual_seed(0)
    _compare(Encoder(), make)


class Windows(nn.Module):
    """Cuts pictures into windows, as Swin does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3 * 4 * 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, colours, height, width = x.shape
        x = x.view(rows, colours, height // 4, 4, width // 4, 4).permute(0, 2, 4, 1, 3, 5)
        return self.inner(x.reshape(rows, -1, colours * 16)).square().mean()


def test_pictures_keep_their_size_and_batches_do_not() -> None:
    torch.manual_seed(0)
    model = ORTModule(Windows(), strict=True)
    for shape in ((2, 3, 8, 12), (5, 3, 8, 12), (7, 3, 8, 12)):
        x = torch.randn(shape)
        torch.testing.assert_close(model(x), model.module(x), rtol=1e-5, atol=1e-6)
    assert model.gradd_stats()["captures"] == 1
    x = torch.randn(2, 3, 16, 4)
    torch.testing.assert_close(model(x), model.module(x), rtol=1e-5, atol=1e-6)
    stats = model.gradd_stats()
    assert stats["captures"] == 2 and stats["fallbacks"] == {}


@pytest.mark.nightly
def test_swin_is_captured_or_refused_by_name() -> None:
    """Within the time limit of a test: its windows make many nodes."""
    import transformers

    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4
    )
    model = transformers.SwinForImageClassification(config)
    try:
        capture(model, (), {"pixel_values": torch.randn(2, 3, 32, 32)})
    except CaptureError as error:
        assert error.reason

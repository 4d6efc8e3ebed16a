"""BERT-Large pre-training (masked language model, next sentence), with ORTTrainer.

    .venv/bin/python samples/bert_pretraining.py [--size full] [--steps 10] [--plain] [--force]

Weights are random and sentences synthetic. `--size full` is BERT-Large (335 million parameters) at
the first phase's length of 128 tokens.
"""

from __future__ import annotations

import sys

import torch
from common import Size, main
from transformers import BertConfig, BertForPreTraining

SIZES = {
    "small": Size(4, 256, 1024, 4, 8192, 8, 128),
    "full": Size(24, 1024, 4096, 16, 30522, 8, 128, dropout=0.1),
}
CLS, SEP, MASK, FIRST_WORD = 1, 2, 3, 4
IGNORED = -100  # a label that the loss leaves out


def build(size: Size) -> BertForPreTraining:
    """The model with both heads."""
    return BertForPreTraining(
        BertConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            intermediate_size=size.inner,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            max_position_embeddings=512,
            hidden_dropout_prob=size.dropout,
            attention_probs_dropout_prob=size.dropout,
        )
    )


class Rows(torch.utils.data.Dataset):
    """Pairs of sentences that count upwards; half of the second ones go on where the first ends.

    15 % of the words carry a label; most of these are replaced by [MASK], some by another word.
    """

    def __init__(self, size: Size, count: int) -> None:
        self._size, self._count = size, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        draw = torch.Generator().manual_seed(index)
        words = self._size.vocabulary - FIRST_WORD
        half = self._size.tokens // 2 - 1
        start, step, other = torch.randint(1, words, (3,), generator=draw).tolist()
        step = 1 + step % 7
        follows = index % 2 == 0
        first = start + step * torch.arange(half - 1)
        second = (start + step * (half - 1) if follows else other) + step * torch.arange(half)
        first, second = (FIRST_WORD + part % words for part in (first, second))
        end = torch.tensor([SEP])
        ids = torch.cat([torch.tensor([CLS]), first, end, second, end])
        is_word = ids >= FIRST_WORD
        chance = torch.rand(len(ids), generator=draw)
        labels = torch.where(is_word & (chance < 0.15), ids, IGNORED)
        drawn = torch.randint(FIRST_WORD, self._size.vocabulary, ids.shape, generator=draw)
        ids = torch.where(is_word & (chance < 0.015), drawn, ids)
        return {
            "input_ids": torch.where(is_word & (chance >= 0.015) & (chance < 0.135), MASK, ids),
            "token_type_ids": (torch.arange(len(ids)) > half).long(),
            "attention_mask": torch.ones_like(ids),
            "labels": labels,
            "next_sentence_label": torch.tensor(0 if follows else 1),
        }


if __name__ == "__main__":
    main(sys.modules[__name__])

"""`ORTSeq2SeqTrainer`: Seq2SeqTrainer (generation in evaluate and predict) on top of ORTTrainer."""

from __future__ import annotations

from transformers import Seq2SeqTrainer

from .trainer import ORTTrainer


class ORTSeq2SeqTrainer(ORTTrainer, Seq2SeqTrainer):
    """Drop-in replacement of `transformers.Seq2SeqTrainer`; generation runs in PyTorch."""

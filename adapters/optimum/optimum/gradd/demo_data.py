"""Text, tokenizer and model of the demo: the sources of the running Python's standard library.

Everything is made on the spot and nothing is downloaded. The same seed gives the same blocks and
the same initial weights in every process that calls this.
"""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch

SEED = 1234
VOCABULARY = 4096
BLOCK = 128  # tokens per sample
_SKIP = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "turtledemo"}


def read_corpus(limit: int) -> list[str]:
    """Source files of the standard library in a fixed shuffled order, up to `limit` characters."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if not _SKIP & set(p.relative_to(root).parts))
    random.Random(SEED).shuffle(files)
    texts, total = [], 0
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        texts.append(text)
        total += len(text)
        if total >= limit:
            break
    if total < 200_000:
        raise SystemExit(f"demo: only {total} characters of Python source under {root}")
    return texts


def train_tokenizer(texts: list[str]) -> Any:
    """A byte-level byte-pair tokenizer of VOCABULARY entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<file>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Any, texts: list[str]) -> np.ndarray:
    """All files as one row of token ids, each opened by the token <file>."""
    start = tokenizer.token_to_id("<file>")
    rows: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        rows.append(start)
        rows.extend(encoding.ids)
    return np.asarray(rows, dtype=np.uint16)


class Blocks(torch.utils.data.Dataset):
    """Consecutive blocks of BLOCK tokens; every token is a label."""

    def __init__(self, tokens: np.ndarray) -> None:
        count = len(tokens) // BLOCK
        self._rows = torch.from_numpy(tokens[: count * BLOCK].astype(np.int64)).view(count, BLOCK)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def build_model() -> Any:
    """A Llama of about 11 million parameters with random weights, always the same ones."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
            attention_dropout=0.0,
        )
    )

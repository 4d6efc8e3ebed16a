"""Llama-2-7B fine-tuning with LoRA (PEFT), with ORTTrainer.

    .venv/bin/python samples/llama_lora.py [--size full] [--steps 10] [--plain] [--force]

Weights are random and instructions synthetic. `--size full` has the sizes of Llama-2-7B in bf16;
the base is frozen, and LoRA of rank 8 on queries and values is trained.
"""

from __future__ import annotations

import sys

import torch
from common import Size, main
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "small": Size(4, 256, 688, 4, 8192, 4, 128),
    "full": Size(32, 4096, 11008, 32, 32000, 1, 512, torch.bfloat16),
}
IGNORED = -100  # a label that the loss leaves out


def build(size: Size) -> PeftModel:
    """The frozen base and trained adapters, made in their precision from the start."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(size.dtype)
    try:
        base = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=size.vocabulary,
                hidden_size=size.hidden,
                intermediate_size=size.inner,
                num_hidden_layers=size.layers,
                num_attention_heads=size.heads,
                max_position_embeddings=4096,
                use_cache=False,
            )
        )
        config = LoraConfig(
            r=8,
            lora_alpha=16,
            lora_dropout=size.dropout,
            target_modules=["q_proj", "v_proj"],
            task_type="CAUSAL_LM",
        )
        return get_peft_model(base, config, autocast_adapter_dtype=False)
    finally:
        torch.set_default_dtype(before)


class Rows(torch.utils.data.Dataset):
    """Instructions and answers: numbers, and the same numbers in the opposite order.

    Only the answers carry labels.
    """

    def __init__(self, size: Size, count: int) -> None:
        self._size, self._count = size, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        draw = torch.Generator().manual_seed(index)
        half = self._size.tokens // 2
        asked = torch.randint(3, min(self._size.vocabulary, 64), (half,), generator=draw)
        ids = torch.cat([asked, asked.flip(0)])
        labels = torch.where(torch.arange(len(ids)) < half, IGNORED, ids)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


if __name__ == "__main__":
    main(sys.modules[__name__])

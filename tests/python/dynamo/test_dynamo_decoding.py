"""Decoding with a cache of keys and values: in PyTorch, said once, without a graph per token."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gradd import ORTModule

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def _loop(model: Any, ids: torch.Tensor, n: int) -> torch.Tensor:
    """Greedy decoding by hand."""
    model.eval()
    out = model(input_ids=ids, use_cache=True)
    for _ in range(n):
        last = out.logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, last], 1)
        out = model(input_ids=last, past_key_values=out.past_key_values, use_cache=True)
    return ids


@pytest.mark.parametrize("strict", [False, True])
def test_decoding_runs_in_pytorch(
    shared_daemon: Any, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    ids = torch.randint(1, 64, (2, 7))
    with torch.no_grad():
        expected = _loop(model, ids, 12)
    generated = model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    wrapped = ORTModule(model, strict=strict)
    with caplog.at_level(logging.WARNING, "gradd"), torch.no_grad():
        assert torch.equal(_loop(wrapped, ids, 12), expected)
        again = wrapped.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    assert torch.equal(again, generated)
    stats = wrapped.gradd_stats()
    assert stats["captures"] == 1  # of the prompt
    assert stats["fallbacks"] == {"decoding": 13}
    assert sum("decoding" in record.getMessage() for record in caplog.records) == 1
    wrapped.train()
    wrapped(input_ids=ids, labels=ids).loss.backward()
    assert wrapped.gradd_stats()["fallbacks"] == {"decoding": 13}

"""Llamas of real shapes in bf16 with random weights, for machines with a GPU.

    llama.py capture SHAPE FILE   write what gradd captures of it, as ONNX
    llama.py attention SHAPE      time PyTorch's attention alone
    llama.py eager SHAPE          time transformers' forward and backward on `cuda`
    llama.py compile SHAPE        the same by torch.compile

SHAPE is `1b`, Llama-3.2-1B, or `8b`, two layers of Llama-3.1-8B with a tied head. Times are lines
of JSON: milliseconds, tokens per second, and memory of the process in GiB.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

VOCABULARY, HEADS, KV_HEADS = 128256, 32, 8
SHAPES = {"1b": (16, 2048, 8192, 64), "8b": (2, 4096, 14336, 128)}  # layers, hidden, inner, head
SIZES = ((1, 2048), (4, 2048))  # rows, tokens of a row


def build(shape: str, device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, hidden, inner, head = SHAPES[shape]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=head,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.set_default_dtype(torch.bfloat16)  # never a second copy in f32
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(torch.float32)


def capture(shape: str, to: Path) -> None:
    from gradd import DebugOptions, ORTModule

    options = DebugOptions(save_onnx=True, onnx_prefix=str(to.with_suffix("")))
    model = ORTModule(build(shape, "cpu"), options, strict=True)
    ids = torch.randint(3, 1000, (2, 24))
    model(input_ids=ids, labels=ids.clone())
    (made,) = to.parent.glob(f"{to.stem}_torch_exported_*.onnx")
    made.rename(to)


def timed(work: Any, rounds: int = 5) -> float:
    """Milliseconds, the shortest of some rounds behind two to warm up."""
    best = float("inf")
    for i in range(rounds + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if i >= 2:
            best = min(best, time.perf_counter() - began)
    return best * 1e3


def time_models(shape: str, engine: str) -> None:
    model = build(shape, "cuda")
    run = torch.compile(model) if engine == "compile" else model
    for rows, length in SIZES:
        ids = torch.randint(3, VOCABULARY, (rows, length), device="cuda")
        torch.cuda.reset_peak_memory_stats()

        def step(ids: torch.Tensor = ids) -> None:
            model.zero_grad(set_to_none=True)
            run(input_ids=ids, labels=ids).loss.backward()

        ms = timed(step)
        peak = torch.cuda.max_memory_allocated() / 2**30
        tell(engine, f"{rows}x{length}", ms, tokens_per_s=rows * length / ms * 1e3, peak_gib=peak)
    if engine == "eager":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        tell("AdamW fused, moments in bf16", "all parameters", timed(optimizer.step))


def time_attention(shape: str) -> None:
    """scaled_dot_product_attention as PyTorch chooses it, causal, grouped keys."""
    size = SHAPES[shape][-1]
    for rows, length in SIZES:
        shapes = [(rows, heads, length, size) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        q, k, v = (
            torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes
        )

        def forward(q: Any = q, k: Any = k, v: Any = v) -> torch.Tensor:
            attention = torch.nn.functional.scaled_dot_product_attention
            return attention(q, k, v, is_causal=True, enable_gqa=True)

        def both(forward: Any = forward) -> None:
            out = forward()
            out.backward(out.detach())

        tell("SDPA forward", f"{rows}x{length}", timed(forward))
        tell("SDPA forward and backward", f"{rows}x{length}", timed(both))


def tell(what: str, size: str, ms: float, **more: float) -> None:
    figures = {"ms": ms} | more
    print(json.dumps({"what": what, "size": size} | {k: round(v, 2) for k, v in figures.items()}))


def main() -> None:
    """What the first argument names."""
    what, shape, *more = sys.argv[1:]
    if what == "capture":
        capture(shape, Path(more[0]))
    elif what == "attention":
        time_attention(shape)
    else:
        time_models(shape, what)


if __name__ == "__main__":
    main()

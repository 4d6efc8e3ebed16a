"""Llamas of real shapes in bf16 with random weights, for machines with a GPU.

    llama.py capture SHAPE FILE   write what gradd captures of it, as ONNX
    llama.py graph SHAPE SIZE FILE  write a graph of attention alone, for SIZE = ROWSxTOKENS
    llama.py attention SHAPE      time PyTorch's attention alone

SHAPE is one of shapes.py. Times are lines of JSON, in milliseconds.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from shapes import SHAPES, SIZES


def build(name: str, device: str | torch.device) -> Any:
    """A Llama in bf16 with random weights, in train mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SHAPES[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head,
        max_position_embeddings=131072,
        tie_word_embeddings=shape.tied,
        use_cache=False,
    )
    torch.set_default_dtype(torch.bfloat16)  # never a second copy in f32
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(torch.float32)


def capture(shape: str, to: Path) -> None:
    """What the daemon would be given."""
    from gradd import DebugOptions, ORTModule

    options = DebugOptions(save_onnx=True, onnx_prefix=str(to.with_suffix("")))
    model = ORTModule(build(shape, "cpu"), options, strict=True)
    ids = torch.randint(3, 1000, (2, 24))
    model(input_ids=ids, labels=ids.clone())
    (made,) = to.parent.glob(f"{to.stem}_torch_exported_*.onnx")
    made.rename(to)
    for plan in to.parent.glob(f"{to.stem}_execution_model_*.onnx"):
        plan.unlink()


def graph(name: str, size: str, to: Path) -> None:
    """Causal attention with grouped keys and the mean of its result, of three inputs."""
    import onnx
    from onnx import TensorProto, helper

    shape, (rows, length) = SHAPES[name], map(int, size.split("x"))
    inputs = [
        helper.make_tensor_value_info(part, TensorProto.BFLOAT16, [rows, heads, length, shape.head])
        for part, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads))
    ]
    nodes = [
        helper.make_node("Attention", ["q", "k", "v"], ["y"], is_causal=1),
        helper.make_node("ReduceMean", ["y"], ["mean"], keepdims=0),
    ]
    result = helper.make_tensor_value_info("mean", TensorProto.BFLOAT16, [])
    made = helper.make_graph(nodes, "attention", inputs, [result])
    opset = helper.make_opsetid("", 23)
    onnx.save(helper.make_model(made, opset_imports=[opset], ir_version=10), str(to))


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


def time_attention(name: str) -> None:
    """scaled_dot_product_attention as PyTorch chooses it, causal, grouped keys."""
    shape = SHAPES[name]
    for rows, length in SIZES:
        counts = (shape.heads, shape.kv_heads, shape.kv_heads)
        shapes = [(rows, heads, length, shape.head) for heads in counts]
        q, k, v = (
            torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes
        )

        def forward(q: Any = q, k: Any = k, v: Any = v) -> torch.Tensor:
            attention = torch.nn.functional.scaled_dot_product_attention
            return attention(q, k, v, is_causal=True, enable_gqa=True)

        def both(forward: Any = forward) -> None:
            out = forward()
            out.backward(out.detach())

        there, back = timed(forward), timed(both)
        print(
            json.dumps(
                {
                    "shape": name,
                    "size": f"{rows}x{length}",
                    "forward_ms": round(there, 4),
                    "backward_ms": round(back - there, 4),
                }
            )
        )


def main() -> None:
    """What the first argument names."""
    what, shape, *more = sys.argv[1:]
    if what == "capture":
        capture(shape, Path(more[0]))
    elif what == "graph":
        graph(shape, more[0], Path(more[1]))
    else:
        time_attention(shape)


if __name__ == "__main__":
    main()

"""Whether the table of edges reaches every operation that has a translation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_edges import TABLE
from torch.onnx._internal.exporter import _core

from gradd import private
from gradd.graph.translation import stock
from gradd.spec import CaptureError
from helpers.edges import rows
from helpers.graphs import captures

# What no row reaches, by reason: patterns of the name behind "aten.".
UNREACHED = {
    "random numbers, which test_dropout*.py and test_selfcheck.py compare": (
        "bernoulli.*|uniform|rand.*|normal.*|multinomial.default|native_dropout.default"
    ),
    "torch makes these only where it takes others apart, which are translated whole": (
        "_log_softmax|_softmax|_native_batch_norm_legit(_functional)?|_prelu_kernel|_unsafe_.*|"
        "native_.*_norm|nll_loss_forward|constant_pad_nd|alias|hardtanh_backward|_linalg_det|"
        "view_copy|view_as_.*_copy|unsafe_split.Tensor|reflection_pad.d|replication_pad.d|"
        "max_pool3d_with_indices|grid_sampler_.d|embedding_bag|upsample_.*|_upsample_.*|embedding_renorm|"
        "_scaled_dot_product_.*_attention.*|empty_strided|new_empty.*|linalg_det|_unique|"
        "_adaptive_avg_pool.d|_pdist_forward|_safe_softmax|squeeze.dim|nll_loss"
    ),
    "Python's numbers arrive as the overload for tensors": (
        "(divide|multiply|subtract|true_divide).Scalar|div.Scalar_mode|.*Scalar_Tensor|"
        "bitwise_.*|__(and|or|xor|lshift|rshift)__.*|(mul|eq|ne|std_mean|split).default|tensor.*|"
        "searchsorted.Scalar"
    ),
    "the tracer writes them in another form": (
        "to.device|to.dtype_layout|.*_window.*|sym_storage_offset|conj|_conj|resolve_.*|addcdiv|"
        "atleast_.d.Sequence|einsum|split.Tensor|lift_fresh_copy"
    ),
    "the sizes or the Python code depend on values: refused before a translation": (
        "_local_scalar_dense|equal|allclose|is_nonzero|nonzero|repeat_interleave.Tensor|"
        "_unique2|unique_dim|unique_consecutive|bincount"
    ),
    "those of test_packed_sequences.py and test_grouped_products.py": (
        "(gru|lstm|rnn_relu|rnn_tanh).data|_grouped_mm"
    ),
    "layers that are refused by name (test_fallback.py, row_notes.REFUSED)": (
        "_embedding_bag.*|_fft_.*|native_batch_norm"
    ),
}
_ALLOWED = re.compile("|".join(f"({p})" for p in UNREACHED.values()))


def _translated() -> set[str]:
    """Names of the registered overloads as a graph shows them."""
    names = set()
    whole = private.ONNXRegistry.from_torchlib(stock.OPSET)
    for target in {*whole.functions, *stock.own()}:
        if not isinstance(target, str) or target.startswith("onnx_symbolic"):
            continue  # Python's own operators on sizes
        name = target.replace("::", ".")
        names.add(name if name.count(".") > 1 else f"{name}.default")
    return names


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Names of the operations that captures hand to the translation."""
    found: set[str] = set()
    real = _core._exported_program_to_onnx_program

    def spy(program: Any, **options: Any) -> Any:
        nodes = (
            n for m in program.graph_module.modules() if hasattr(m, "graph") for n in m.graph.nodes
        )
        found.update(str(n.target) for n in nodes if n.op == "call_function")
        return real(program, **options)

    monkeypatch.setattr(_core, "_exported_program_to_onnx_program", spy)
    yield found


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_translation_is_in_the_table(reached):
    for row in TABLE.values():
        for decomposed in (False, True):
            try:
                args = tuple(rows.arguments(row, "ordinary", torch.float32))
                captures.capture(rows.Alone(row, decomposed), args)
            except CaptureError:
                pass  # test_edges.py knows which
    missing = {n.removeprefix("aten.") for n in _translated() - reached if n.startswith("aten.")}
    missing = {
        n
        for n in missing
        if not _ALLOWED.fullmatch(n) and not _ALLOWED.fullmatch(n.removesuffix(".default"))
    }
    assert not missing

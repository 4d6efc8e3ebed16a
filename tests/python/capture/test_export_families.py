"""Every model family of the parity list: results and gradients of the graph against torch."""

from __future__ import annotations

import models
import pytest
from captured import assert_same
from selection import by_mark, every_run

from gradd import export

WAVE = """
    Add And Attention
    Cast Concat Cos CumSum Div Dropout Equal Expand Gather GatherElements GatherND Gelu
    Gemm Greater GreaterOrEqual LayerNormalization LeakyRelu LessOrEqual Log LogSoftmax MatMul
    Max Mul Neg NegativeLogLikelihoodLoss Not Pad Pow Range Reciprocal ReduceMean Relu Reshape
    Shape Sigmoid Sin Slice Softmax SoftmaxCrossEntropyLoss Softplus Split Sqrt Squeeze Sub
    Tanh Transpose Unsqueeze Where com.gradd::CheckIndex com.gradd::StopGradient
    com.gradd::WithSlope
"""
NAMES = [*models.FAMILIES, *(f"{n}_nomask" for n in ("llama", "gpt2", "mistral", "bert_mlm"))]


EVERY_RUN = ("llama", "gpt2_nomask", "bert_cls")  # the daemon's parity tests have the others


@pytest.mark.parametrize("name", by_mark(models.MLPS, EVERY_RUN, NAMES))
def test_family(name):
    module, make_batch = models.build(name)
    cap = assert_same(module, (), make_batch(3, 12, 1))
    assert set(export.op_histogram(cap)) <= set(WAVE.split())
    trainable = {n for n, p in module.named_parameters()}
    assert set(cap.params) <= trainable
    assert_same(module, (), make_batch(4, 17, 2), cap=cap, ort=False)


@pytest.mark.parametrize("name", every_run(("gpt2",), ["llama", "gpt2", "bert_cls"]))
def test_family_with_one_row(name):
    """A capture of its own; the daemon's parity tests have it for every family."""
    module, make_batch = models.build(name)
    assert_same(module, (), make_batch(1, 6, 2), ort=False)


@pytest.mark.parametrize("name", every_run(("gpt2",), ["llama", "gpt2", "bert_cls"]))
def test_family_in_eval_mode(name):
    module, make_batch = models.build(name)
    assert_same(module.eval(), (), make_batch(2, 9, 1))


@pytest.mark.parametrize(
    ("name", "over", "count"),
    [
        ("gpt2", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}, 7),
        pytest.param(
            "bert_cls",
            {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
            8,
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_every_dropout_survives(name, over, count):
    module, make_batch = models.build(name, **over)
    cap = export.capture(module, (), make_batch(2, 6, 0))
    found = export.op_histogram(cap)
    assert found["Dropout"] + found["com.gradd::Attention"] == count
    found = export.op_histogram(export.capture(module.eval(), (), make_batch(2, 6, 0)))
    assert found["Attention"] and not {"Dropout", "com.gradd::Attention"} & found.keys()


@pytest.mark.parametrize("reentrant", every_run((True,), [False, True]))
def test_checkpointing_gives_the_plain_graph(reentrant):
    module, make_batch = models.build("llama")
    plain = export.capture(module, (), make_batch(2, 6, 0)).onnx
    module.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert export.capture(module, (), make_batch(2, 6, 0)).onnx == plain

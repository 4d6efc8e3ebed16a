"""The translation of a graph of Dynamo: weightless, repeatable, named, and nothing is lost.

An exporter that loses an epsilon, a dropout or the end of a gradient gives values that look right.
Values and gradients are those of PyTorch's own operators on the graph (onnx_eval).
"""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable

import onnx
import pytest
import torch
from conftest import PYTHONPATH
from torch import nn
from torch.nn import functional as F

from gradd.spec import CaptureError
from helpers.graphs import torch_evaluator
from helpers.graphs.captures import Captured, Lambda, capture
from helpers.models import families
from helpers.selection import every_run

pytestmark = pytest.mark.one_in(4)


def captured(module: nn.Module, *args: torch.Tensor) -> Captured:
    """The graph of a loss, whose value and gradients are the module's."""
    made = capture(module, args)
    module.zero_grad()
    loss = torch_evaluator.evaluate(made.cap.onnx, made.values)[made.loss]
    loss.backward()
    want = module(*args)
    want.backward()
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    for name, p in module.named_parameters():
        if p.grad is not None and p.grad.any():
            torch.testing.assert_close(made.values[name].grad, p.grad, rtol=1e-4, atol=1e-5)
    return made


def linear(forward: Callable, **parts: nn.Module) -> nn.Module:
    """A module with a layer."""
    return Lambda(forward, lin=nn.Linear(4, 4), **parts)


# ---- the bytes, and their description ----


def test_llama_has_all_parameters_and_no_weights() -> None:
    module, make_batch = families.build("llama")
    batch = make_batch(3, 12, 0)
    cap = capture(module, (), batch).cap
    assert set(cap.params) == {n for n, _ in module.named_parameters()}
    model = onnx.ModelProto.FromString(cap.onnx)
    assert sum(t.ByteSize() for t in model.graph.initializer) < 8192
    given = [i.name for i in cap.inputs]
    assert [i.name for i in model.graph.input] == [*given, *cap.params, *cap.buffers]
    assert {o.domain: o.version for o in model.opset_import} == {"": 23, "com.gradd": 1}
    assert not model.graph.value_info and not model.metadata_props and not model.functions
    assert all(not n.metadata_props and not n.doc_string for n in model.graph.node)
    frequencies = {"model.rotary_emb.inv_freq"}  # a small buffer
    assert {*given, *cap.buffers} == {*batch, *frequencies} and "labels" in batch
    assert [o.name for o in cap.outputs] == ["loss", "logits"]
    assert cap.loss_leaf == 0 and cap.loss_ancestors == {1}
    places = dict(cap.sources)
    names = {n.name for n in model.graph.node}
    assert set(places) <= names and len(places) > len(names) // 2
    assert any(p.startswith("model.layers.1.self_attn") for p in places.values())
    assert any("modeling_llama.py:" in p for p in places.values())


_SCRIPT = """
import hashlib
from helpers.graphs.captures import capture
from helpers.models import families
module, make_batch = families.build("gemma3", seed=9)
data = capture(module, (), make_batch(2, 7, 5)).cap.onnx
print(hashlib.sha256(data).hexdigest())
"""


def test_bytes_are_the_same_in_every_process() -> None:
    """Other weights, other sizes, other hash seeds: Gemma-3 iterates over a set of strings."""
    module, make_batch = families.build("gemma3", seed=1)
    here = hashlib.sha256(capture(module, (), make_batch(3, 12, 0)).cap.onnx).hexdigest()
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT]
    # This process has another seed.
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONHASHSEED": "1"}
    text = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert text.stdout.split()[-1] == here


def test_parameters_with_one_memory_are_two_and_tied_ones_are_one() -> None:
    module = Lambda(lambda s, x: (s.a(x) + s.b(x)).mean(), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    module.b.bias = module.a.bias
    module.b.weight.data = module.a.weight.data
    cap = capture(module, (torch.randn(3, 4),)).cap
    assert sorted(cap.params) == ["a.bias", "a.weight", "b.weight"]


def test_unused_inputs_and_parameters_are_left_out() -> None:
    module = linear(lambda s, x, y: s.lin(x).mean(), other=nn.Linear(4, 4))
    made = capture(module, (torch.randn(3, 4), torch.randn(3, 4)))
    assert [i.name for i in made.cap.inputs] == ["x"] or len(made.cap.inputs) == 1
    assert sorted(made.cap.params) == ["lin.bias", "lin.weight"]


@pytest.mark.parametrize("reentrant", every_run((True,), [False, True]))
def test_checkpointing_gives_the_plain_graph(reentrant: bool) -> None:
    module, make_batch = families.build("llama")
    plain = capture(module, (), make_batch(2, 6, 0)).operators
    module.gradient_checkpointing_enable({"use_reentrant": reentrant})
    made = capture(module, (), make_batch(2, 6, 0))
    assert made.cap.checkpoints and made.operators == plain


# ---- numbers and weights ----


def test_weights_of_equal_value_are_all_inputs() -> None:
    """No weight folded away, none merged with an equal one."""

    def forward(self, x):
        for norm in (self.a, self.b, self.c):
            x = F.linear(norm(x), self.w)
        return x.square().mean()

    norms = {name: nn.LayerNorm(6) for name in "abc"}
    made = captured(Lambda(forward, w=nn.Parameter(torch.eye(6) + 0.1), **norms), torch.randn(4, 6))
    assert len(made.cap.params) == 7
    assert all(math.prod(t.dims) <= 8 for t in made.graph.initializer), "a weight is a constant"


@pytest.mark.parametrize(
    ("forward", "kept"),
    [
        (lambda self, x: (x / (x.square().sum(-1, True) + 1e-9) * self.w).sum(), "Add"),
        (lambda self, x: (x * torch.rsqrt(x.square().mean(-1, True) + 1e-8) * self.w).sum(), "Add"),
        (lambda self, x: ((x - 1e-8) * 1e8 * self.w).sum(), "Sub"),
        (lambda self, x: ((x * 1.000009 - x) * 1e5 * self.w).sum(), "Mul"),
        (lambda self, x: ((x / 1.000009 - x) * 1e5 * self.w).sum(), "Div"),
    ],
)
def test_constants_near_zero_or_one_are_kept(forward: Callable, kept: str) -> None:
    """The stock optimizer takes 1e-8 for 0: an epsilon is lost, and a row of zeros becomes NaN."""
    x = torch.randn(4, 6)
    if kept == "Add":
        x[1] = 0
    if kept == "Sub":
        x *= 1e-8
    assert kept in captured(Lambda(forward, w=nn.Parameter(torch.randn(6))), x).operators


def test_exact_zeros_and_ones_still_go() -> None:
    module = Lambda(
        lambda self, x: ((x + 0.0) * 1.0 / 1.0 - 0.0).mul(self.w).sum(),
        w=nn.Parameter(torch.randn(6)),
    )
    made = captured(module, torch.randn(4, 6))
    assert [node.op_type for node in made.graph.node] == ["Mul", "ReduceSum"]


# ---- what travels as one operator ----

_MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.tensor([[True, False, True], [False] * 3, [True] * 3])},
    "float": {"attn_mask": torch.linspace(-2, 2, 9).reshape(3, 3)},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("mask", _MASKS)
@pytest.mark.parametrize("rank", [3, 4])
def test_attention_is_one_node(mask: str, rank: int) -> None:
    """The boolean mask has a row without any key: zeros, not NaN."""

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, **_MASKS[mask]).square().mean()

    x = torch.randn(*(2, 4, 3, 8)[4 - rank :])
    found = captured(Lambda(forward, qkv=nn.Linear(8, 24)), x).operators
    assert found["Attention"] == 1 and "Softmax" not in found


@pytest.mark.parametrize("masked", [False, True])
def test_one_key_for_all_heads_is_one_node(masked: bool) -> None:
    """As in multi-query attention: torch broadcasts it without being told."""

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 3)).transpose(1, 2)
        k = self.k(x).unsqueeze(1)
        mask = torch.ones(5, 5, dtype=torch.bool).tril() if masked else None
        return F.scaled_dot_product_attention(q, k, k * 2, attn_mask=mask).square().mean()

    module = Lambda(forward, q=nn.Linear(6, 12), k=nn.Linear(6, 3))
    assert captured(module, torch.randn(2, 5, 6)).operators["Attention"] == 1


def test_grouped_query_attention() -> None:
    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 3)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (2, 3)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, k * 2, enable_gqa=True).square().mean()

    captured(Lambda(forward, q=nn.Linear(6, 12), k=nn.Linear(6, 6)), torch.randn(2, 5, 6))


X = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([1, 0, 5])


def norm(shape: tuple[int, ...], weight: bool, eps: float | None) -> nn.Module:
    """rms_norm() of a product, so that its operand has a gradient."""
    parts = {"w": nn.Parameter(1 + torch.rand(shape)), "v": nn.Parameter(torch.rand(6))}
    return Lambda(
        lambda m, x: (
            F.rms_norm(x * m.v, shape, m.w if weight else None, eps).pow(3).sum() + 0 * m.w.sum()
        ),
        **parts,
    )


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(6,), (4, 6)])
@pytest.mark.parametrize(("weight", "eps"), [(True, None), (False, 1e-3)])
def test_rms_norm_is_one_operator(shape: tuple, weight: bool, eps: float | None) -> None:
    found = captured(norm(shape, weight, eps), X).operators
    assert found["RMSNormalization"] == 1
    assert not found.keys() & {"Sqrt", "ReduceMean", "Reciprocal", "Cast"}


@pytest.mark.quick
@pytest.mark.parametrize(("weight", "eps"), [(True, None), (False, 0.1)])
def test_rms_norm_of_doubles_is_written_out(weight: bool, eps: float | None) -> None:
    """What ONNX holds in an attribute is a float."""
    found = captured(norm((6,), weight, eps).double(), X.double()).operators
    assert "RMSNormalization" not in found


def test_rms_norm_of_halves_rounds_once() -> None:
    found = capture(norm((6,), True, 1e-6).bfloat16(), (X.bfloat16(),)).operators
    assert found["RMSNormalization"] == 1 and "Cast" not in found


WHOLE = {
    "LayerNormalization": lambda m, x, y: F.layer_norm(x, (6,), m.v, None, 1e-3).sum(),
    "Gelu": lambda m, x, y: F.gelu(x * m.v, approximate="tanh").sum(),
    "SoftmaxCrossEntropyLoss": lambda m, x, y: F.cross_entropy(x[:, 0] * m.v, y),
    "com.gradd::CrossEntropy": lambda m, x, y: F.cross_entropy(
        x[:, 0] * m.v, y, label_smoothing=0.1
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_one_operator(name: str) -> None:
    assert capture(Lambda(WHOLE[name], v=nn.Parameter(torch.rand(6))), (X, Y)).operators[name] == 1


def test_an_attribute_that_no_float_holds_is_refused_by_name() -> None:
    def forward(self, x):
        return torch.native_layer_norm(self.lin(x), (4,), None, None, 0.1)[0]

    with pytest.raises(CaptureError, match=r"native_layer_norm.* of doubles with 0\.1.*float only"):
        capture(linear(forward).double(), (torch.ones(2, 4, dtype=torch.float64),))


# ---- random numbers ----


def test_attention_dropout_is_kept_in_training_and_gone_in_eval() -> None:
    def forward(self, x):
        p = 0.3 if self.training else 0.0
        return F.scaled_dot_product_attention(self.lin(x), x, x, dropout_p=p).mean()

    module, args = linear(forward), (torch.randn(2, 2, 3, 4),)
    assert capture(module, args).operators["com.gradd::Attention"] == 1
    assert capture(module.eval(), args).operators["Attention"] == 1


def test_dropouts_of_one_tensor_stay_two() -> None:
    """And each has the form (x, ratio, true) -> y."""

    def forward(self, x):
        return (self.drop(x) - self.drop(x)).abs().mean() + self.lin(x).mean()

    graph = capture(linear(forward, drop=nn.Dropout(0.25)), (torch.randn(9, 4),)).graph
    nodes = [n for n in graph.node if n.op_type == "Dropout"]
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    assert len(nodes) == 2
    for node in nodes:
        assert len(node.output) == 1 and not node.attribute
        assert constants[node.input[1]] == pytest.approx(0.25)
        assert constants[node.input[2]].item() is True


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
        ("peft_lora_llama", {"lora_dropout": 0.1}, 4),  # two of each layer drop the same input
    ],
)
def test_every_dropout_survives(name: str, over: dict, count: int) -> None:
    module, make_batch = families.build(name, **over)
    found = capture(module, (), make_batch(2, 6, 0)).operators
    assert found["Dropout"] + found.get("com.gradd::Attention", 0) == count
    found = capture(module.eval(), (), make_batch(2, 6, 0)).operators
    assert found["Attention"] and not {"Dropout", "com.gradd::Attention"} & found.keys()


# ---- gradients ----


def _detach(self, x):
    return (self.a(x).detach() * self.b(x) + self.a(x)).square().mean()


def _no_grad(self, x):
    with torch.no_grad():
        frozen = self.a(x) * 2
    return (frozen * self.b(x)).square().mean()


def _nested(self, x):
    with torch.no_grad():
        h = self.a(x)
        with torch.enable_grad():
            g = self.b(h) * self.a(x)
        s = h + g
    return (g * s + h).mean()


def _straight_through(self, x):
    h = self.a(x)
    return (h + (h.relu() - h).detach()).square().mean() + self.b(x).mean()


@pytest.mark.parametrize("forward", [_detach, _no_grad, _nested, _straight_through])
def test_gradients_stop_where_torch_stops_them(forward: Callable) -> None:
    """Invisible in the loss."""
    module = Lambda(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    assert captured(module, torch.randn(3, 4)).operators["com.gradd::StopGradient"] >= 1


# ---- autocast ----


def _casts(made: Captured, name: str) -> list[int]:
    """Element types that a value is cast to."""
    found = [n for n in made.graph.node if n.op_type == "Cast" and n.input[0] == name]
    return [a.i for n in found for a in n.attribute if a.name == "to"]


@pytest.mark.quick
def test_each_weight_is_cast_once() -> None:
    module = linear(lambda self, x: self.lin(self.lin(x)) + self.lin(x))
    with torch.autocast("cpu", torch.bfloat16):
        made = capture(module, (torch.randn(3, 4),))
    assert _casts(made, "lin.weight") == _casts(made, "lin.bias") == [onnx.TensorProto.BFLOAT16]
    assert "Cast" not in capture(module, (torch.randn(3, 4),)).operators


@pytest.mark.parametrize(
    "family",
    every_run(("llama",), ("llama", "gemma2", "gpt2", "bert_cls", "peft_lora_llama")),
)
def test_weights_of_a_family_are_cast_once(family: str) -> None:
    module, make_batch = families.build(family)
    with torch.autocast("cpu", torch.bfloat16):
        made = capture(module, (), make_batch(2, 8, 0))
    for name in made.cap.params:
        assert _casts(made, name) in ([], [onnx.TensorProto.BFLOAT16]), name
    types = [o.type.tensor_type.elem_type for o in made.graph.output]  # of the loss, and the logits
    assert types == [onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16] and made.loss == "loss"

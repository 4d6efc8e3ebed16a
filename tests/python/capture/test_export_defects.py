"""Each silent defect of the stock exporter, and that a capture does not have it."""

from __future__ import annotations

import math

import models
import onnx
import pytest
import torch
from captured import Lambda, assert_same, feeds, run_ort
from torch import nn
from torch.nn import functional as F

from gradd import export


def test_weights_of_equal_value_are_all_inputs():
    """D1, D2: no weight folded away, none merged with an equal one."""

    def forward(self, x):
        for norm in (self.a, self.b, self.c):
            x = F.linear(norm(x), self.w)
        return x.square().mean()

    norms = {name: nn.LayerNorm(6) for name in "abc"}
    module = Lambda(forward, w=nn.Parameter(torch.eye(6) + 0.1), **norms)
    cap = assert_same(module, (torch.randn(4, 6),))
    assert set(cap.params) == {n for n, _ in module.named_parameters()}
    graph = onnx.ModelProto.FromString(cap.onnx).graph
    assert {i.name for i in graph.input} >= set(cap.params)
    assert all(math.prod(t.dims) <= 8 for t in graph.initializer), "a weight became a constant"


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
def test_constants_near_zero_or_one_are_kept(forward, kept):
    """The stock optimizer takes 1e-8 for 0: an epsilon is lost, and a row of zeros becomes NaN."""
    x = torch.randn(4, 6)
    if kept == "Add":
        x[1] = 0
    if kept == "Sub":
        x *= 1e-8
    cap = assert_same(Lambda(forward, w=nn.Parameter(torch.randn(6))), (x,))
    nodes = onnx.ModelProto.FromString(cap.onnx).graph.node
    assert kept in {node.op_type for node in nodes}


def test_exact_zeros_and_ones_still_go():
    module = Lambda(
        lambda self, x: ((x + 0.0) * 1.0 / 1.0 - 0.0).mul(self.w).sum(),
        w=nn.Parameter(torch.randn(6)),
    )
    cap = assert_same(module, (torch.randn(4, 6),))
    nodes = onnx.ModelProto.FromString(cap.onnx).graph.node
    assert [node.op_type for node in nodes] == ["Mul", "ReduceSum"]


def _batch_norm_net() -> Lambda:
    def forward(self, x):
        return self.head(self.norm(self.lin(x)).relu()).square().mean()

    return Lambda(
        forward, lin=nn.Linear(5, 6, bias=False), norm=nn.BatchNorm1d(6), head=nn.Linear(6, 2)
    )


def test_batch_norm_trains_and_updates_its_statistics():
    """D3, D5: batch statistics, unbiased running variance, buffers among the outputs."""
    module = _batch_norm_net()
    module.norm.running_mean.uniform_(-1, 1)
    cap = assert_same(module, (torch.randn(7, 5),))
    written = {o.fqn for o in cap.outputs if o.kind == "buffer"}
    assert written == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_batch_norm_in_eval_mode_uses_running_statistics():
    module = _batch_norm_net().eval()
    module.norm.running_var.uniform_(0.5, 2)
    cap = assert_same(module, (torch.randn(7, 5),))
    assert all(o.kind == "user" for o in cap.outputs)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_label_smoothing_is_in_the_graph(reduction, weighted):
    """D4, with ignored rows and class weights."""
    weight = torch.rand(5) + 0.5 if weighted else None

    def forward(self, x, y):
        loss = F.cross_entropy(
            self.lin(x), y, weight=weight, label_smoothing=0.2, reduction=reduction
        )
        return loss.sum()

    y = torch.tensor([0, 4, -100, 2, 2])
    # com.gradd::CrossEntropy, which onnxruntime does not know
    assert_same(Lambda(forward, lin=nn.Linear(4, 5)), (torch.randn(5, 4), y), ort=False)


def test_cross_entropy_of_class_probabilities():
    def forward(self, x, y):
        return F.cross_entropy(self.lin(x), y, label_smoothing=0.1)

    args = (torch.randn(5, 4), torch.rand(5, 3).softmax(-1))
    assert_same(Lambda(forward, lin=nn.Linear(4, 3)), args)


_MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.tensor([[True, False, True], [False] * 3, [True] * 3])},
    "float": {"attn_mask": torch.linspace(-2, 2, 9).reshape(3, 3)},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("mask", list(_MASKS))
@pytest.mark.parametrize("rank", [3, 4])
def test_attention_is_one_node(mask, rank):
    """D6, D7. The boolean mask has a row without any key: zeros, not NaN."""

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, **_MASKS[mask]).square().mean()

    x = torch.randn(*(2, 4, 3, 8)[4 - rank :])
    cap = assert_same(Lambda(forward, qkv=nn.Linear(8, 24)), (x,))
    assert export.op_histogram(cap)["Attention"] == 1
    assert "Softmax" not in export.op_histogram(cap)


def test_grouped_query_attention():
    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 3)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (2, 3)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, k * 2, enable_gqa=True).square().mean()

    assert_same(Lambda(forward, q=nn.Linear(6, 12), k=nn.Linear(6, 6)), (torch.randn(2, 5, 6),))


@pytest.mark.parametrize("masked", [False, True])
def test_one_key_for_all_heads_is_one_node(masked):
    """As in multi-query attention: torch broadcasts it without being told."""

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 3)).transpose(1, 2)
        k = self.k(x).unsqueeze(1)
        mask = torch.ones(5, 5, dtype=torch.bool).tril() if masked else None
        return F.scaled_dot_product_attention(q, k, k * 2, attn_mask=mask).square().mean()

    module = Lambda(forward, q=nn.Linear(6, 12), k=nn.Linear(6, 3))
    cap = assert_same(module, (torch.randn(2, 5, 6),))
    assert export.op_histogram(cap)["Attention"] == 1


def test_attention_dropout_is_kept_in_training_and_gone_in_eval():
    """D6: the stock translation loses it."""

    def forward(self, x):
        p = 0.3 if self.training else 0.0
        return F.scaled_dot_product_attention(self.q(x), x, x, dropout_p=p).mean()

    module = Lambda(forward, q=nn.Linear(4, 4))
    args = (torch.randn(2, 2, 3, 4),)
    assert export.op_histogram(export.capture(module, args, {}))["com.gradd::Attention"] == 1
    assert export.op_histogram(export.capture(module.eval(), args, {}))["Attention"] == 1


def test_dropouts_of_one_tensor_stay_two():
    """D8: and each has the form (x, ratio, true) -> y."""

    def forward(self, x):
        return (self.drop(x) - self.drop(x)).abs().mean() + self.lin(x).mean()

    module = Lambda(forward, drop=nn.Dropout(0.25), lin=nn.Linear(4, 4))
    graph = onnx.ModelProto.FromString(export.capture(module, (torch.randn(9, 4),), {}).onnx).graph
    nodes = [n for n in graph.node if n.op_type == "Dropout"]
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    assert len(nodes) == 2
    for node in nodes:
        assert len(node.output) == 1 and not node.attribute
        assert constants[node.input[1]] == pytest.approx(0.25)
        assert constants[node.input[2]].item() is True


def test_lora_dropouts_are_not_merged():
    """D8 as it was found: q_proj and v_proj of each layer drop the same input."""
    module, make_batch = models.build("peft_lora_llama", lora_dropout=0.1)
    cap = export.capture(module, (), make_batch(2, 5, 0))
    assert export.op_histogram(cap)["Dropout"] == 4


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
    return (h + (h.round() - h).detach()).square().mean() + self.b(x).mean()


@pytest.mark.parametrize("forward", [_detach, _no_grad, _nested, _straight_through])
def test_gradients_stop_where_torch_stops_them(forward):
    """D9: invisible in the loss."""
    import onnx_eval

    onnx_eval._OPS.setdefault("Round", lambda x, a, n: torch.round(x[0]))
    module = Lambda(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    cap = assert_same(module, (torch.randn(3, 4),))
    assert export.op_histogram(cap)["com.gradd::StopGradient"] >= 1


def test_buffer_updated_under_no_grad_is_no_path_for_gradients():
    def forward(self, x):
        h = self.lin(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0) * 0.1)
        return (h - self.mean).square().mean()

    module = Lambda(forward, lin=nn.Linear(4, 4), mean=torch.zeros(4))
    cap = assert_same(module, (torch.randn(3, 4),))
    assert [o.fqn for o in cap.outputs if o.kind == "buffer"] == ["mean"]


def test_padding_rows_of_an_embedding_get_no_gradient():
    module = Lambda(lambda self, i: self.e(i).square().mean(), e=nn.Embedding(7, 3, padding_idx=2))
    with torch.no_grad():
        module.e.weight.uniform_(0.5, 1.0)  # a trained padding row is not zero
    assert_same(module, (torch.tensor([[1, 2, 2], [3, 2, 6]]),))


def test_bce_with_logits_does_not_overflow():
    def forward(self, x, y):
        weight = torch.tensor([1.0, 2.0, 0.5])
        return F.binary_cross_entropy_with_logits(self.lin(x), y, pos_weight=weight)

    module = Lambda(forward, lin=nn.Linear(4, 3))
    assert_same(module, (torch.randn(6, 4) * 500, torch.randint(0, 2, (6, 3)).float()))


def test_autocast_inside_forward_is_captured():
    """The tenth; ambient autocast is in test_autocast_capture."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.lin(x).float().square().mean()

    module = Lambda(forward, lin=nn.Linear(4, 4))
    args = (torch.randn(3, 4),)
    cap = export.capture(module, args, {})
    assert export.op_histogram(cap).get("Cast", 0) >= 2
    values = feeds(module, cap, args, {})
    got = run_ort_or_torch(cap, values)
    torch.testing.assert_close(got, module(*args), rtol=1e-2, atol=1e-3)


def run_ort_or_torch(cap, values):
    """bf16 products are not in onnxruntime's CPU build: torch evaluates them."""
    import onnx_eval

    return onnx_eval.evaluate(cap.onnx, values)[cap.outputs[0].name]


def test_left_padding_with_labels_on_pads():
    """Fully masked query rows reach the loss: they must be what torch makes of them."""
    module, make_batch = models.build("llama")
    batch = make_batch(2, 6, 3)
    batch["attention_mask"][:] = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    batch["labels"] = batch["input_ids"].clone()
    cap = assert_same(module, (), batch)
    assert cap.loss_ancestors == {1}
    assert run_ort(cap, feeds(module, cap, (), batch))["loss"] > 0


@pytest.mark.parametrize(
    "unused",
    [lambda y: y.abs().amax(), lambda y: y.mean(), lambda y: (y.exp(), y.abs().sum().detach())],
)
def test_unused_readers_of_a_result(unused):
    """torch forgets who reads an output, and fails when such a reader is taken out."""

    def forward(self, x):
        y = self.lin(x)
        unused(y)
        return y

    assert_same(Lambda(forward, lin=nn.Linear(4, 4)), (torch.randn(2, 4),))

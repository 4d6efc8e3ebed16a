"""The bytes and the description of a capture: weightless, repeatable, named, side-effect free."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import models
import onnx
import pytest
import torch
from captured import Lambda, assert_same, leaves_of
from conftest import HELPERS
from torch import nn

from gradd import export


def test_llama_has_all_parameters_and_no_weights():
    module, make_batch = models.build("llama")
    batch = make_batch(3, 12, 0)
    cap = export.capture(module, (), batch)
    assert set(cap.params) == {n for n, _ in module.named_parameters()}
    assert cap.buffers == ("model.rotary_emb.inv_freq",)
    model = onnx.ModelProto.FromString(cap.onnx)
    assert sum(t.ByteSize() for t in model.graph.initializer) < 8192
    assert [i.name for i in model.graph.input][3:] == [*cap.params, *cap.buffers]
    assert {o.domain: o.version for o in model.opset_import} == {"": 23, "com.gradd": 1}
    assert not model.graph.value_info and not model.metadata_props and not model.functions
    assert all(not n.metadata_props and not n.doc_string for n in model.graph.node)
    assert [i.name for i in cap.inputs] == list(batch) and "labels" in batch
    assert [o.name for o in cap.outputs] == ["loss", "logits"]
    assert cap.loss_leaf == 0 and cap.loss_ancestors == {1}


def test_sources_name_module_and_line():
    module, make_batch = models.build("llama")
    cap = export.capture(module, (), make_batch(3, 12, 0))
    places = dict(cap.sources)
    names = {n.name for n in onnx.ModelProto.FromString(cap.onnx).graph.node}
    assert set(places) <= names and len(places) > len(names) // 2
    assert any(p.startswith("model.layers.1.self_attn") for p in places.values())
    assert any("modeling_llama.py:" in p for p in places.values())


_SCRIPT = """
import hashlib, sys
sys.path[:0] = sys.argv[1:3]
import models
from gradd import export
module, make_batch = models.build("gemma3", seed=9)
data = export.capture(module, (), make_batch(2, 7, 5)).onnx
print(hashlib.sha256(data).hexdigest())
"""


def test_bytes_are_the_same_in_every_process():
    """Other weights, other sizes, other hash seeds: Gemma-3 iterates over a set of strings."""
    module, make_batch = models.build("gemma3", seed=1)
    here = hashlib.sha256(export.capture(module, (), make_batch(3, 12, 0)).onnx).hexdigest()
    package = str(Path(export.__file__).resolve().parents[2])
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT, package, str(HELPERS)]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}  # this process has another
    text = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert text.stdout.split()[-1] == here


def test_module_weights_and_random_state_are_untouched():
    module, make_batch = models.build("llama")
    before = {n: (p.data_ptr(), p.detach().clone()) for n, p in module.named_parameters()}
    attributes = {n: dict(m.__dict__) for n, m in module.named_modules()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    export.capture(module, (), make_batch(2, 5, 0))
    assert torch.equal(torch.get_rng_state(), state)
    for name, param in module.named_parameters():
        assert param.data_ptr() == before[name][0] and torch.equal(param, before[name][1])
        assert type(param) is nn.Parameter and param.grad is None
    for name, sub in module.named_modules():
        assert sub.__dict__.keys() == attributes[name].keys()
        assert all(sub.__dict__[k] is v for k, v in attributes[name].items())


def test_parameters_in_foreign_memory():
    """Re-homed parameters: views of one buffer, as the bridge makes them."""
    module = Lambda(lambda self, x: self.lin(x).square().mean(), lin=nn.Linear(4, 4))
    memory = bytearray(80)
    offset = 0
    for param in module.parameters():
        view = torch.frombuffer(memory, dtype=torch.float32, count=param.numel(), offset=offset)
        view = view.view_as(param)
        view.copy_(param.detach())
        param.data = view
        offset += 4 * param.numel()
    cap = assert_same(module, (torch.randn(3, 4),))
    assert cap.params == ("lin.weight", "lin.bias") and cap.aliases == ()


def test_tied_weights_are_one_input_under_the_first_name():
    module, make_batch = models.build("llama_tied")
    cap = export.capture(module, (), make_batch(2, 5, 0))
    assert cap.aliases == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert "lm_head.weight" not in cap.params and "model.embed_tokens.weight" in cap.params


def test_parameters_with_one_memory_are_two():
    module = Lambda(lambda s, x: (s.a(x) + s.b(x)).mean(), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    module.b.weight.data = module.a.weight.data
    cap = export.capture(module, (torch.randn(3, 4),), {})
    assert cap.params == ("a.weight", "a.bias", "b.weight", "b.bias")
    assert cap.aliases == ()


def test_a_buffer_with_the_memory_of_a_parameter_has_no_gradient():
    module = Lambda(lambda s, x: (s.a(x) * s.a.seen).mean(), a=nn.Linear(4, 4))
    module.a.register_buffer("seen", module.a.bias.detach())
    cap = assert_same(module, (torch.randn(3, 4),))
    assert cap.params == ("a.weight", "a.bias") and cap.buffers == ("a.seen",)
    assert cap.aliases == ()


def test_a_write_to_memory_with_two_names_is_refused():
    def forward(s, x):
        s.seen.mul_(0.5)
        return (s.a(x) * s.other).mean()

    module = Lambda(forward, a=nn.Linear(4, 4))
    module.register_buffer("seen", torch.ones(4))
    module.register_buffer("other", module.seen.view(4))
    with pytest.raises(export.CaptureError, match="shares its memory"):
        export.capture(module, (torch.randn(3, 4),), {})


def test_results_keep_their_structure():
    def forward(self, x, y, flag):
        h = self.lin(x)
        return {"a": (x, h, None), "b": [h, 3, "text"], "c": y, "d": torch.ones(2), "e": flag}

    module = Lambda(forward, lin=nn.Linear(4, 4))
    args = (torch.randn(3, 4), torch.arange(3), True)
    cap = assert_same(module, args)
    want = module(*args)
    got = cap.unflatten(leaves_of(want))
    assert got["a"][2] is None and got["b"][1:] == [3, "text"] and got["e"] is True
    assert got["a"][0] is want["a"][0] and isinstance(got["a"], tuple)
    assert cap.loss_leaf is None


def test_unused_inputs_and_parameters_are_left_out():
    module = Lambda(lambda s, x, y: s.a(x).mean(), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    cap = export.capture(module, (torch.randn(3, 4), torch.randn(3, 4)), {})
    assert [i.leaf for i in cap.inputs] == [0]
    assert cap.params == ("a.weight", "a.bias")


def test_cache_of_keys_and_values_is_a_result():
    module, make_batch = models.build("llama", use_cache=True)
    batch = make_batch(2, 5, 0)
    cap = assert_same(module, (), batch)
    want = module(**batch)
    got = cap.unflatten(leaves_of(want))
    assert type(got) is type(want) and type(got.past_key_values) is type(want.past_key_values)
    assert got.past_key_values.get_seq_length() == 5
    assert got.past_key_values.layers[1].keys is want.past_key_values.layers[1].keys


def test_replaced_forward_is_traced_through_the_argument():
    module = Lambda(lambda self, x: self.lin(x).mean(), lin=nn.Linear(4, 4))
    original = module.forward
    module.forward = lambda *a: pytest.fail("the replacement must not be traced")
    cap = export.capture(module, (torch.randn(3, 4),), {}, forward=original)
    assert export.op_histogram(cap) == {"Gemm": 1, "ReduceMean": 1}


def test_capture_does_not_depend_on_the_grad_mode_around_it():
    def forward(self, x):
        with torch.no_grad():
            h = self.lin(x)
        return (h * self.lin(x)).mean()

    module = Lambda(forward, lin=nn.Linear(4, 4))
    plain = export.capture(module, (torch.randn(3, 4),), {}).onnx
    with torch.no_grad():
        assert export.capture(module, (torch.randn(3, 4),), {}).onnx == plain
    with torch.inference_mode():
        assert export.capture(module, (torch.randn(3, 4),), {}).onnx == plain


def test_a_pair_of_caches_is_taken_apart_and_rebuilt():
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    from gradd.export.results import Result

    pair = EncoderDecoderCache(DynamicCache(), DynamicCache())
    for cache, size in ((pair.self_attention_cache, 3), (pair.cross_attention_cache, 5)):
        cache.update(torch.ones(2, 4, size, 8), torch.zeros(2, 4, size, 8), 0)
    pair.is_updated[0] = True
    result = Result()
    leaves = result.flatten({"loss": torch.ones(()), "cache": pair})
    assert len(leaves) == len(result.paths) == 5
    got = result.unflatten([leaf + 1 for leaf in leaves])["cache"]
    assert type(got) is EncoderDecoderCache and got.is_updated == {0: True}
    assert got.is_updated is not pair.is_updated and got.get_seq_length() == 3
    for name in ("self_attention_cache", "cross_attention_cache"):
        ours, theirs = getattr(got, name).layers[0], getattr(pair, name).layers[0]
        assert torch.equal(ours.keys, theirs.keys + 1)
        assert torch.equal(ours.values, theirs.values + 1)

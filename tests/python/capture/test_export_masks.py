"""Buffers of zeros and ones that a module subtracts from 1: the graph says that they are masks."""

from __future__ import annotations

import types
import warnings

import onnx
import onnx_eval
import pytest
import torch
import transformers
from captured import Lambda, assert_same, feeds
from selection import every_run
from torch import nn
from torch.nn import functional as F

from gradd import export
from gradd.export import keys, mask_buffers

X = (torch.randn(3, 4, 4),)
HELD = types.SimpleNamespace()  # as the bridge holds what is known of its module


def _gpt() -> tuple[nn.Module, dict]:
    config = transformers.OpenAIGPTConfig(
        n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16
    )
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    return transformers.OpenAIGPTLMHeadModel(config).eval(), {"input_ids": ids, "labels": ids}


def _product(self: Lambda, x: torch.Tensor) -> torch.Tensor:
    """Masks scores as OpenAI-GPT does."""
    b = self.mask[: x.shape[1], : x.shape[2]]
    return (self.lin(x) * b - 1e4 * (1 - b)).softmax(-1).square().mean()


def _masked(forward=_product, mask: torch.Tensor | None = None, **parts) -> Lambda:
    mask = torch.ones(4, 4).tril() if mask is None else mask
    return Lambda(forward, lin=nn.Linear(4, 4), mask=mask, **parts)


def _marked(cap: export.Capture) -> dict[str, int]:
    """Graph input -> type of the second cast, where a cast to bool and one back read the input.

    Fails where somebody else reads such an input as well.
    """
    nodes = onnx.ModelProto.FromString(cap.onnx).graph.node
    inputs = {*cap.params, *cap.buffers}
    found = {}
    for first in nodes:
        if first.op_type != "Cast" or first.input[0] not in inputs:
            continue
        readers = [n for n in nodes if first.output[0] in n.input]
        assert first.attribute[0].i == onnx.TensorProto.BOOL
        assert [n.op_type for n in readers] == ["Cast"]
        assert [n for n in nodes if first.input[0] in n.input] == [first]
        found[first.input[0]] = readers[0].attribute[0].i
    return found


def _key(module: nn.Module):
    return export.capture_key(module, X, {}, HELD)


@pytest.mark.parametrize("kind", every_run(("FLOAT",), ["FLOAT", "BFLOAT16"]))
def test_masks_of_openai_gpt(kind):
    module, batch = _gpt()
    if kind == "BFLOAT16":
        cap = export.capture(module.bfloat16(), (), batch)
    else:
        cap = assert_same(module, (), batch)
    wanted = {f"transformer.h.{i}.attn.bias" for i in range(2)}
    assert _marked(cap) == dict.fromkeys(wanted, getattr(onnx.TensorProto, kind))
    places = dict(cap.sources)
    casts = [n for n in onnx.ModelProto.FromString(cap.onnx).graph.node if n.op_type == "Cast"]
    assert all("modeling_openai.py:" in places[n.name] for n in casts if "bias" in n.input[0])


@pytest.mark.quick
def test_results_stay_those_of_the_module():
    assert _marked(assert_same(_masked(), X)) == {"mask": onnx.TensorProto.FLOAT}


def test_results_in_bf16_stay_those_of_the_module():
    module, args = _masked().bfloat16(), (X[0].bfloat16(),)
    cap = export.capture(module, args, {})
    assert _marked(cap) == {"mask": onnx.TensorProto.BFLOAT16}
    (got,) = onnx_eval.evaluate(cap.onnx, feeds(module, cap, args, {})).values()
    torch.testing.assert_close(got, module(*args))


def test_a_mask_behind_moves_and_casts():
    def forward(self, x):
        b = self.mask[None, :, : x.shape[-1]].transpose(1, 2).double().float()
        return (self.lin(x) * (1 - b.expand(3, 4, 4))).mean()

    assert list(_marked(assert_same(_masked(forward), X))) == ["mask"]


def _with(value: float) -> torch.Tensor:
    mask = torch.ones(4, 4).tril()
    mask[3, 0] = value
    return mask


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(_with(0.5), id="half"),
        pytest.param(_with(float("nan")), id="nan"),
        pytest.param(_with(-0.0), id="negative-zero"),
        pytest.param(torch.zeros(4, 4), id="zeros"),
    ],
)
def test_buffers_of_other_values_are_not_masks(mask):
    assert _marked(export.capture(_masked(mask=mask), X, {})) == {}


def test_buffers_with_one_axis_are_not_masks():
    module = _masked(lambda self, x: (self.lin(x) * (1 - self.mask)).mean(), torch.ones(4))
    assert _marked(export.capture(module, X, {})) == {}


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: (self.lin(x) * self.mask).mean(),
        lambda self, x: (self.lin(x) * (2 - self.mask)).mean(),
        lambda self, x: (self.lin(x) * (self.mask - 1)).mean(),
        lambda self, x: (self.lin(x) * (1 - 2 * self.mask)).mean(),
        lambda self, x: (1 - self.lin(x) * self.mask).mean(),
    ],
)
def test_only_what_is_subtracted_from_one_is_a_mask(forward):
    assert _marked(export.capture(_masked(forward), X, {})) == {}


def test_a_mask_of_weights_is_no_mask_of_scores():
    def forward(self, x):  # as torch.nn.utils.prune computes, whose hooks no graph can hold
        return (1 - F.linear(x, self.lin.weight * self.mask)).mean()

    assert _marked(assert_same(_masked(forward), X)) == {}


def test_a_buffer_that_forward_changes_is_no_mask():
    def forward(self, x):
        loss = (self.lin(x) * (1 - self.mask)).mean()
        self.mask.mul_(0.5)
        return loss

    cap = export.capture(_masked(forward), X, {})
    assert [o.fqn for o in cap.outputs if o.kind == "buffer"] == ["mask"]
    assert _marked(cap) == {}


def test_tied_masks_are_one_input():
    def forward(self, x):
        return (self.lin(x) * (1 - self.mask) * self.other + 1 - self.other).mean()

    mask = torch.ones(4, 4).tril()
    for other in (mask, mask.detach().view(4, 4)):
        cap = assert_same(_masked(forward, mask, other=other), X)
        assert list(_marked(cap)) == ["mask"] and "other" not in cap.buffers


def test_memory_that_somebody_else_writes_is_no_mask():
    """A view that shares no version: whose writes could not be seen."""
    module = _masked()
    module.rows = nn.Parameter(torch.ones(16))
    module.mask.data = module.rows.data.view(4, 4)
    assert _marked(export.capture(module, X, {})) == {}


def test_the_key_follows_the_values():
    module = _masked()
    before = _key(module)
    module.mask[3, 0] = 0
    assert _key(module) == before
    module.mask[3, 0] = 0.5
    assert _key(module) != before
    assert _marked(export.capture(module, X, {})) == {}
    module.mask[3, 0] = 1
    assert _key(module.eval()) != before  # whatever makes a new key: nobody watches other buffers
    assert _key(module.train()) == before


@pytest.mark.quick
def test_the_key_follows_another_tensor_in_the_same_place():
    module = _masked()
    before = _key(module)
    module.mask.data = _with(0.5)
    assert _key(module) != before
    module.mask = _with(0)
    assert _key(module) == before
    module.mask.requires_grad_()
    assert _key(module) != before


def test_a_capture_relies_on_no_more_than_its_key():
    """What became a mask after its key was made may be something else again with that key."""
    module = _masked(mask=_with(0.5))
    before = _key(module)
    module.mask[3, 0] = 0
    assert _key(module) == before
    assert _marked(export.capture(module, X, {})) == {}


@pytest.mark.quick
def test_values_are_no_part_of_the_key():
    assert _key(_masked(mask=_with(0))) == _key(_masked(mask=_with(1)))
    assert _key(_masked(mask=_with(0))) != _key(_masked(mask=_with(0.5)))


@pytest.mark.quick
def test_values_are_looked_at_once_per_write(monkeypatch):
    looked = []
    look = mask_buffers._is_binary
    monkeypatch.setattr(mask_buffers, "_is_binary", lambda tensor: looked.append(1) or look(tensor))
    module = _masked()
    _key(module)
    before = keys.module_key(module)
    assert keys.module_key(module) is before and len(looked) == 1
    module.mask[3, 0] = 0
    _key(module)
    assert all(keys.module_key(module) is before for _ in range(3)) and len(looked) == 2
    assert keys.module_key(module.eval()) != before and len(looked) == 2


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["meta", "float8", "empty", "inference"])
def test_buffers_whose_values_cannot_be_known_have_a_key(kind):
    with warnings.catch_warnings(), torch.inference_mode(kind == "inference"):
        warnings.simplefilter("ignore")
        mask = torch.ones(4, 4, device="meta" if kind == "meta" else "cpu")
        if kind == "float8":
            mask = mask.to(torch.float8_e4m3fn)
    mask = mask[:0] if kind == "empty" else mask
    module = Lambda(lambda self, x: x, mask=mask)
    other = Lambda(module.function, mask=mask)
    assert _key(module) == _key(other)
    assert mask_buffers.Binaries(module).names == ()

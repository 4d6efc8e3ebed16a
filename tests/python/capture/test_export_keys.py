"""schema_key() and capture_key(): what shares a capture and what does not, and what it costs."""

from __future__ import annotations

import enum
import functools
import timeit
import types
from collections import deque
from types import SimpleNamespace

import models
import pytest
import torch
from captured import Lambda
from torch import nn
from torch.nn import functional as F

from gradd import export

pytestmark = pytest.mark.quick


def _key(*args, **kwargs):
    return export.schema_key(nn.Identity(), args, kwargs)


def test_sizes_do_not_matter_but_order_does():
    a, b = torch.zeros(2, 3), torch.zeros(7, 1)
    assert _key(a) == _key(b)
    assert _key(x=a, y=b) == _key(x=b, y=a) != _key(y=b, x=a)
    assert hash(_key([a, {"k": b}])) == hash(_key([b, {"k": a}]))


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(2, 3, dtype=torch.float64),),
        (torch.zeros(2),),
        (torch.zeros(2, 3, requires_grad=True),),
        (None,),
        ([torch.zeros(2, 3)],),
        (torch.zeros(2, 3), 1),
    ],
)
def test_form_matters(other):
    assert _key(torch.zeros(2, 3)) != _key(*other)


def test_constants_matter_by_value_and_type():
    assert _key(flag=True) != _key(flag=False)
    assert _key(flag=True) != _key(flag=1)
    assert _key(mode="a") != _key(mode="b")
    assert _key(num_items_in_batch=3) == _key(num_items_in_batch=4)
    assert _key(num_items_in_batch=3) == _key(num_items_in_batch=torch.tensor(5))


def test_unknown_argument_is_refused():
    with pytest.raises(export.CaptureError) as caught:
        _key(object())
    assert caught.value.reason == "unsupported_input_type"


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4))


X = (torch.zeros(2, 4),)


def test_equal_modules_share_a_key():
    assert export.capture_key(_net(), X, {}) == export.capture_key(_net(), X, {})


def _tie(m):
    m[2].weight = m[0].weight


def _half(m):
    m.bfloat16()


def _hook(m):
    m[0].register_forward_hook(lambda *a: None)


def _set(name, value):
    return lambda m: setattr(m[1], name, value)


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


def _with_attributes() -> nn.Module:
    """A network whose layer 1 has an attribute of every kind that can be described."""
    module, part = _net(), SimpleNamespace(scale=1.0, deep=[1])
    for name, value in {
        "items": [1, [2, {"a": 3}]],
        "table": {"a": 1},
        "nothing": {},
        "chosen": {1},
        "recent": deque([1]),
        "pair": (0, [2]),
        "options": part,
        "kind": torch.float32,
        "mode": Mode.FAST,
        "act": F.relu,
        "part": functools.partial(F.dropout, p=0.1),
        "scales": [torch.ones(1)],
    }.items():
        module[1].__dict__[name] = value
    module[1].__dict__["ring"] = ring = []
    ring.append(ring)
    return module


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.items.append(3),
        lambda m: m.items[1].append(3),
        lambda m: m.items[1][1].update(b=1),
        lambda m: m.table.update(a=2),
        lambda m: m.nothing.update(a=2),
        lambda m: m.chosen.add(2),
        lambda m: m.recent.append(2),
        lambda m: m.pair[1].append(2),
        lambda m: setattr(m.options, "scale", 2.0),
        lambda m: m.options.deep.append(2),
        lambda m: setattr(m, "kind", torch.bfloat16),
        lambda m: setattr(m, "mode", Mode.EXACT),
        lambda m: setattr(m, "act", F.gelu),
        lambda m: setattr(m, "act", m.forward),
        lambda m: setattr(m, "part", functools.partial(F.dropout, p=0.2)),
        lambda m: setattr(m, "pair", (1, [2])),
        lambda m: m.scales[0].mul_(2),
        lambda m: m.scales.append(torch.ones(1)),
        lambda m: m.ring.append(1),
    ],
)
def test_attributes_of_every_kind_are_seen(change):
    module = _with_attributes()
    before = export.capture_key(module, X, {})
    assert export.capture_key(module, X, {}) == before
    change(module[1])
    after = export.capture_key(module, X, {})
    assert after != before
    assert export.capture_key(module, X, {}) == after


def test_equal_attributes_keep_the_key():
    module = _with_attributes()
    before = export.capture_key(module, X, {})
    module[1].items = [1, [2, {"a": 3}]]
    module[1].part = functools.partial(F.dropout, p=0.1)
    module[1].options = SimpleNamespace(scale=1.0, deep=[1])
    assert export.capture_key(module, X, {}) == before
    module[1].items[1].append(4)
    assert export.capture_key(module, X, {}) != before


def test_functions_are_told_apart_though_one_takes_the_place_of_another():
    module = _net()
    keys = []
    for k in range(20):
        module[1].act = functools.partial(lambda x, y: x * y, y=k)
        keys.append(export.capture_key(module, X, {}))
        module[1].act = lambda x: x
        keys.append(export.capture_key(module, X, {}))
    assert len(set(keys)) == len(keys)


def test_parameters_in_a_container_may_train():
    module = _net()
    module[1].tied = [module[0].weight]
    before = export.capture_key(module, X, {})
    with torch.no_grad():
        module[0].weight.mul_(2)
    assert export.capture_key(module, X, {}) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.eval(),
        lambda m: m[1].eval(),
        _set("p", 0.0),
        _set("temperature", 2.0),
        _tie,
        _half,
        _hook,
        lambda m: m.append(nn.ReLU()),
        lambda m: m[0].register_buffer("mask", torch.ones(4)),
        lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(8, 4))),
    ],
)
def test_changes_that_shape_the_graph_are_seen(change):
    module = _net()
    before = export.capture_key(module, X, {})
    assert export.capture_key(module, X, {}) == before
    change(module)
    assert export.capture_key(module, X, {}) != before


def test_training_and_freezing_keep_the_key():
    module = _net()
    before = export.capture_key(module, X, {})
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    module[0].weight.requires_grad_(False)
    module[2].weight.data = module[2].weight.data.clone()
    assert export.capture_key(module, X, {}) == before
    module.eval()
    module.train()
    assert export.capture_key(module, X, {}) == before


def test_attributes_of_the_configuration_matter():
    module, make_batch = models.build("llama")
    batch = make_batch(2, 5, 0)
    before = export.capture_key(module, (), batch)
    module.config.output_hidden_states = True
    assert export.capture_key(module, (), batch) != before


def test_containers_in_the_configuration_matter():
    module, make_batch = models.build("gemma2")
    batch = make_batch(2, 5, 0)
    before = export.capture_key(module, (), batch)
    module.config.layer_types[0] = "full_attention"
    assert export.capture_key(module, (), batch) != before


def test_ambient_autocast_is_part_of_the_key():
    module = _net()
    before = export.capture_key(module, X, {})
    with torch.autocast("cpu", torch.bfloat16):
        assert export.capture_key(module, X, {}) != before


def test_plain_tensor_attribute_written_in_place_is_seen():
    module = Lambda(lambda self, x: x * self.scales[0])
    module.__dict__["factor"] = torch.ones(1)
    before = export.capture_key(module, X, {})
    module.factor.mul_(2)
    assert export.capture_key(module, X, {}) != before


def test_keys_cost_microseconds():
    module, make_batch = models.build("llama", num_hidden_layers=8)
    batch = make_batch(2, 5, 0)
    holder = types.SimpleNamespace()
    export.capture_key(module, (), batch, holder)
    rounds = 50
    best = min(
        timeit.repeat(
            lambda: export.capture_key(module, (), batch, holder), number=rounds, repeat=5
        )
    )
    assert best / rounds < 1e-3
    best = min(timeit.repeat(lambda: export.schema_key(module, (), batch), number=200, repeat=5))
    assert best / 200 < 1e-4


def test_hooks_that_do_nothing_are_no_part_of_the_key():
    """transformers adds another one with each gradient_checkpointing_enable()."""

    def make_inputs_require_grads(module, inputs, output):
        output.requires_grad_(True)

    module = _net()
    before = export.capture_key(module, X, {})
    for _ in range(3):
        module[0].register_forward_hook(make_inputs_require_grads)
        assert export.capture_key(module, X, {}) == before
    module[0].register_forward_hook(lambda *a: None)
    assert export.capture_key(module, X, {}) != before

"""ORTModule is the module: names, attributes, methods, modes, copies; and what it refuses."""

from __future__ import annotations

import copy
import inspect
import pickle
import weakref
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradd import DebugOptions, LogLevel, ORTModule, module_tables
from helpers import ROOT
from helpers.nets import Net, assert_close, assert_same_grads, batch, loss_of, pair

pytestmark = pytest.mark.usefixtures("daemon")
Pair = namedtuple("Pair", ["a", "b"])


@pytest.mark.quick
def test_names_are_those_of_the_module() -> None:
    ours, theirs = pair()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in theirs.named_modules()]
    assert [n for n, _ in ours.named_children()] == [n for n, _ in theirs.named_children()]
    assert ours.first == ours.module.first and ours.first in list(ours.modules())
    assert ours.get_parameter("first.weight") is ours.first.weight
    assert "first" in dir(ours) and "Net(" in repr(ours)
    for name in ("_torch_module", "_get_torch_module"):
        with pytest.raises(AttributeError, match=f"{name} was internal to ONNX Runtime"):
            getattr(ours, name)
    with pytest.raises(AttributeError, match="nothing_like_that"):
        ours.nothing_like_that  # noqa: B018


@pytest.mark.quick
def test_modes_are_one() -> None:
    ours, _ = pair()
    assert ours.training and ours.eval() is ours
    assert not ours.training and not ours.module.training and not ours.first.training
    ours.module.train()
    assert ours.training


def test_as_part_of_a_larger_module() -> None:
    ours, theirs = pair()
    outer = nn.ModuleDict({"inner": ours})
    assert list(outer.state_dict()) == [f"inner.{n}" for n in theirs.state_dict()]
    outer.load_state_dict({f"inner.{n}": v for n, v in Net(seed=8).state_dict().items()})
    theirs.load_state_dict(Net(seed=8).state_dict())
    outer.eval()
    assert not ours.module.training
    outer.train()
    for model in (ours, theirs):
        loss_of(model(*batch())).backward()
    assert_same_grads(ours, theirs)
    assert len(list(outer.parameters())) == 4


class Beside(nn.Module):
    """Reaches another module in several ways."""

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.last, self.how = nn.Linear(4, 2), how
        if how == "child":
            self.inner = inner
        elif how == "deeper":
            self.inner = nn.Sequential(nn.ModuleDict({"it": inner}))
        elif how == "closure":
            self.call = lambda x: inner(x)
        else:
            self.__dict__["inner"] = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "closure":
            return self.last(self.call(x))
        return self.last((self.inner[0]["it"] if self.how == "deeper" else self.inner)(x))


@pytest.mark.parametrize("how", ["child", "deeper", "closure", "attribute"])
def test_a_wrapper_in_a_wrapped_module_runs_by_itself(how: str) -> None:
    inner, theirs = pair()
    outer, plain = ORTModule(Beside(inner, how)), Beside(theirs, how)
    outer.last.load_state_dict(plain.last.state_dict())
    x, _ = batch()
    for ours, other in ((outer, plain), (outer, plain), (inner, theirs)):
        out, expected = ours(x), other(x)
        assert_close(out, expected)
        for loss in (out, expected):
            loss.square().sum().backward()
        assert_same_grads(inner, theirs)
    assert outer.gradd_stats()["fallbacks"] in ({}, {"nested_wrapper": 2})
    assert inner.gradd_stats()["fallbacks"] == {} and inner.gradd_stats()["captures"] == 1


class Scaled(Net):
    """Python state that forward reads, and methods of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).sum() * self.factor

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) * 2

    def through_super(self) -> int:
        return len(list(super().parameters()))


def test_users_methods_run_through_the_daemon() -> None:
    ours, theirs = pair(Scaled())
    x, _ = batch()
    assert_close(ours.twice(x), theirs.twice(x))
    assert ours.gradd_stats()["forwards"] >= 1
    assert ours.through_super() == 4


class Outside(nn.Module):
    """A part that a script, or a method of its own, calls by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 4)
        self.more = nn.ModuleList([nn.Linear(8, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).tanh())


def test_parts_that_are_called_by_themselves_run_in_the_daemon() -> None:
    ours, theirs = pair(Outside())
    x, _ = batch()
    for model in (ours, theirs):
        loss = model(x).square().sum() + model.body(x * 2).sum()
        (loss + model.score(x).sum() + model.body[0](x).sum()).backward()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if not name.startswith("more"):
            assert_close(a.grad, b.grad, name)
    stats = ours.gradd_stats()
    assert stats["in_torch"] == {} and stats["mirrored"] == 0
    assert stats["captures"] == 4, "of the whole, body, head, and a layer of body"
    before = stats["forwards"]
    ours.body(x)
    assert ours.gradd_stats()["forwards"] > before


def test_a_part_is_the_child_but_for_its_calls() -> None:
    ours, _ = pair(Outside())
    x, _ = batch()
    child, seen = ours.module.body, []
    part = ours.body
    assert ours.body is part and isinstance(part, nn.Sequential) and repr(part) == repr(child)
    assert {part: 1}[child] == 1
    hook = part[0].register_forward_hook(lambda *_: seen.append(1))
    part.eval()
    ours(x)
    part(x)
    assert seen == [1, 1] and not child.training
    hook.remove()
    assert type(copy.deepcopy(part)) is type(pickle.loads(pickle.dumps(part))) is nn.Sequential
    ours.other = part
    assert ours.module.other is child
    ours.body = nn.Linear(8, 8)
    assert ours.body(x).shape == ours(x).shape[:1] + (8,)
    assert len(ours._gradd_parts) == 2, "of the new body, and of what ours.other is"


class Lists(nn.Module):
    """Modules in lists, which a script calls one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})
        self.scales = nn.ParameterList([torch.ones(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh() * self.scales[0]
        return torch.stack([self.heads[name](x) for name in self.heads]).sum(0)


def test_items_of_lists_run_in_the_daemon() -> None:
    ours, theirs = pair(Lists())
    x, _ = batch()
    for model in (ours, theirs):
        made = x
        for layer in model.layers:
            made = layer(made).tanh() * model.scales[0]
        loss = sum(head(made).square().sum() for head in model.heads.values())
        loss = loss + model.heads["a"](model.layers[-1](x)).sum()
        (loss + model(x).sum()).backward()
    for (name, a), b in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert_close(a.grad, b[1].grad, name)
    stats = ours.gradd_stats()
    assert stats["in_torch"] == {} and stats["captures"] == 5, "of the whole and four items"
    before = stats["forwards"]
    for _, head in ours.heads.items():
        head(x)
    assert ours.gradd_stats()["forwards"] >= before + 2
    assert list(ours.heads) == ["a", "b"] and "a" in ours.heads and len(ours.layers) == 2
    assert type(ours.scales) is nn.ParameterList, "there is nothing to call"


def test_lists_take_in_modules_and_no_parts() -> None:
    ours, _ = pair(Lists())
    x, _ = batch()
    layers = ours.module.layers
    assert ours.layers == layers and isinstance(ours.layers, nn.ModuleList)
    ours.layers.append(ours.layers[0]).extend([ours.layers[1]])
    ours.layers.insert(0, ours.layers[1])
    ours.layers += [nn.Linear(8, 8)]
    assert ours.module.layers is layers and len(layers) == 6
    assert len(ours.layers + ours.layers) == 12
    ours.heads.update({"c": ours.heads["a"]})
    assert ours(x).shape == (len(x), 4)
    ours.layers = nn.ModuleList([ours.layers[at] for at in (1, 3)])  # pruned
    ours.heads["b"] = ours.heads["a"]
    assert [type(m) for m in ours.module.layers] == [nn.Linear, nn.Linear], "the same one"
    assert {type(m) for m in ours.module.modules()} == {
        *(Lists, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.Linear)
    }
    assert ours(x).shape == (len(x), 4) and ours.layers[0](x).shape == x.shape
    assert ours.gradd_stats()["in_torch"] == {}
    assert not hasattr(ours.layers, "items") and not hasattr(ours.heads, "append")


def test_a_method_of_a_library_that_computes_runs_in_the_daemon() -> None:
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2}
    words = {**sizes, "vocab_size": 32, "max_position_embeddings": 16, "eos_token_id": 2}
    images = {**sizes, "image_size": 8, "patch_size": 4}
    config = CLIPConfig(text_config=words, vision_config=images, projection_dim=8)
    ours, theirs = pair(CLIPModel(config))
    ids = torch.randint(3, 32, (4, 10), generator=torch.Generator().manual_seed(0))
    for model in (ours, theirs):
        found = model.get_text_features(input_ids=ids)
        (found if torch.is_tensor(found) else found.pooler_output).square().sum().backward()
    compared = 0
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if b.grad is not None and "k_proj.bias" not in name:  # that is 0, but for rounding
            assert_close(a.grad, b.grad, name)
            compared += 1
    assert compared > 10
    stats = ours.gradd_stats()
    assert stats["in_torch"] == {} and stats["captures"] == 1 and stats["forwards"] >= 1
    signature = inspect.signature(CLIPModel.get_text_features)
    given = inspect.signature(ours.get_text_features)
    assert list(given.parameters) == list(signature.parameters)[1:]
    ours.get_text_features(input_ids=ids)
    assert ours.gradd_stats()["captures"] == 1, "the same graph again"
    assert ours.get_input_embeddings is not None and ours.num_parameters() > 0


def test_parts_do_not_keep_a_wrapper_alive() -> None:
    ours, _ = pair(Outside())
    ours.body(batch()[0])
    wrapper = weakref.ref(ours)
    del ours
    assert wrapper() is None


def test_items_of_a_container_are_replaced_and_deleted() -> None:
    layers = [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)]
    ours, theirs = pair(nn.Sequential(*layers))
    x = torch.randn(3, 6)
    head = nn.Linear(8, 3)
    assert_close(ours(x), theirs(x))
    ours[2], theirs[2] = head, copy.deepcopy(head)
    assert_close(ours(x), theirs(x))
    assert ours(x).shape == (3, 3)
    del ours[-1], theirs[-1]
    assert_close(ours(x), theirs(x))
    assert len(ours) == 2
    named = ORTModule(nn.ModuleDict({"a": head}))
    named["b"] = nn.ReLU()
    assert list(named) == ["a", "b"]
    assert "b" in named


def test_an_attribute_that_forward_reads_is_seen() -> None:
    ours, theirs = pair(Scaled())
    x, _ = batch()
    for factor in (1.0, 3.0, 1.0):
        ours.factor = theirs.factor = factor
        assert_close(ours(x), theirs(x))
    assert ours.module.factor == 1.0
    ours.module.factor = theirs.factor = 7.0
    assert_close(ours(x), theirs(x))


def test_numbers_and_texts_set_through_the_wrapper_are_captured_once() -> None:
    ours, theirs = pair(Scaled())
    x, _ = batch()
    for factor in (1.0, 3.0) * 3:
        ours.factor = theirs.factor = factor
        assert_close(ours(x), theirs(x))
    assert ours.gradd_stats()["captures"] == 2


def test_hooks_of_the_wrapper_run() -> None:
    ours, theirs = pair()
    x, y = batch()
    seen: list[str] = []
    for model in (ours, theirs):
        model.register_forward_hook(lambda *_: seen.append("forward"))
        model.register_full_backward_hook(lambda *_: seen.append("backward"))
        model(x.clone().requires_grad_(), y)[0].backward()
    assert seen == ["forward", "backward"] * 2
    assert_same_grads(ours, theirs)


@pytest.mark.parametrize("by_itself", [False, True])
@pytest.mark.parametrize("assigned", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_tables_of_hooks_are_those_of_the_child(
    before: bool, assigned: bool, by_itself: bool
) -> None:
    ours, theirs = pair(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    x = torch.ones(4, 8)
    calls: list[int] = []

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return out + 1

    table = module_tables.FORWARD_HOOKS
    for model in (ours, theirs):
        (getattr(model, "module", model) if before else model)[0].register_forward_hook(hook)
    for count in (1, 0):
        first, second = (m[0] if by_itself else m for m in (ours, theirs))
        assert_close(first(x), second(x))
        assert len(getattr(ours[0], table)) == len(getattr(ours.module[0], table)) == count
        for model in (ours, theirs):
            if assigned:
                setattr(model[0], table, type(getattr(model[0], table))())
            else:
                getattr(model[0], table).clear()
    assert calls == [1, 1]


class Counting(Net):
    """A buffer written in place, for which a capture goes through torch's decomposition."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        self.calls += 1
        return super().forward(x, y)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("counting", [True, False])
def test_inside_a_checkpoint(counting: bool, reentrant: bool) -> None:
    ours, theirs = pair(Counting() if counting else Net(dropout=0.0))
    x, y = batch()
    for model in (ours, theirs):
        start = x.clone().requires_grad_()
        loss, _ = checkpoint(model, start, y, use_reentrant=reentrant)
        loss.backward()
    assert_same_grads(ours, theirs)
    assert [*ours.buffers()] == [*theirs.buffers()]
    assert ours.gradd_stats()["self_checks"] == 1 + reentrant, "the first pass has no gradients"


class Structured(Net):
    """Nested inputs and outputs, Python constants among them."""

    def forward(
        self, inputs: dict[str, Any], pair: Pair, *, scale: float = 1.0, skip: Any = None
    ) -> dict[str, Any]:
        a = self.first(inputs["x"][0]) * scale
        b = self.first(pair.a) + pair.b
        return {"sum": a + b, "parts": (a, [b, None]), "note": "hello", "pair": Pair(a, b)}


def test_nested_inputs_and_outputs() -> None:
    ours, theirs = pair(Structured())
    x, z = batch(4, seed=1)[0], batch(4, seed=2)[0]
    call = ({"x": [x], "unused": None}, Pair(z, torch.tensor(2.0)))
    a, b = (m(*call, scale=0.5) for m in (ours, theirs))
    assert list(a) == list(b) and a["note"] == "hello" and a["parts"][1][1] is None
    assert type(a["pair"]) is Pair and type(a["parts"]) is tuple
    assert_close(a["sum"], b["sum"])
    assert_close(a["pair"].b, b["pair"].b)
    for result in (a, b):
        (result["sum"].sum() + result["pair"].a.mean()).backward()
    assert_same_grads(ours, theirs)


def test_keyword_order_does_not_matter() -> None:
    ours, theirs = pair()
    x, y = batch()
    assert_close(loss_of(ours(y=y, x=x)), loss_of(theirs(x, y)))
    assert_close(loss_of(ours(x=x, y=y)), loss_of(theirs(x, y)))
    assert ours.gradd_stats()["captures"] == 1


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x,
        lambda x: torch.cat([x, x])[6:],  # starts inside its storage
        lambda x: torch.stack([x, x], 2)[..., 1],  # strided
        lambda x: torch._neg_view(-x),  # a bit that says "negate when read"
        lambda x: x[:1].expand(6, 8),
        lambda x: nn.Parameter(x),
        lambda x: x.new_tensor(x.numpy()).index_select(1, torch.arange(8)),
    ],
    ids=["plain", "offset", "strided", "neg", "expanded", "parameter", "copied"],
)
def test_inputs_in_every_form_arrive_as_their_values(form) -> None:
    ours, theirs = pair()
    x, y = batch()
    x = form(x)
    with torch.no_grad():
        assert_close(loss_of(ours(x, y)), loss_of(theirs(x, y)), "loss")


def test_non_contiguous_inputs() -> None:
    ours, theirs = pair()
    x = torch.randn(8, 6).t()
    _, y = batch()
    assert not x.is_contiguous()
    assert_close(loss_of(ours(x, y)), loss_of(theirs(x, y)))


@pytest.mark.quick
def test_what_cannot_be_wrapped() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        ORTModule(lambda x: x)
    with pytest.raises(TypeError, match="DataParallel"):
        ORTModule(nn.DataParallel(Net()))
    with pytest.raises(NotImplementedError, match="DistributedDataParallel"):
        ORTModule(Net())._replicate_for_data_parallel()


def test_a_cell_that_runs_again(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = pair()
    for _ in range(3):
        again = ORTModule(ours)
        assert again.module is ours.module
        for model in (again, theirs):
            model.zero_grad()
            loss_of(model(*batch())).backward()
        assert_same_grads(again, theirs)
        ours = again
    assert sum("ORTModule already; the Net in it" in r.getMessage() for r in caplog.records) == 3


def test_isinstance_holds_for_the_module_too() -> None:
    ours, _ = pair()
    assert isinstance(ours, Net) and isinstance(ours, ORTModule) and isinstance(ours, nn.Module)
    assert ours.__class__ is Net and type(ours) is ORTModule
    assert not isinstance(ours, nn.Linear)
    for made in (copy.deepcopy(ours), copy.copy(ours)):
        assert type(made) is ORTModule and made.__class__ is Net
        made(*batch())


def test_a_wrapped_layer_is_parametrized() -> None:
    ours, theirs = ORTModule(nn.Linear(4, 4)), nn.Linear(4, 4)
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        nn.utils.parametrizations.weight_norm(model)
    assert type(ours) is ORTModule and isinstance(ours, nn.Linear)
    x = torch.randn(3, 4)
    for model in (ours, theirs):
        model(x).square().sum().backward()
    assert_same_grads(ours, theirs)


def test_a_kind_of_wrapper_of_ones_own() -> None:
    class Mine(ORTModule):
        pass

    ours = Mine(Net())
    for made in (ours, copy.deepcopy(ours)):
        assert type(made) is Mine and isinstance(made, Net)
        made(*batch())


def test_save_onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = DebugOptions(save_onnx=True, onnx_prefix="net", save_path=str(tmp_path))
    model = ORTModule(Net(), options, strict=True)
    model(*batch())
    model.eval()
    model(*batch())
    import onnx

    for mode in ("training", "inference"):
        saved = onnx.load(tmp_path / f"net_torch_exported_{mode}.onnx")
        assert {"first.weight", "second.bias"} <= {i.name for i in saved.graph.input}
        planned = onnx.load(tmp_path / f"net_execution_model_{mode}.onnx")
        notes = [{p.key for p in node.metadata_props} for node in planned.graph.node]
        assert any("gradd.kernel" in keys for keys in notes)
    model.train()(batch(1)[0])  # another form: the first file stays
    assert len(list(tmp_path.glob("net_torch_exported_training*.onnx"))) == 2
    assert (tmp_path / "net_torch_exported_training_2.onnx").exists()
    with pytest.raises(ValueError, match="onnx_prefix"):
        DebugOptions(save_onnx=True)
    with pytest.raises(TypeError, match="str, got"):
        DebugOptions(save_onnx=True, onnx_prefix=3)
    with pytest.raises(TypeError, match="LogLevel"):
        DebugOptions(log_level="INFO")
    with pytest.raises(OSError, match="nowhere"):
        DebugOptions(save_onnx=True, onnx_prefix="a", save_path=f"{tmp_path}/nowhere")
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
    over = DebugOptions(save_onnx=True, onnx_prefix="a", save_path=f"{tmp_path}/nowhere")
    assert over.save_path == tmp_path
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "ERROR")
    assert DebugOptions(log_level=LogLevel.INFO).log_level is LogLevel.ERROR


def test_import_of_the_package_loads_no_torch() -> None:
    import subprocess
    import sys

    root = ROOT / "adapters" / "python"
    code = "import sys, gradd; print('torch' in sys.modules, gradd.__version__)"
    output = subprocess.check_output(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(root)}, text=True
    )
    assert output.split() == ["False", "0.1.0"]


def test_a_forward_that_is_replaced_after_the_wrap() -> None:
    ours, theirs = pair()
    x, y = batch()
    first = ours._gradd_module, theirs
    assert_close(ours(x, y)[0], theirs(x, y)[0])
    for module in first:
        of = module.forward
        module.forward = lambda x, y, of=of: (of(x, y)[0] * 100, x)
    for model in (ours, theirs):
        model(x, y)[0].backward()
    assert_close(ours(x, y)[0], theirs(x, y)[0])
    assert_same_grads(ours, theirs)
    for module in first:
        del module.forward
    assert_close(ours(x, y)[0], theirs(x, y)[0])
    assert ours.gradd_stats()["fallbacks"] == {}

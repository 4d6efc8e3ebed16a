"""What a graph cannot hold is refused under a stable name, and leaves nothing changed."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from captured import Lambda, assert_same
from torch import nn
from torch.func import functional_call

from gradd import export


class Doubled(torch.autograd.Function):
    """A custom backward that a trace would lose."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 7


def _refused(module, *args, reason: str) -> str:
    apply, hook = torch.autograd.Function.apply, torch.Tensor.register_hook
    with pytest.raises(export.CaptureError) as caught:
        export.capture(module, args, {})
    assert caught.value.reason == reason, str(caught.value)
    assert torch.autograd.Function.apply == apply
    assert torch.Tensor.register_hook is hook
    return str(caught.value)


def _linear(forward) -> Lambda:
    return Lambda(forward, lin=nn.Linear(4, 4))


X = torch.ones(3, 4)


def test_forward_hook_is_named():
    module = _linear(lambda self, x: self.lin(x).mean())
    handle = module.lin.register_forward_hook(lambda m, a, out: out * 2)
    text = _refused(module, X, reason="forward_hooks")
    assert "lin (Linear)" in text
    handle.remove()
    assert_same(module, (X,))


def test_backward_hook():
    module = _linear(lambda self, x: self.lin(x).mean())
    module.lin.register_full_backward_hook(lambda m, gi, go: None)
    _refused(module, X, reason="backward_hooks")


def test_hook_on_a_tensor_in_forward():
    def forward(self, x):
        h = self.lin(x)
        h.register_hook(lambda g: g * 0.1)
        return h.mean()

    _refused(_linear(forward), X, reason="backward_hooks")


def test_autocast_of_another_device(monkeypatch):
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    with torch.autocast("cuda", torch.float16):
        text = _refused(_linear(lambda self, x: self.lin(x).mean()), X, reason="autocast")
    assert "float16" in text and "around the call" in text


def test_compound_operator_that_hides_casts():
    def forward(self, x):
        return torch.gru_cell(x, self.lin(x), *([self.lin.weight.repeat(3, 1)] * 2)).mean()

    with torch.autocast("cpu", torch.bfloat16):
        assert "gru_cell" in _refused(_linear(forward), X, reason="autocast")


def test_autograd_function():
    text = _refused(
        _linear(lambda self, x: Doubled.apply(self.lin(x)).mean()), X, reason="autograd_function"
    )
    assert "Doubled" in text


def test_autograd_function_hidden_by_the_module():
    def forward(self, x):
        try:
            return Doubled.apply(self.lin(x)).mean()
        except Exception:
            return self.lin(x).mean()

    _refused(_linear(forward), X, reason="autograd_function")


def test_function_taken_while_tracing_works_afterwards():
    """torch registers operators lazily and keeps their `apply`; so may a module."""
    taken = []

    def forward(x):
        taken.append(Doubled.apply)
        return x * 2

    export.capture(nn.Identity(), (torch.ones(3),), {}, forward=forward, observed=False)
    x = torch.ones(3, requires_grad=True)
    for apply in taken:
        assert apply(x).tolist() == [2, 2, 2]


def test_reentrant_checkpoint_is_no_custom_function():
    from torch.utils.checkpoint import checkpoint

    def forward(self, x):
        return checkpoint(self.lin, x, use_reentrant=True).square().mean()

    assert_same(_linear(forward), (X.clone().requires_grad_(),))


def test_branch_on_a_value():
    def forward(self, x):
        return self.lin(x).mean() if x.sum() > 0 else self.lin(-x).mean()

    text = _refused(_linear(forward), X, reason="data_dependent_control_flow")
    assert "test_export_refused.py" in text


def test_item():
    def forward(self, x):
        return self.lin(x).mean() * x.sum().item()

    _refused(_linear(forward), X, reason="data_dependent_control_flow")


def test_cond():
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: -y, (self.lin(x),)).mean()

    _refused(_linear(forward), X, reason="sequence_or_loop")


def test_unknown_argument_type():
    _refused(_linear(lambda self, x, o: self.lin(x)), X, object(), reason="unsupported_input_type")


def test_unknown_result_type():
    class Odd:
        pass

    _refused(_linear(lambda self, x: Odd()), X, reason="unsupported_output_type")


def test_argument_written_in_place():
    module = _linear(lambda self, x: self.lin(x.add_(1)).mean())
    _refused(module, X.clone(), reason="input_mutation")


@pytest.mark.parametrize(
    "change",
    [
        lambda given, y: given["rows"].append(y),
        lambda given, y: given.pop("x"),
        lambda given, y: given.update(x=y),
    ],
)
def test_containers_of_arguments_that_forward_changes(change):
    module = _linear(lambda self, given: (y := self.lin(given["x"]), change(given, y))[0].mean())
    _refused(module, {"x": X, "rows": [X]}, reason="input_mutation")


def test_operator_without_translation():
    module = _linear(lambda self, x: torch.linalg.svd(self.lin(x))[1].sum())
    text = _refused(module, X, reason="unsupported_operator")
    assert "svd" in text


def test_all_operators_without_translation_are_named():
    def forward(self, x):
        y = self.lin(x)
        apart = [torch.linalg.svd(y + i)[1].sum() for i in range(3)]
        return sum(apart) + torch.linalg.eigvals(y @ y.T).abs().sum()

    text = _refused(_linear(forward), X, reason="unsupported_operator")
    assert re.search(r"_linalg_svd\S* \(3 of them\); .*py:\d+: aten\.linalg_eig", text), text


def test_a_gradient_that_forward_takes_of_its_argument():
    def forward(self, x, w):
        return torch.autograd.grad((self.lin(x) * w).sum(), w, create_graph=True)[0]

    text = _refused(_linear(forward), X, X.clone().requires_grad_(), reason="export_failed")
    assert "torch.autograd.grad" in text


NAMED = {  # what is refused, its reason, and what else the text says
    "bucketize": (
        lambda self, x: self.lin(x) + torch.bucketize(x, x[:, 0]),
        "unsupported_operator",
        "py:",
    ),
    "repeat": (
        lambda self, x: self.lin(x).repeat_interleave(torch.tensor([1, 2, 3]), 0, output_size=6),
        "unsupported_operator",
        "aten.repeat_interleave.Tensor",
    ),
    "diagonal": (
        lambda self, x: self.lin(x).clone().fill_diagonal_(0.0),
        "unsupported_operator",
        "as_strided_scatter",
    ),
    "nothing": (lambda self, x: None, "unsupported_output_type", "returns no tensor"),
    "no leaves": (lambda self, x: (3, []), "unsupported_output_type", "returns no tensor"),
}


@pytest.mark.parametrize("case", NAMED)
def test_a_refusal_names_the_line(case):
    forward, reason, text = NAMED[case]
    found = _refused(_linear(forward), X, reason=reason)
    assert text in found and (".py:" in found or reason == "unsupported_output_type")


def test_failure_leaves_module_and_random_state():
    def forward(self, x):
        self.seen = x
        self.count = self.count + 1
        torch.rand(3)
        raise ValueError("broken on purpose")

    module = _linear(forward)
    module.count = 3
    torch.manual_seed(5)
    before = torch.get_rng_state()
    text = _refused(module, X, reason="export_failed")
    assert "broken on purpose" in text
    assert module.count == 3 and not hasattr(module, "seen")
    assert torch.equal(torch.get_rng_state(), before)


def _count(self, x):
    self.lin.calls += 1
    return self.lin(x).mean() * self.lin.calls


def _stash(self, x):
    self.features = self.lin(x)
    return self.features.mean()


def _stash_below(self, x):
    self.lin.features = self.lin(x)
    return self.lin.features.mean()


def _collect(self, x):
    self.outs["all"].append(self.lin(x))
    return self.outs["all"][-1].mean()


def _options(self, x):
    self.options.scale *= 2
    return self.lin(x).mean() * self.options.scale


def _forget(self, x):
    del self.outs
    return self.lin(x).mean()


def _size(self, x):
    self.size = x.shape[0]
    return self.lin(x).mean()


WRITERS = {
    _count: r"lin (Linear).calls",
    _stash: "the root (Lambda).features",
    _stash_below: "lin (Linear).features",
    _collect: "the root (Lambda).outs",
    _options: "the root (Lambda).options",
    _forget: "the root (Lambda).outs",
    _size: "the root (Lambda).size",
}


@pytest.mark.parametrize("forward", WRITERS, ids=lambda f: f.__name__.strip("_"))
def test_written_attributes_are_refused_and_put_back(forward):
    module = _linear(forward)
    module.lin.calls, module.outs, module.options = 1, {"all": []}, SimpleNamespace(scale=1.0)
    outs, kept = module.outs, module.outs["all"]
    assert WRITERS[forward] in _refused(module, X, reason="attribute_written")
    assert module.lin.calls == 1 and module.options.scale == 1.0
    assert module.outs is outs and outs == {"all": []} and outs["all"] is kept
    for part in (module, module.lin):
        assert not {"features", "size"} & set(part.__dict__)


def test_writing_what_is_there_is_allowed():
    def forward(self, x):
        self.scale, self.names = 2.0, ["a", "b"]
        return self.lin(x).mean() * self.scale

    module = _linear(forward)
    module.scale, module.names = 2.0, ["a", "b"]
    assert_same(module, (X,))


def test_buffers_may_be_written():
    def forward(self, x):
        self.steps.add_(1)
        self.mean = self.mean * 0.5 + x.mean(0)
        return (self.lin(x) * self.mean).mean()

    assert_same(
        Lambda(forward, lin=nn.Linear(4, 4), steps=torch.zeros(()), mean=torch.ones(4)), (X,)
    )


def _python(self, x):
    return self.lin(x).mean() * random.random()


def _numpy(self, x):
    return self.lin(x).mean() * float(np.random.rand())


def _own_python(self, x):
    return self.lin(x).mean() * self.draws.random()


def _own_numpy(self, x):
    return self.lin(x).mean() * float(self.lin.draws.random())


DRAWS = {
    _python: "Python's random",
    _numpy: "numpy.random",
    _own_python: "a random.Random",
    _own_numpy: "a numpy Generator",
}


@pytest.mark.parametrize("forward", DRAWS, ids=lambda f: f.__name__.strip("_"))
def test_random_numbers_that_are_not_torchs(forward):
    module = _linear(forward)
    module.draws, module.lin.draws = random.Random(1), np.random.default_rng(2)
    random.seed(3)
    np.random.seed(4)

    def drawn() -> tuple:
        return random.random(), np.random.rand(), module.draws.random(), module.lin.draws.random()

    expected = drawn()
    module.draws, module.lin.draws = random.Random(1), np.random.default_rng(2)
    random.seed(3)
    np.random.seed(4)
    assert DRAWS[forward] in _refused(module, X, reason="python_random")
    assert drawn() == expected


def test_unknown_reason_is_a_mistake():
    with pytest.raises(ValueError, match="unknown capture error reason"):
        export.CaptureError("no_such_reason", "text")


def test_the_reason_names_what_torch_takes_apart():
    def forward(self, x):
        return nn.functional.hardshrink(self.lin(x).relu_()).sum()

    text = _refused(_linear(forward), X, reason="unsupported_operator")
    assert "hardshrink.default is not translated beside relu_.default (" in text
    assert Path(__file__).name in text


def test_writes_that_torch_cannot_functionalise_are_named():
    def diagonal(self, x):
        return torch.diagonal(self.lin(x)).add_(-1).pow_(2).sum()

    def twice(self, x, y):
        x.add_(1)
        return (self.lin(x) + self.lin(y)).sum()

    text = _refused(_linear(diagonal), X, reason="unsupported_operator")
    assert "writes in place to a view" in text
    x = torch.ones(3, 4)
    text = _refused(_linear(twice), x, x, reason="input_mutation")
    assert "shares its memory with another" in text


@pytest.mark.parametrize("trained", [True, False])
def test_a_tensor_in_place_of_a_parameter_is_named(trained):
    net = _linear(lambda self, x: self.lin(x).sum())
    others = {n: (p * 2).detach().requires_grad_(trained) for n, p in net.named_parameters()}
    with pytest.raises(export.CaptureError, match="functional_call") as caught:
        functional_call(
            Lambda(lambda self, x: export.capture(self.net, (x,), {}), net=net),
            {f"net.{name}": value for name, value in others.items()},
            (X,),
        )
    assert caught.value.reason == "unsupported_parameter"

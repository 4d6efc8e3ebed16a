"""`model.forward` is replaced, as TRL, accelerate and users do, and still runs in the daemon."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

from gradd import ORTModule
from helpers.nets import assert_close

pytestmark = pytest.mark.usefixtures("shared_daemon")


class Plain(nn.Module):
    """With a signature, a docstring and something to call besides."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = 2.0, *, shift: int = 0) -> torch.Tensor:
        """What the module computes."""
        return self.lin(x) * scale + shift

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).tanh()


def _of_its_own(self, x):
    return nn.functional.linear(x, self.lin.weight, self.lin.bias) * 3


def _calls_methods(self, x):
    return self.head(x) + self.lin(x)


def _around(before: Callable) -> Callable:
    @functools.wraps(before)
    def around(*args, **kwargs):
        return before(*args, **kwargs) * 5

    return around


class Caller:
    """Like accelerate's ConvertOutputsToFp32: an object that holds the forward before."""

    def __init__(self, before: Callable) -> None:
        self.before = before

    def __call__(self, *args, **kwargs):
        return self.before(*args, **kwargs) + 7


def _only_sometimes(before: Callable) -> Callable:
    """Like TRL's fused head: it has the forward before, and goes around it."""

    @functools.wraps(Plain.forward)
    def forward(self, x, around=True):
        return self.lin(x) * 9 if around else before(x)

    return forward


BEFORE: list[Callable] = []


def _by_a_global(x):
    return BEFORE[-1](x) * 11


def _set(make: Callable) -> Callable:
    def replace(model: nn.Module) -> None:
        model.forward = make(model)

    return replace


REPLACEMENTS = {
    "method": _set(lambda m: types.MethodType(_of_its_own, m)),
    "method that calls others": _set(lambda m: types.MethodType(_calls_methods, m)),
    "bound by __get__": _set(lambda m: _of_its_own.__get__(m)),
    "partial": _set(lambda m: functools.partial(_of_its_own, m)),
    "lambda": _set(lambda m: lambda x: m.lin(x).relu()),
    "around": _set(lambda m: _around(m.forward)),
    "partial around": _set(lambda m: functools.partial(m.forward, scale=4.0)),
    "method around": _set(
        lambda m: types.MethodType((lambda before: lambda self, x: before(x) * 2)(m.forward), m)
    ),
    "object": _set(lambda m: Caller(m.forward)),
    "beside": _set(lambda m: types.MethodType(_only_sometimes(m.forward), m)),
}


def _pair() -> tuple[ORTModule, nn.Module]:
    torch.manual_seed(0)
    plain = Plain()
    return ORTModule(copy.deepcopy(plain)), plain


def _agree(ours: ORTModule, theirs: nn.Module, least_forwards: int = 1) -> None:
    """Two steps are equal, and the daemon has run them."""
    before = ours.gradd_stats()["forwards"]
    for seed in (1, 2):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        for model in (ours, theirs):
            model.zero_grad()
        mine, right = ours(x), theirs(x)
        assert_close(mine, right)
        mine.sum().backward(), right.sum().backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_close(a.grad, b.grad)
    stats = ours.gradd_stats()
    assert stats["fallbacks"] == {} and stats["breaks"] == 0
    assert stats["forwards"] - before >= 2 * least_forwards


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_a_replaced_forward_runs_in_the_daemon(
    replace: Callable, called_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    ours, theirs = _pair()
    if called_before:
        _agree(ours, theirs)
    for model in (theirs, ours):
        replace(model)
    _agree(ours, theirs)
    for model in (ours, theirs):
        del model.forward
    _agree(ours, theirs)


@pytest.mark.parametrize("wrap", [False, True])
def test_a_replacement_that_finds_the_one_before_in_a_global(wrap: bool) -> None:
    model = _pair()[0 if wrap else 1]
    BEFORE.append(model.forward)
    model.forward = _by_a_global
    x = torch.randn(3, 4)
    assert_close(model(x), (model.lin(x) * 2) * 11)
    if wrap:
        assert model.gradd_stats()["forwards"] > 0
        assert model.gradd_stats()["fallbacks"] == {}
    BEFORE.clear()


def test_replaced_twice_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    ours, theirs = _pair()
    for model in (ours, theirs):
        model.forward = types.MethodType(_of_its_own, model)
        model.forward = _around(model.forward)
        model.forward = Caller(model.forward)
    _agree(ours, theirs)
    for model in (ours, theirs):
        del model.forward
    assert "forward" not in vars(ours.module)
    _agree(ours, theirs)


def test_what_was_taken_before_means_what_it_meant() -> None:
    ours, theirs = _pair()
    old = [model.forward for model in (ours, theirs)]
    for model in (ours, theirs):
        model.forward = types.MethodType(_of_its_own, model)
    x = torch.randn(3, 4)
    assert_close(old[0](x), old[1](x))
    assert_close(ours(x), theirs(x))
    assert_close(ours.forward(x), theirs.forward(x))


def test_a_class_whose_forward_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = _pair()
    _agree(ours, theirs)
    monkeypatch.setattr(Plain, "forward", _of_its_own)
    _agree(ours, theirs)


def test_the_signature_is_the_modules() -> None:
    ours, theirs = _pair()
    assert inspect.signature(ours.forward) == inspect.signature(theirs.forward)
    assert ours.forward.__doc__ == theirs.forward.__doc__
    assert ours.forward == ours.forward
    assert callable(ORTModule.forward) and inspect.signature(ORTModule.forward)
    for model in (ours, theirs):
        model.forward = types.MethodType(_of_its_own, model)
    assert list(inspect.signature(ours.forward).parameters) == ["x"]


def test_trainer_keeps_the_columns_of_a_wrapped_model(tmp_path: object) -> None:
    config = transformers.GPT2Config(
        vocab_size=16, n_embd=8, n_head=2, n_layer=1, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    rows = [
        {"input_ids": torch.arange(8), "labels": torch.arange(8), "row": torch.tensor(i)}
        for i in range(8)
    ]
    losses = []
    for wrap in (False, True):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).eval()
        args = transformers.TrainingArguments(
            str(tmp_path), max_steps=2, report_to=[], use_cpu=True, save_strategy="no"
        )
        model = ORTModule(model) if wrap else model
        result = transformers.Trainer(model=model, args=args, train_dataset=rows).train()
        losses.append(result.training_loss)
    assert model.gradd_stats()["forwards"] >= 2
    assert losses[0] == pytest.approx(losses[1], rel=0.2)  # dropout draws other numbers


def test_a_name_that_was_copied_is_no_call() -> None:
    """functools.wraps of the class's forward says nothing about the function that is called."""
    ours, theirs = _pair()

    @functools.wraps(type(ours).forward)
    def forward(self, x):
        return self.lin(x) * 4

    for model in (ours, theirs):
        model.forward = types.MethodType(forward, model)
    _agree(ours, theirs)

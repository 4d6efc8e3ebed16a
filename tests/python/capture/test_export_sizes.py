"""One capture serves all sizes, or says which size it was specialised on."""

from __future__ import annotations

import copy

import models
import pytest
import sympy
import torch
import torch.nn.functional as F
from captured import Lambda, assert_same
from selection import every_run
from torch import nn
from torch.utils._sympy.functions import Mod

from gradd import ORTModule, export, spec
from gradd.export import dims

SIZES = [(3, 9), (1, 9), (2, 1), (1, 1)]


@pytest.mark.parametrize("first", every_run(((3, 9), (1, 1)), SIZES))
def test_llama_from_any_first_batch(first):
    module, make_batch = models.build("llama")

    def make(sizes):
        batch = make_batch(*sizes, 1)
        if first[1] == 1:  # without a next token there is no loss
            batch.pop("labels")
        return batch

    cap = assert_same(module, (), make(first), ort=False)
    for sizes in ((1, 7), (4, 12), (2, 2), (3, 1)):
        other = make(sizes)
        if [n == 1 for n in sizes] == [n == 1 for n in first]:
            assert_same(module, (), other, cap=cap, ort=False)
        else:
            assert export.check_dynamic(cap, (), other) is not None


def _centred(self, x):
    h = self.lin(x)
    return (h - h.mean(0) if x.shape[0] > 1 else h).square().mean()


BY_ONE = {
    "branch": _centred,
    "squeeze": lambda self, x: self.lin(x)[:, :1].squeeze(),
    "squeeze_all": lambda self, x: self.lin(x).squeeze(),
    "broadcast": lambda self, x: (
        (self.lin(x) * torch.ones(3, 1)).square().mean()
        if x.shape[0] in (1, 3)
        else self.lin(x).mean()
    ),
}


@pytest.mark.parametrize("sizes", [(4, 1), (1, 4)])
@pytest.mark.parametrize("name", BY_ONE)
def test_one_row_is_another_graph(name, sizes):
    module = Lambda(BY_ONE[name], lin=nn.Linear(4, 4))
    cap = assert_same(module, (torch.randn(sizes[0], 4),), ort=False)
    last = (torch.randn(sizes[1], 4),)
    assert export.check_dynamic(cap, last, {}) is not None
    assert_same(module, last, ort=False)


def test_channels_of_size_one_stay_fixed():
    def forward(self, x):
        return self.lin(x.transpose(1, 2)).square().mean()

    module = Lambda(forward, lin=nn.Linear(1, 3))
    cap = assert_same(module, (torch.randn(2, 1, 5),))
    assert_same(module, (torch.randn(4, 1, 8),), cap=cap)
    assert export.check_dynamic(cap, (torch.randn(4, 2, 8),), {}) is not None


def test_inputs_broadcast_over_the_batch_stay_broadcast():
    module = Lambda(lambda self, x, m: (self.lin(x) * m).square().mean(), lin=nn.Linear(3, 3))
    cap = export.capture(module, (torch.randn(2, 3), torch.randn(1, 3)), {})
    assert_same(module, (torch.randn(5, 3), torch.randn(1, 3)), cap=cap)


def test_specialised_size_is_reported():
    def forward(self, x):
        for _ in range(x.shape[1]):
            x = self.lin(x)
        return x.square().mean()

    module = Lambda(forward, lin=nn.Linear(4, 4))
    cap = assert_same(module, (torch.randn(3, 4),))
    assert export.check_dynamic(cap, (torch.randn(9, 4),), {}) is None
    assert "leaf 0 axis 1" in export.check_dynamic(cap, (torch.randn(9, 5),), {})


def test_equal_sizes_are_required_where_the_module_requires_them():
    module = Lambda(lambda self, x, y: (self.lin(x) - y).square().mean(), lin=nn.Linear(4, 4))
    cap = assert_same(module, (torch.randn(3, 4), torch.randn(3, 4)))
    assert export.check_dynamic(cap, (torch.randn(5, 4), torch.randn(5, 4)), {}) is None
    assert export.check_dynamic(cap, (torch.randn(5, 4), torch.randn(6, 4)), {}) is not None


def test_learned_positions_bound_the_length():
    module, make_batch = models.build("gpt2")
    cap = export.capture(module, (), make_batch(2, 9, 0))
    assert export.check_dynamic(cap, (), make_batch(2, 64, 0)) is None


@pytest.mark.parametrize("items", [17, torch.tensor(17)])
def test_number_of_items_is_an_input(items):
    module, make_batch = models.build("llama")
    cap = assert_same(module, (), {**make_batch(2, 6, 0), "num_items_in_batch": items})
    assert any(i.name == "num_items_in_batch" and i.dtype == "i64" for i in cap.inputs)
    other = {**make_batch(3, 8, 0), "num_items_in_batch": 5}
    assert_same(module, (), other, cap=cap)


def _rows(self, x):
    total = 0
    for row in self.lin(x):
        total = total + row.sum() * row
    return total


UNPACKED = {
    "edges": (lambda self, x, pair: _edges(self.lin(x), *pair), lambda n: (2, n)),
    "rows": (lambda self, x, pair: _rows(self, x), lambda n: (n, 1)),
    "axis": (lambda self, x, pair: sum(self.lin(x).T.unbind(-1)), lambda n: (2, n)),
}


def _edges(h, source, target):
    return torch.zeros_like(h).index_add(0, target, h[source])


@pytest.mark.usefixtures("shared_daemon")
@pytest.mark.parametrize("name", UNPACKED)
def test_a_tensor_is_unpacked_into_its_rows(name):
    function, shape = UNPACKED[name]
    net = Lambda(function, lin=nn.Linear(4, 4))
    mine, theirs = ORTModule(copy.deepcopy(net), strict=True), net
    for n in (3, 5, 3, 1):
        x, pair = torch.randn(n, 4), torch.randint(0, n, shape(n))
        results = []
        for module in (mine, theirs):
            module.zero_grad()
            result = module(x, pair)
            result.square().sum().backward()
            results.append((result, module.lin.weight.grad))
        torch.testing.assert_close(*results)
    assert not mine.gradd_stats()["fallbacks"]


@pytest.mark.usefixtures("shared_daemon")
def test_a_tensor_of_other_rows_is_not_unpacked_as_before():
    net = ORTModule(Lambda(UNPACKED["edges"][0], lin=nn.Linear(4, 4)))
    net(torch.randn(3, 4), torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(TypeError, match="takes 3 positional arguments but 4"):
        net(torch.randn(3, 4), torch.zeros(3, 3, dtype=torch.long))


def _daemon_agrees(net: nn.Module, inputs: list[torch.Tensor]) -> ORTModule:
    mine = ORTModule(copy.deepcopy(net), strict=True)
    for x in inputs:
        results = []
        for module in (mine, net):
            module.zero_grad()
            result = module(x)
            (result * (torch.arange(result.numel()) % 7).view_as(result)).sum().backward()
            results.append((result, module.lin.weight.grad))
        torch.testing.assert_close(*results)
    return mine


# torch takes them apart in another way for each remainder.
WINDOWS = {
    "average": lambda y: F.adaptive_avg_pool1d(y, 3),
    "average of images": lambda y: F.adaptive_avg_pool2d(y[:, None], (3, 5)),
    "area": lambda y: F.interpolate(y[:, None], size=(3, 5), mode="area"),
}


@pytest.mark.usefixtures("shared_daemon")
@pytest.mark.parametrize("name", every_run({"average"}, WINDOWS))
def test_windows_that_do_not_divide_a_size(name):
    net = Lambda(lambda self, x: WINDOWS[name](self.lin(x).transpose(1, 2)), lin=nn.Linear(4, 4))
    mine = _daemon_agrees(net, [torch.randn(2, n, 4) for n in (7, 8, 13)])
    assert mine.gradd_stats()["captures"] == 2


TIMES = {
    "rows": lambda y, n: y.repeat_interleave(n, 0),
    "columns": lambda y, n: y.repeat_interleave(n, -1),
    "all": lambda y, n: y.repeat_interleave(n),
    "computed": lambda y, n: torch.repeat_interleave(y, n // 2, dim=1),
}


@pytest.mark.usefixtures("shared_daemon")
@pytest.mark.parametrize("name", TIMES)
def test_elements_are_repeated_as_often_as_a_size_says(name):
    net = Lambda(lambda self, x: TIMES[name](self.lin(x), x.shape[0]), lin=nn.Linear(4, 3))
    mine = _daemon_agrees(net, [torch.randn(n, 4) for n in (5, 7, 4)])
    assert mine.gradd_stats()["captures"] == 1


DECISIONS = {
    "product": lambda y, n: y * (n > 5),
    "sum": lambda y, n: (n > 5) + y,
    "both": lambda y, n: y * ((y > 0) & (n > 5)),
    "either": lambda y, n: y * ((y > 0) | (n > 5)),
    "one of two": lambda y, n: y * ((y > 0) ^ (n > 5)),
    "equal": lambda y, n: y * ((y > 0) == (n > 5)),
    "of numbers": lambda y, n: y * (torch.ones_like(y).long() * (n > 5)),
}


@pytest.mark.usefixtures("shared_daemon")
@pytest.mark.parametrize("name", every_run({"product", "both"}, DECISIONS))
def test_a_decision_about_a_size_is_a_number(name, monkeypatch):
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    net = Lambda(lambda self, x: DECISIONS[name](self.lin(x), x.shape[0]), lin=nn.Linear(4, 3))
    _daemon_agrees(net, [torch.randn(n, 4) for n in (7, 3, 6, 5)])


@pytest.mark.quick
def test_a_decision_about_another_size_is_refused():
    known, other = (sympy.Symbol(name, integer=True) for name in ("s0", "u0"))
    rules = spec.DimRules(((0, ("s0",)),), (), ())
    new = dims.with_decisions(rules, [sympy.Eq(Mod(known, 3), 1)], [(7,)])
    assert dims.violated(new, [(10,)]) is None
    assert "does not hold" in dims.violated(new, [(8,)])
    with pytest.raises(export.CaptureError, match="sizes of no argument"):
        dims.with_decisions(rules, [sympy.Eq(other, 1)], [(7,)])


EMPTIED = {
    "flatten": lambda h: h[:, :-1].flatten(0, 1),
    "flatten all": lambda h: h[:, :-1].flatten(),
    "flatten behind": lambda h: h[:, :-1].flatten(1),
    "reshape": lambda h: h[:, :-1].reshape(h.shape[0] * (h.shape[1] - 1), 4),
    "reshape to three": lambda h: h[:, :-1].reshape(h.shape[0], h.shape[1] - 1, 2, 2),
    "view": lambda h: h[:, :-1].contiguous().view(h.shape[0], (h.shape[1] - 1) * 4),
    "minus one": lambda h: h[:, :-1].reshape(-1, 4),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", EMPTIED)
def test_an_axis_without_elements_stays_one(shared_daemon, name):
    """What is left of sequences of one position: a size of zero copies no axis."""
    change = EMPTIED[name]
    module = Lambda(lambda self, x: change(self.lin(x)), lin=nn.Linear(4, 4))
    model = ORTModule(copy.deepcopy(module), strict=True)
    for sizes in ((3, 5), (3, 1), (1, 1), (2, 5)):
        x = torch.randn(*sizes, 4)
        want, got = module(x), model(x)
        assert got.shape == want.shape
        torch.testing.assert_close(got, want)
        got.sum().backward()

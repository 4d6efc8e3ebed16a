"""One graph serves all sizes, or another one is made where a size decides something."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradd import ORTModule
from helpers.graphs.captures import Lambda, assert_same
from helpers.models import families
from helpers.nets import determinants
from helpers.selection import every_run, quick_or_slow

pytestmark = [pytest.mark.one_in(3), pytest.mark.usefixtures("shared_daemon")]


def _centred(self, x):
    h = self.lin(x)
    return (h - h.mean(0) if x.shape[0] > 1 else h).square().mean()


def _as_often_as_wide(self, x):
    for _ in range(x.shape[1]):
        x = self.lin(x.sum(1, keepdim=True).expand(-1, 4))
    return x.square().mean()


BY_SIZE = {
    "branch": _centred,
    "squeeze": lambda self, x: self.lin(x)[:, :1].squeeze(),
    "squeeze all": lambda self, x: self.lin(x).squeeze(),
    "broadcast": lambda self, x: (
        (self.lin(x) * torch.ones(3, 1)).square().mean()
        if x.shape[0] in (1, 3)
        else self.lin(x).mean()
    ),
    "two arguments": lambda self, x: (self.lin(x) - x[: len(x)]).square().mean(),
}


@pytest.mark.parametrize("rows", [(4, 1, 3, 4), (1, 4, 5, 1)])
@pytest.mark.parametrize("name", BY_SIZE)
def test_one_row_may_be_another_graph(name: str, rows: tuple[int, ...]) -> None:
    net = Lambda(BY_SIZE[name], lin=nn.Linear(4, 4))
    assert_same(net, *((torch.randn(n, 4),) for n in rows), captures=None)


def test_a_loop_over_a_size() -> None:
    net = Lambda(_as_often_as_wide, lin=nn.Linear(4, 4))
    shapes = [(3, 4), (9, 4), (3, 2), (5, 4)]
    assert_same(net, *((torch.randn(*shape),) for shape in shapes), captures=None)


def test_what_is_broadcast_over_the_batch_stays_broadcast() -> None:
    net = Lambda(lambda self, x, m: (self.lin(x) * m).square().mean(), lin=nn.Linear(3, 3))
    assert_same(net, *((torch.randn(n, 3), torch.randn(1, 3)) for n in (2, 5)))


@pytest.mark.one_in(4)
def test_llama_from_batches_of_any_size() -> None:
    """Without a next token there is no loss."""
    module, make_batch = families.build("llama")
    calls = []
    for sizes in ((1, 1), (3, 9), (1, 7), (4, 12), (3, 1)):
        batch = make_batch(*sizes, 1)
        if sizes[1] == 1:
            batch.pop("labels")
        calls.append((batch,))
    assert_same(module, *calls, captures=None)


def test_number_of_items_is_an_input() -> None:
    module, make_batch = families.build("llama")
    calls = [
        ({**make_batch(2 + i, 6 + i, 0), "num_items_in_batch": n},)
        for i, n in enumerate((17, 5, torch.tensor(17), torch.tensor(9)))
    ]
    assert_same(module, *calls, captures=None)


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


def test_a_tensor_of_other_rows_is_not_unpacked_as_before():
    net = ORTModule(Lambda(UNPACKED["edges"][0], lin=nn.Linear(4, 4)))
    net(torch.randn(3, 4), torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(TypeError, match="takes 3 positional arguments but 4"):
        net(torch.randn(3, 4), torch.zeros(3, 3, dtype=torch.long))


def _daemon_agrees(net: nn.Module, inputs: list[torch.Tensor], strict: bool = True) -> ORTModule:
    mine = ORTModule(copy.deepcopy(net), strict=strict)
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


@pytest.mark.parametrize("name", every_run({"average"}, WINDOWS))
def test_windows_that_do_not_divide_a_size(name):
    net = Lambda(lambda self, x: WINDOWS[name](self.lin(x).transpose(1, 2)), lin=nn.Linear(4, 4))
    _daemon_agrees(net, [torch.randn(2, n, 4) for n in (7, 8, 13)])


TIMES = {
    "rows": lambda y, n: y.repeat_interleave(n, 0),
    "columns": lambda y, n: y.repeat_interleave(n, -1),
    "all": lambda y, n: y.repeat_interleave(n),
    "computed": lambda y, n: torch.repeat_interleave(y, n // 2, dim=1),
}


@pytest.mark.parametrize("name", TIMES)
def test_elements_are_repeated_as_often_as_a_size_says(name):
    net = Lambda(lambda self, x: TIMES[name](self.lin(x), x.shape[0]), lin=nn.Linear(4, 3))
    mine = _daemon_agrees(net, [torch.randn(n, 4) for n in (5, 7, 4)])
    assert mine.gradd_stats()["captures"] == 1


CELLS = {
    "GRU": (nn.GRUCell, lambda self, x: self.cell(x, self.lin(x))),
    "LSTM": (nn.LSTMCell, lambda self, x: self.cell(x, (self.lin(x), x))[1]),
    "RNN": (nn.RNNCell, lambda self, x: self.cell(x)),
    "steps": (nn.GRUCell, lambda self, x: self.cell(x * 2, self.cell(x))),
}


@pytest.mark.parametrize("name", CELLS)
def test_a_recurrent_cell_serves_batches_of_any_size(name):
    kind, forward = CELLS[name]
    net = Lambda(forward, lin=nn.Linear(4, 4), cell=kind(4, 4))
    mine = assert_same(net, *((torch.randn(n, 4),) for n in (3, 5, 2, 6)))
    assert mine.gradd_stats()["graphs"] == 1


def _shifted(self, x):
    """Writes to what it has made, as models do with labels, beside what runs in PyTorch."""
    h = determinants(self.lin(x))[:, 1:-1]
    shifted = x.new_zeros(x.shape)
    shifted[:, 1:] = x[:, :-1].clone()
    shifted[:, 0] = 3
    shifted.masked_fill_(shifted < 0, 1)
    return (h - shifted[:, 1:-1]).square().mean()


def test_what_a_graph_writes_beside_a_cut_fixes_no_size():
    net = Lambda(_shifted, lin=nn.Linear(4, 4))
    mine = _daemon_agrees(net, [torch.randn(n, 4) for n in (3, 5, 2, 6)], strict=False)
    assert mine.gradd_stats()["graphs"] == 1


def _halved(self, x):
    """What goes into the second piece has axes of (n - 2) // 2 alone."""
    h = self.lin(x)[:, None].flatten(2).repeat(1, 2, 1)
    h = determinants(h[..., 3::2])
    b, c, n = h.shape
    h = self.out(h.mT.reshape(b * n, c)).relu().view(b, n, 3)
    return h[:, : n // 2].reshape(b, -1, 3).mean(1)


def test_sizes_behind_a_cut_are_those_of_its_result():
    net = Lambda(_halved, lin=nn.Linear(4, 4), out=nn.Linear(2, 3))
    mine = _daemon_agrees(net, [torch.randn(n, 7, 4) for n in (3, 5, 2, 6)], strict=False)
    stats = mine.gradd_stats()
    assert stats["graphs"] == 1 and stats["captures"] == 3  # one of all, before it was cut
    assert list(stats["parts_in_torch"]) == ["unsupported"]


DECISIONS = {
    "product": lambda y, n: y * (n > 5),
    "sum": lambda y, n: (n > 5) + y,
    "both": lambda y, n: y * ((y > 0) & (n > 5)),
    "either": lambda y, n: y * ((y > 0) | (n > 5)),
    "one of two": lambda y, n: y * ((y > 0) ^ (n > 5)),
    "equal": lambda y, n: y * ((y > 0) == (n > 5)),
    "of numbers": lambda y, n: y * (torch.ones_like(y).long() * (n > 5)),
}


@pytest.mark.parametrize("name", every_run({"product", "both"}, DECISIONS))
def test_a_decision_about_a_size_is_a_number(name, monkeypatch):
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    net = Lambda(lambda self, x: DECISIONS[name](self.lin(x), x.shape[0]), lin=nn.Linear(4, 3))
    _daemon_agrees(net, [torch.randn(n, 4) for n in (7, 3, 6, 5)])


EMPTIED = {
    "flatten": lambda h: h[:, :-1].flatten(0, 1),
    "flatten all": lambda h: h[:, :-1].flatten(),
    "flatten behind": lambda h: h[:, :-1].flatten(1),
    "reshape": lambda h: h[:, :-1].reshape(h.shape[0] * (h.shape[1] - 1), 4),
    "reshape to three": lambda h: h[:, :-1].reshape(h.shape[0], h.shape[1] - 1, 2, 2),
    "view": lambda h: h[:, :-1].contiguous().view(h.shape[0], (h.shape[1] - 1) * 4),
    "minus one": lambda h: h[:, :-1].reshape(-1, 4),
}


@pytest.mark.parametrize("name", quick_or_slow({"flatten"}, EMPTIED))
def test_an_axis_without_elements_stays_one(name):
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

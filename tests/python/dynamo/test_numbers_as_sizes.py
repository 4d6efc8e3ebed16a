"""Python numbers of a call that decide about sizes: plans know them, as they know sizes.

Those that a call reads out of its arguments too: no graph breaks at them."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import torch_compilable_check

from gradd import ORTModule, errors
from gradd.dynamo import arithmetic, program
from gradd.dynamo.tracers import readings
from helpers.graphs.captures import Lambda, assert_same
from helpers.models import families

pytestmark = pytest.mark.usefixtures("shared_daemon")


def _assigned(x, n):
    y = x.clone()
    y[:, :n] = 0  # only inside of this is a tensor of that size
    return y


def _masked(x, n):
    return x.masked_fill((torch.arange(x.shape[1]) >= n)[None, :, None], 0.0)


USES = {
    "the last": lambda x, n: x[:, -n:],
    "the first": lambda x, n: x[:, :n],
    "from one on": lambda x, n: x[:, n:],
    "all but the last": lambda x, n: x[:, :-n],
    "a range beside others": lambda x, n: x[:, -n:] * torch.arange(x.shape[1])[-n:, None],
    "a range": lambda x, n: x.sum(1, keepdim=True) * torch.arange(n)[:, None],
    "expanded": lambda x, n: x[:, :1].expand(-1, n, -1) * 2,
    "viewed": lambda x, n: x[:, : 2 * n].reshape(len(x), n, 2, -1).sum(2),
    "zeros": lambda x, n: x.sum(1, keepdim=True) + torch.zeros(n, 1),
    "a factor as well": lambda x, n: x[:, -n:] * n / (n + 1),
    "assigned": _assigned,
    "compared": _masked,
    "padded": lambda x, n: F.pad(x, (0, 0, n, 0)),
    "repeated": lambda x, n: x.repeat(1, n, 1),
    "beyond the end": lambda x, n: x[:, : n + 20],
}
# Length and number: either changes alone, both do, and the first pair comes again.
_CALLS = ((12, 3), (12, 4), (14, 5), (13, 5), (12, 3), (14, 2))


@pytest.mark.parametrize("name", USES)
def test_a_number_that_decides_about_sizes(name: str) -> None:
    def forward(self, x, n):
        return self.out(torch.tanh(USES[name](self.lin(x), n))).square().mean()

    torch.manual_seed(0)
    net = Lambda(forward, lin=nn.Linear(4, 4), out=nn.Linear(4, 4))
    calls = [(torch.randn(3, length, 4), n) for length, n in _CALLS]
    ours = assert_same(net, *calls, captures=2)
    before = ours.gradd_stats()["plans"]
    ours(*calls[1]).backward()
    assert ours.gradd_stats()["plans"] == before


NUMPYS_USES = {
    "a size": lambda x, n: x[:n],
    "a range": lambda x, n: x.sum() * torch.arange(n),
    "a factor": lambda x, n: x * n,
    "a size and a factor": lambda x, n: x[:n] * n,
    "a quotient": lambda x, n: x * (2 * n + 1) / n,
    "python's arithmetic": lambda x, n: x * math.sqrt(n),
}


def compared(forward: Callable) -> ORTModule:
    """Steps with numbers of NumPy in `self.n`, beside PyTorch; the loss may come with more."""
    torch.manual_seed(0)
    net = Lambda(forward, lin=nn.Linear(4, 4))
    ours = ORTModule(copy.deepcopy(net))
    for n in (2, 3, 5, 2):
        net.n = ours.module.n = np.int64(n)
        x = torch.randn(6, 4)
        expected, found = net(x), ours(x)
        torch.testing.assert_close(found, expected)
        for result in (expected, found):
            (result[0] if isinstance(result, tuple) else result).backward()
    for mine, reference in zip(ours.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-5, atol=1e-4)
    return ours


@pytest.mark.parametrize("name", NUMPYS_USES)
def test_a_whole_number_of_numpy(name: str) -> None:
    """Dynamo hands it over in a tensor, and takes it out in the graph."""

    def forward(self, x):
        return NUMPYS_USES[name](self.lin(x), int(self.n)).sin().sum()

    ours = compared(forward)
    assert ours.gradd_stats()["in_torch"] == {}


UNKNOWN_USES = {
    **NUMPYS_USES,
    "in parts": lambda x, n: torch.linalg.qr(x[:n])[1].abs() + x[:n].exp().sum() * n,
    "a view": lambda x, n: x.as_strided((n, 2), (1, 1)) * x.cos().sum(),
    "zeros": lambda x, n: x.sum() + torch.zeros(n, n),
}


@pytest.mark.parametrize("name", UNKNOWN_USES)
def test_a_number_that_no_argument_gives_is_pytorchs(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that torch takes out of an argument in a way that we do not know."""
    monkeypatch.setattr(arithmetic, "taken_from", lambda node: None)

    def forward(self, x):
        return UNKNOWN_USES[name](self.lin(x), int(self.n)).sin().sum(), int(self.n) + 1

    ours = compared(forward)
    assert ours.gradd_stats()["in_torch"].keys() == {"data_dependent_control_flow"}
    assert "needs the number s" in caplog.text
    with pytest.raises(errors.UnsupportedError, match="cannot be planned: .* needs the number s"):
        ours.gradd_explain(torch.randn(6, 4))


def test_a_number_of_more_than_64_bits_raises_pytorchs_error() -> None:
    model = ORTModule(Lambda(lambda self, x, n: self.lin(x) + n, lin=nn.Linear(4, 4)))
    for n in (2, 3):
        model(torch.ones(2, 4), n)
    with pytest.raises(OverflowError, match="int too big to convert"):
        model(torch.ones(2, 4), 10**20)
    model(torch.ones(2, 4), 4)


def test_whole_numbers_do_not_wrap_around() -> None:
    def forward(self, x, n):
        return (self.lin(x) * (n**4 % 1000) + min(n * n * n * n, 7) + n * 2654435761 % 97).mean()

    calls = [(torch.randn(3, 4), n) for n in (2, 3, 100_000, 2**40, -(2**35), -7)]
    assert_same(Lambda(forward, lin=nn.Linear(4, 4)), *calls, captures=2)


def test_a_counter_has_a_plan_for_each_size_that_it_gives() -> None:
    def forward(self, x, step):
        return (self.lin(x)[:, step % 4 + 1 :] * step).square().mean()

    calls = [(torch.randn(3, 9, 4), step) for step in range(2, 16)]
    ours = assert_same(Lambda(forward, lin=nn.Linear(4, 4)), *calls, captures=2)
    assert ours.gradd_stats()["plans"] == 1 + 4


def test_a_number_of_either_sign() -> None:
    def forward(self, x, n):
        return self.lin(x)[:, n:].square().mean()

    calls = [(torch.randn(3, 9, 4), n) for n in (2, 3, -2, 4, -5, 2)]
    assert_same(Lambda(forward, lin=nn.Linear(4, 4)), *calls, captures=None)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_llama_keeps_the_last_logits(padded: bool, training: bool) -> None:
    module, make_batch = families.build("llama")
    module.train(training)
    calls = []
    for seq, keep in ((9, 5), (11, 6), (10, 7), (9, 5), (11, 4)):
        ids = make_batch(3, seq, 0)["input_ids"]
        mask = torch.ones_like(ids)
        mask[0, seq - 3 :] = not padded
        calls.append(({"input_ids": ids, "attention_mask": mask, "logits_to_keep": keep},))
    ours = assert_same(module, *calls, captures=None)
    assert ours.gradd_stats()["graphs"] == 2


def _captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of operators of each translation from now on."""
    found, make = [], program.capture

    def counted(done, *args, **kwargs):
        found.append(len(done.graph.nodes))
        return make(done, *args, **kwargs)

    monkeypatch.setattr(program, "capture", counted)
    return found


def test_a_moving_window_is_cut_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table at an offset: one plan for all offsets, and PyTorch takes the rows."""

    def forward(self, x, at):
        for layer in self.layers:
            x = torch.tanh(layer(x + self.table[at : at + x.shape[1]]))
        return x.square().mean()

    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    net = Lambda(forward, layers=layers, table=nn.Parameter(torch.randn(40, 4)))
    ours, found = ORTModule(copy.deepcopy(net)), _captures(monkeypatch)
    x = torch.randn(2, 5, 4)
    for at in (3, 4, 9, 21):
        for each in (ours, net):
            each.zero_grad()
            each(x, at).backward()
        torch.testing.assert_close(ours.table.grad, net.table.grad)
    assert len(found) == 1 + 3  # of all, and the pieces between the slices
    stats = ours.gradd_stats()
    assert list(stats["parts_in_torch"]) == ["unsupported_operator"]
    assert stats["plans"] == len(found)


def test_the_line_that_the_daemon_names_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self, x):
        h = torch.tanh(self.lin(x)).exp().sigmoid()
        h = h + (h > 0.6).sort(1)[0]
        return (self.out(h.relu()).softmax(-1) + h.sin()).square().mean()

    net = Lambda(forward, lin=nn.Linear(4, 4), out=nn.Linear(4, 4))
    ours, found = ORTModule(copy.deepcopy(net)), _captures(monkeypatch)
    x = torch.randn(3, 4)
    for each in (ours, net):
        each(x).backward()
    torch.testing.assert_close(ours.lin.weight.grad, net.lin.weight.grad)
    assert list(ours.gradd_stats()["parts_in_torch"])
    assert len(found) <= 6  # of all, of the line's nodes, of the pieces


class Kept(nn.Module):
    """A few last values on the module, which the next call reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.last = nn.Linear(4, 4), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.lin(x))
        self.last.append(h.detach().mean())
        self.last = self.last[-3:]
        return h.square().mean() + sum(self.last)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="lazy, and breaks the next call's graph")
def test_what_a_call_keeps_is_an_ordinary_tensor(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs, compiled = Kept(), Kept(), Kept()
    graphs = []

    def backend(module, examples):
        graphs.append(module)
        return module.forward

    wrapped = ORTModule(ours)
    of_torch = torch.compile(compiled, backend=backend)
    x = torch.randn(3, 4)
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            for net, call in ((ours, wrapped), (theirs, theirs), (compiled, of_torch)):
                net.zero_grad()
                call(x).backward()
            torch.testing.assert_close(ours.lin.weight.grad, theirs.lin.weight.grad)
            assert [type(v) for v in ours.last] == [torch.Tensor] * len(ours.last)
    stats = wrapped.gradd_stats()
    assert stats["breaks"] == 0 and stats["graphs"] <= len(graphs)
    assert not caplog.records


# ---- numbers that follow from the arguments ----


class Windows(nn.Module):
    """Attention within parts of a sequence, as Qwen2-VL has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        lengths = (grid.prod(-1) // 2).tolist()
        parts = [torch.softmax(p @ p.T, -1) @ p for p in torch.split(x, lengths)]
        y = self.last(torch.cat(parts))
        return y.sum() + y[: int(grid.max())].pow(2).sum()


class Merged(nn.Module):
    """Images of a sequence, whose sizes stay tensors, as Pixtral and Mistral 3 have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        grids = [(size[0] // 2, size[1] // 2) for size in sizes]
        found = []
        for i, part in enumerate(self.first(x).split([a * b for a, b in grids])):
            high, wide = grids[i]
            grid = part.view(high, wide, 8).permute(2, 0, 1)
            larger = F.interpolate(grid[None], size=(high + 1, wide)).flatten(2)[0].t()
            places = torch.reshape(torch.arange(high * wide), (high, wide))[: high - 1, :wide]
            found += [
                larger.repeat(high, 1),
                grid[:, 1:high].flatten(1).t() * places.reshape(-1, 1),
            ]
        return self.last(torch.cat(found)).square().mean()


class Chosen(nn.Module):
    """What is computed depends on a number in an argument."""

    def __init__(self, read: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4), read

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return (y * 2 if self.read(which) > 2 else y.tanh()).sum()


class Counted(nn.Module):
    """Writes to the argument in front of the reading, where `writes`."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.layer, self.writes = nn.Linear(4, 4), writes

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count = count.clone()
        if self.writes:
            count += 1
        y = self.layer(x)
        return y[: count.item()].sum()


def steps(module: nn.Module, calls: Sequence[tuple]) -> dict[str, Any]:
    """Runs calls in the daemon and in PyTorch, compares; the counts of the former."""
    theirs = copy.deepcopy(module)
    wrapped = ORTModule(module)
    for args in calls:
        given = [x.clone() for x in args]
        loss, expected = wrapped(*args), theirs(*given)
        loss.backward(), expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        for ours, other in zip(module.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, other.grad, rtol=1e-4, atol=1e-4)
    return wrapped.gradd_stats()


@pytest.mark.quick
def test_lengths_of_parts_break_no_graph() -> None:
    grids = [[[2, 3 + i], [2, 2 + 2 * i]] for i in range(6)] + [[[2, 4], [2, 3], [2, 2]]]
    calls = [
        (torch.randn(int(torch.tensor(grid).prod(-1).sum()) // 2, 8), torch.tensor(grid))
        for grid in grids
    ]
    found = steps(Windows(), calls)
    assert found["breaks"] == 0
    assert not found["in_torch"]
    assert found["graphs"] <= 4, "the first lengths, any two, any three"


def test_tensors_as_sizes_break_no_graph() -> None:
    calls = []
    for sizes in ([[4, 6], [8, 4]], [[6, 4], [4, 6]], [[8, 8], [10, 4]], [[12, 6], [10, 8]]):
        rows = sum(a * b for a, b in sizes) // 4
        calls.append((torch.randn(rows, 4), torch.tensor(sizes)))
    found = steps(Merged(), calls)
    assert found["breaks"] == 0
    assert not found["in_torch"]


@pytest.mark.parametrize("read", [lambda x: x.item(), int, lambda x: x.tolist()[0]])
def test_a_choice_follows_the_number(read: Callable[[torch.Tensor], Any]) -> None:
    found = steps(Chosen(read), [(torch.randn(3, 4), torch.tensor([n])) for n in (5, 1, 7, 0, 2)])
    assert found["breaks"] == 0
    assert not found["in_torch"]


@pytest.mark.parametrize("writes", [False, True])
def test_a_number_that_is_written_to(writes: bool) -> None:
    steps(Counted(writes), [(torch.randn(6, 4), torch.tensor(n)) for n in (2, 3, 5)])


def test_a_number_of_a_buffer_is_read_in_each_call() -> None:
    module = Chosen(lambda x: module.steps.item())
    module.register_buffer("steps", torch.tensor(0))
    twin = copy.deepcopy(module)
    twin.read = lambda x: twin.steps.item()
    wrapped = ORTModule(module)
    for number in (1, 5, 2, 9):
        for each in (module, twin):
            each.steps.fill_(number)
        x, which = torch.randn(3, 4), torch.tensor([0])
        torch.testing.assert_close(wrapped(x, which), twin(x, which), rtol=1e-5, atol=1e-5)


def test_pythons_error_for_lengths_that_do_not_fit() -> None:
    wrapped = ORTModule(Windows())
    wrapped(torch.randn(5, 8), torch.tensor([[2, 2], [2, 3]])).backward()
    with pytest.raises(RuntimeError, match="split"):
        wrapped(torch.randn(9, 8), torch.tensor([[2, 2], [2, 3]]))
    wrapped(torch.randn(6, 8), torch.tensor([[2, 3], [2, 3]])).backward()


class Pictures(nn.Module):
    """Leaves out empty pictures and counts those of each row, as Idefics does.

    Attributes:
        one: One stays where all are empty, as in SmolVLM.
    """

    def __init__(self, one: bool) -> None:
        super().__init__()
        self.layer, self.one = nn.Linear(16, 4), one

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        flat = pixels.view(-1, *pixels.shape[2:])
        used = (flat == 0.0).sum(dim=(-1, -2, -3)) != flat.shape[1:].numel()
        if self.one:
            used[0] |= ~torch.any(used)
        counts = used.view(pixels.shape[:2]).sum(1)
        y = self.layer(flat[used].flatten(1))
        return sum(part.tanh().mean() for part in torch.split(y, counts.tolist()))


@pytest.mark.parametrize("one", [False, True])
def test_pictures_that_a_mask_chooses_break_no_graph(one: bool) -> None:
    calls = []
    for counts in ((2, 3), (3, 2), (3, 3), (1, 3)):
        pixels = torch.zeros(2, 3, 1, 4, 4)
        for row, count in zip(pixels, counts, strict=True):
            row[:count] = torch.randn(count, 1, 4, 4)
        calls.append((pixels,))
    found = steps(Pictures(one), calls)
    assert found["breaks"] == 0
    assert not found["in_torch"]


class Written(nn.Module):
    """Reads numbers in front of writes and behind them, through views as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        numbers = sizes * 2
        before, view = numbers.sum(), numbers.view(2, 2)[1]
        view += numbers[0]
        numbers[1:3] = before
        late = sizes.clone()
        late[0].fill_(1)
        y = self.layer(x)
        read = (before, view.sum(), numbers.view(-1)[1], late.max())
        return sum(y[: int(n)].sum() * (i + 1) for i, n in enumerate(read))


@pytest.mark.quick
def test_numbers_are_what_writes_have_made_of_them() -> None:
    given = ((1, 2, 3, 1), (2, 2, 1, 3), (4, 1, 2, 2))
    found = steps(Written(), [(torch.randn(40, 4), torch.tensor(sizes)) for sizes in given])
    assert found["breaks"] == 0
    assert not found["in_torch"]


class Tiles(nn.Module):
    """Chooses a grid by comparing fractions and cuts the padding off, as LLaVA-NeXT does."""

    grids = ((4, 4), (4, 8), (8, 4))

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        total = 0
        for size in sizes:
            high, wide = size.tolist()
            best, most, least = None, 0, float("inf")
            for h, w in self.grids:
                scale = min(w / wide, h / high)
                used = min(int(wide * scale) * int(high * scale), wide * high)
                if used > most or (used == most and h * w - used < least):
                    best, most, least = (h, w), used, h * w - used
            h, w = best
            y = self.layer(x[: h * w]).view(h, w, -1)
            assert np.prod(y.shape) % (h * w) == 0
            if wide / high > w / h:
                pad = (h - int(round(high * (w / wide), 7))) // 2
                y = y[pad : h - pad]
            else:
                pad = (w - int(round(wide * (h / high), 7))) // 2
                y = y[:, pad : w - pad]
            total = total + y.tanh().mean()
        return total


def test_a_grid_that_fractions_choose_breaks_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "_LIBRARY", __name__)  # else np.prod() may be a number of NumPy
    given = (((8, 8), (4, 9)), ((8, 8), (4, 9)), ((9, 4), (5, 9)), ((20, 11), (3, 3)))
    found = steps(Tiles(), [(torch.randn(32, 4), torch.tensor(sizes)) for sizes in given])
    assert found["breaks"] == 0
    assert not found["in_torch"]


class Rescaled(nn.Module):
    """A factor that Sapiens 2 draws in training, here from a range of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        most = np.log(2.0)
        drawn = torch.empty(1).uniform_(most, most).exp()
        return (self.layer(x) / np.sqrt(3) * drawn).square().mean()


def test_functions_of_numpy_of_constants_break_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "_LIBRARY", __name__)  # as above
    module = Rescaled()
    theirs = copy.deepcopy(module)
    ours = ORTModule(module, strict=True)
    for _ in range(3):
        x, found = torch.randn(3, 4), []
        for each in (ours, theirs):
            found.append(each(x))
            found[-1].backward()
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(module.layer.weight.grad, theirs.layer.weight.grad)


PRODUCTS = {
    "item": lambda shape: np.prod(shape).item(),
    "type": lambda shape: float(np.prod(shape).astype(np.float32)),
    "division": lambda shape: np.prod(shape) / 7,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_sizes_stays_a_number_of_numpy(name: str) -> None:
    def forward(self, x):
        return (self.lin(x) * PRODUCTS[name](x.shape)).sum()

    net = Lambda(forward, lin=nn.Linear(4, 4))
    ours = ORTModule(copy.deepcopy(net))
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(ours(x), net(x), rtol=1e-5, atol=1e-5)


class Checked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        n = (ids == 7).sum()
        torch_compilable_check(n == x.shape[0], f"{n} tokens")
        return self.layer(x).sum()


def test_a_check_of_transformers_is_an_assertion() -> None:
    module = Checked()
    fit = torch.tensor([7, 1, 7])
    found = steps(module, [(torch.randn(2, 4), fit)] * 2)
    assert found["breaks"] == 0
    assert not found["in_torch"]
    with pytest.raises(RuntimeError, match="do not fit together"):
        ORTModule(module)(torch.randn(3, 4), fit)


def test_a_mask_that_a_vmap_makes_is_no_work() -> None:
    def forward(_: nn.Module, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[0])
        mask = torch.vmap(lambda i: ids[i] >= ids)(places)
        return torch.where(mask, x @ x.T, 0.0).softmax(-1).pow(2).sum()

    x, ids = torch.randn(3, 4, requires_grad=True), torch.tensor([2, 1, 3])
    loss = ORTModule(Lambda(forward), strict=True)(x, ids)
    torch.testing.assert_close(loss, forward(nn.Identity(), x, ids), rtol=1e-5, atol=1e-6)

"""What a forward() may do to things of outside, as rows of text: trials of it leave no trace.

A row is what stands in the user's module, statements of forward() that may set `y`, which the
result is multiplied by, and an expression that tells the state of outside afterwards.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from nets import assert_close

from gradd import ORTModule

_PRELUDE = """
import array, bisect, collections, contextlib, copy, functools, heapq, operator, random, threading
import numpy as np
import torch
from torch import nn
"""
_NETWORK = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3)

    def forward(self, x):
        global l, b, d, q, s
        y = 1.0
        BODY
        return self.lin(x) * y
"""
CALLS = 4


@dataclass(frozen=True)
class Deed:
    """A network that does something outside of it.

    Attributes:
        before: What stands in its module; `net` is the network once it is made.
        does: The statements in forward(), in one line.
        tells: An expression for the state that it leaves.
        reasons: How the refusal may be named; empty: whatever happens has to be right.
    """

    before: str
    does: str
    tells: str
    reasons: tuple[str, ...] = ()

    def run(self, wrap: Any) -> tuple[list, Any]:
        """Results and states of some steps of training, and the network."""
        names: dict[str, Any] = {"__name__": __name__}
        exec(_PRELUDE, names)
        exec(_NETWORK.replace("BODY", self.does), names)
        torch.manual_seed(0)
        names["np"].random.seed(0)
        names["random"].seed(0)
        plain = names["net"] = names["Net"]()
        exec(self.before, names)
        net, found = wrap(plain), []
        for _ in range(CALLS):
            plain.zero_grad()
            out = net(torch.ones(2, 4))
            out.sum().backward()
            found.append((out.detach(), copy.deepcopy(_plain(eval(self.tells, names)))))
        del names["net"]  # whoever keeps the class keeps these names
        return found, net


def _plain(state: Any) -> Any:
    """A state in a form that compares; classes of tensors count."""
    if isinstance(state, (list, tuple)):
        return [_plain(part) for part in state]
    if isinstance(state, torch.Tensor):
        return (type(state).__name__, state.size(), state.stride(), state.tolist())
    return state.tolist() if hasattr(state, "tolist") else state


def named(*lists: list[Deed]) -> dict[str, Deed]:
    """The deeds of these lists by names of their own."""
    return {f"{deed.does} {i}": deed for i, deed in enumerate(d for found in lists for d in found)}


def follow(deed: Deed) -> None:
    """Compares what gradd's calls leave with what PyTorch's leave.

    Raises:
        AssertionError: They differ, or the refusal has another name.
    """
    expected, _ = deed.run(lambda net: net)
    found, net = deed.run(ORTModule)
    for number, (ours, eager) in enumerate(zip(found, expected, strict=True)):
        assert ours[1] == eager[1], f"the state after call {number}"
        assert_close(ours[0], eager[0], f"call {number}")
    stats = net.gradd_stats()
    if deed.reasons:
        assert stats["captures"] == 0 and set(stats["fallbacks"]) <= set(deed.reasons), stats


def deeds(
    before: str, bodies: tuple[str, ...], tells: str, reasons: tuple[str, ...] = ()
) -> list[Deed]:
    """Deeds with the same beginning and end."""
    return [Deed(before, does, tells, reasons) for does in bodies]


_LEAF = "p = torch.tensor([2., 3.], requires_grad=True)"
_PROBE = "probe = nn.Linear(2, 1); opt = torch.optim.Adam(probe.parameters())"
_TRAINED = _PROBE + "; probe(torch.ones(1, 2)).sum().backward()"
_MINE = """
class Mine(torch.optim.Optimizer):
    def step(self):
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is not None: p.data.add_(p.grad, alpha=-0.1)
"""
_DONE = ("outside_written", "outside_state", "func_transform", "export_failed", "backward_hooks")
BACKWARDS = [
    *deeds(
        _LEAF,
        (
            "(p * 3).sum().backward()",
            "(p * p).sum().backward(); y = p.grad.sum()",
            "torch.autograd.backward([(p * 3).sum()])",
            "torch.autograd.backward((p * p).sum(), inputs=[p])",
            "operator.methodcaller('backward')((p * 3).sum())",
            "[*map(torch.Tensor.backward, [(p * 3).sum()])]",
            "functools.partial((p * p).sum().backward)()",
            "(p * 3).sum().backward(create_graph=True)",
            "(p * x.sum()).sum().backward()",
            "self.lin(x).sum().backward()",
            "(self.lin.weight * 3).sum().backward()",
            "((p * p).sum() + (self.lin.weight * 3).sum()).backward()",
            "y = torch.autograd.grad((p * p).sum(), p)[0].sum()",
            "y = torch.autograd.grad((p * 3).sum(), p)[0].sum()",
            "y = torch.func.grad(lambda v: (v * v).sum())(p.detach()).sum()",
            "y = torch.autograd.functional.jacobian(lambda v: v * v, p.detach()).sum()",
            "p.register_hook(lambda g: g * 2); (p * 3).sum().backward()",
            "p.register_post_accumulate_grad_hook(lambda q: None); (p * 3).sum().backward()",
            "p.grad = torch.ones(2)",
            "setattr(p, 'grad', torch.ones(2))",
            "torch.Tensor.grad.__set__(p, torch.ones(2))",
            "p.grad = None if p.grad is not None else torch.ones(2)",
            "(p * 3).grad_fn.next_functions[0][0](torch.ones(2))",
            "torch.autograd.Variable._execution_engine.run_backward("
            "((p * 3).sum(),), (torch.ones(()),), False, False, (), True, True)",
        ),
        "p.grad, [q.grad for q in net.parameters()]",
        _DONE,
    ),
    *deeds(
        _LEAF + "; (p * 2).sum().backward()",
        (
            "p.grad.zero_()",
            "p.grad.add_(1)",
            "torch._foreach_add_([p.grad], 1)",
            "y = float(p.grad.sum()); (p * 3).sum().backward()",
            "p.grad = p.grad * 2",
            "del p.grad",
            "y = float(p.grad.sum())",
            "y = p.grad.sum()",
            "y = 2.0 if p.grad is None else 3.0",
        ),
        "p.grad, [q.grad for q in net.parameters()]",
        _DONE,
    ),
    *deeds(
        _TRAINED,
        (
            "opt.step()",
            "opt.zero_grad()",
            "opt.zero_grad(set_to_none=False)",
            "probe.zero_grad()",
            "operator.methodcaller('step')(opt)",
            "operator.methodcaller('zero_grad')(opt)",
            "[*map(torch.optim.Adam.zero_grad, [opt])]",
            "nn.utils.clip_grad_norm_(probe.parameters(), 0.1)",
            "opt.zero_grad(); probe(torch.ones(1, 2)).square().sum().backward(); opt.step()",
            "opt.step(lambda: probe(torch.ones(1, 2)).sum())",
        ),
        "[q.grad for q in probe.parameters()], [*probe.parameters()], len(opt.state)",
        _DONE,
    ),
    *deeds(
        f"{_MINE}\nprobe = nn.Linear(2, 1); opt = Mine(probe.parameters(), {{}})\n"
        "probe(torch.ones(1, 2)).sum().backward()",
        ("opt.step()", "operator.methodcaller('step')(opt)", "[*map(Mine.step, [opt])]"),
        "[q.grad for q in probe.parameters()], [*probe.parameters()]",
        _DONE,
    ),
]


_LIST = "l = [3., 1., 2., 5., 4., 6.]"
_ARRAY = "l = np.array([3., 1., 2., 5., 4., 6.])"
_LISTED, _ATTRIBUTE = "l", "; net.__dict__['l'] = l"
_ON_LISTS = (
    "np.random.shuffle(l); y = float(l[0])",
    "np.random.shuffle(l)",
    "np.random.permutation(l); y = float(l[0])",
    "functools.partial(np.random.shuffle, l)(); y = float(l[0])",
    "[*map(np.random.shuffle, [l])]; y = float(l[0])",
    "operator.methodcaller('shuffle', l)(np.random); y = float(l[0])",
    "np.random.mtrand._rand.shuffle(l); y = float(l[0])",
    "np.random.shuffle(x=l); y = float(l[0])",
    "random.shuffle(l); y = float(l[0])",
)
_SORTED = (
    "l.sort(); y = float(l[0])",
    "l.sort(key=lambda v: -v); y = float(l[0])",
    "list.sort(l, reverse=True); y = float(l[0])",
    "l.reverse(); y = float(l[0])",
    "operator.methodcaller('reverse')(l); y = float(l[0])",
    "[*map(list.reverse, [l])]; y = float(l[0])",
    "heapq.heapify(l); y = float(l[0])",
    "heapq.heappush(l, 0.5); y = float(l[-1])",
    "y = heapq.heappop(l)",
    "y = heapq.heapreplace(l, 9.0)",
    "y = heapq.heappushpop(l, 9.0)",
    "bisect.insort(l, 2.5); y = float(l[-1])",
    "bisect.insort(l, 2.5, key=lambda v: v); y = float(l[-1])",
    "l[1:3] = []; y = float(len(l))",
    "l += [1.0]; y = float(len(l))",
    "l *= 2; y = float(len(l))",
    "operator.iadd(l, [2.0]); y = float(len(l))",
    "operator.setitem(l, 0, l[0] + 1); y = float(l[0])",
    "operator.delitem(l, slice(0, 1)); y = float(len(l))",
    "collections.deque(map(l.append, [1.0]), 0); y = float(len(l))",
)
_ON_ARRAYS = (
    "np.put(l, [0], l[0] + 1); y = float(l[0])",
    "np.place(l, l > 2, [l[0] + 1]); y = float(l[0])",
    "np.copyto(l, l[::-1].copy()); y = float(l[0])",
    "np.putmask(l, l > 2, l * 2); y = float(l[0])",
    "np.fill_diagonal(l.reshape(2, 3), l[1] + 3); y = float(l[0])",
    "np.put_along_axis(l, np.array([0]), l[:1] + 1, 0); y = float(l[0])",
    "l.sort(); y = float(l[0])",
    "l.partition(3); y = float(l[0])",
    "l.fill(l[0] + 1); y = float(l[0])",
    "l.put([0], l[0] + 1); y = float(l[0])",
    "l.itemset(0, 7.0) if hasattr(l, 'itemset') else l.__setitem__(0, l[0] + 1)",
    "l.byteswap(inplace=True); y = float(len(l))",
    "np.add(l, 1, out=l); y = float(l[0])",
    "np.add(l, 1, l); y = float(l[0])",
    "np.add(l, 1, out=(l,)); y = float(l[0])",
    "np.add.at(l, [0], 1.0); y = float(l[0])",
    "np.cumsum(l, out=l); y = float(l[0])",
    "l.cumsum(out=l); y = float(l[1])",
    "np.add.accumulate(l, out=l); y = float(l[1])",
    "np.clip(l, 2, 4, out=l); y = float(l[1])",
    "np.take(l, [5, 4, 3, 2, 1, 0], out=l); y = float(l[0])",
    "np.nan_to_num(l, copy=False, nan=1.0); np.negative(l, out=l); y = float(l[0])",
    "l += 1; y = float(l[0])",
    "l[::2] *= 2; y = float(l[0])",
    "l.T[0] += 1; y = float(l[0])",
    "l.flat[0] += 1; y = float(l[0])",
    "l.flat = l + 1; y = float(l[0])",
    "l.resize(len(l) + 1, refcheck=False); y = float(len(l))",
    "l.setflags(write=not l.flags.writeable); y = float(l.flags.writeable)",
    "np.random.default_rng(0).random(out=l); y = float(l[0])",
    "np.random.default_rng(len(l)).permuted(l + l[0], out=l); y = float(l[0])",
    "np.random.default_rng(1).shuffle(l); y = float(l[0])",
    "np.random.RandomState(1).shuffle(l); y = float(l[0])",
    "l.dtype = np.int64 if l.dtype == float else float; y = float(len(l))",
    "l.shape = (2, 3) if l.ndim == 1 else (6,); y = float(l.ndim)",
    "l.shape = (*l.shape, 1); y = float(l.ndim)",
    "l.flags.writeable = not l.flags.writeable; y = float(l.flags.writeable)",
    "memoryview(l)[0] = l[0] + 1; y = float(l[0])",
    "np.einsum('i->i', l * 2, out=l); y = float(l[0])",
    "np.matmul(np.eye(6) * 2, l.copy(), out=l); y = float(l[0])",
    "np.frombuffer(l, count=2)[0] += 1; y = float(l[0])",
    "np.asarray(l)[0] += 1; y = float(l[0])",
    "l.view()[0] += 1; y = float(l[0])",
    "np.lib.stride_tricks.as_strided(l, (2,), (8,))[0] += 1; y = float(l[0])",
    "np.vectorize(lambda i: l.put([i], 9.0))([0]); y = float(l[0])",
    "np.apply_along_axis(lambda r: l.sort(), 0, l.copy()); y = float(l[0])",
)
_ON_BUFFERS = (
    "b.append(1); y = float(len(b))",
    "b.extend(b[:1]); y = float(len(b))",
    "b += b[:1]; y = float(len(b))",
    "b *= 2; y = float(len(b))",
    "b[0] = b[0] + 1; y = float(b[0])",
    "b[:2] = b[1:3]; y = float(b[0])",
    "b[:1] = b[1:3]; y = float(len(b))",
    "b.pop(); y = float(len(b))",
    "b.reverse(); y = float(b[0])",
    "del b[0]; y = float(len(b))",
    "memoryview(b)[0] = 7; y = float(b[0])",
    "np.frombuffer(b, np.uint8, 1)[0] += 1; y = float(b[0])",
    "operator.iadd(b, b[:1]); y = float(len(b))",
)
_WRITTEN = ("outside_written", "outside_state", "python_random", "attribute_written")
IN_PLACE = [
    *(d for end in ("", _ATTRIBUTE) for d in deeds(_LIST + end, (*_ON_LISTS, *_SORTED), _LISTED)),
    *(d for end in ("", _ATTRIBUTE) for d in deeds(_ARRAY + end, _ON_LISTS, _LISTED)),
    *deeds(_ARRAY, _ON_ARRAYS, "l, l.shape, l.dtype.str"),
    *deeds(
        "o = np.array([1., 2., 3.], dtype=object)",
        ("np.random.shuffle(o); y = float(o[0])", "o[0] += 1; y = float(o[0])", "o.sort()"),
        "o",
    ),
    *deeds(
        "l = np.arange(6.).reshape(3, 2)[:, 0]",
        ("np.random.shuffle(l); y = float(l[0])", "l += 1; y = float(l[0])"),
        "l, l.base",
    ),
    *deeds(
        "l = np.arange(4.)",
        (
            "n = l.flags.num; l.setflags(write=True); l += 1; l.setflags(write=False); y = l[0]",
            "l.setflags(write=True); l += 1; l.flags.writeable = False; y = l[0]",
        ),
        "l, l.flags.writeable",
    ),
    *deeds(
        "l = np.array([(1., 2)], dtype=[('k', float), ('n', np.int8)]); q = l[0]",
        (
            "l['k'][0] += 1; y = float(l['k'][0])",
            "l['k'] += 1; y = float(l['k'][0])",
            "q['k'] += 1; y = float(q['k'])",
            "np.random.shuffle(l)",
        ),
        "l, q.tolist()",
    ),
    *deeds("b = bytearray(b'abcdef')", _ON_BUFFERS, "bytes(b)"),
    *deeds("b = array.array('B', b'abcdef')", (*_ON_BUFFERS, "b.byteswap()"), "bytes(b)"),
    *deeds(
        "d = collections.OrderedDict(a=1., b=2., c=3.)",
        (
            "d.move_to_end('a'); y = next(iter(d.values()))",
            "y = d.popitem()[1] if d else 1.0",
            "d.update(e=1.0); y = float(len(d))",
            "d |= {'f': 2.0}; y = float(len(d))",
            "operator.ior(d, {'f': 2.0}); y = float(len(d))",
        ),
        "list(d.items())",
    ),
    *deeds(
        "q = collections.deque([1., 2., 3.], 3)",
        (
            "q.rotate(); y = q[0]",
            "q.append(q[0] + 1); y = q[0]",
            "q.reverse(); y = q[0]",
            "q += [9.0]; y = q[-1]",
        ),
        "list(q), q.maxlen",
    ),
    *deeds(
        "s = {1.0, 2.0}",
        ("s.add(len(s) + 2.0); y = float(len(s))", "s ^= {1.0}; y = float(len(s))", "s |= {5.0}"),
        "sorted(s)",
    ),
]


# Where a write changes nothing the second time, a trace is made and refused by another name.
_MOVED = (
    *("outside_written", "outside_state", "input_mutation"),
    *("export_failed", "unsupported_operator"),
)
_T = "t = torch.arange(4.)"
_TELLS_T = "t, t.storage_offset(), t.untyped_storage().nbytes(), t.requires_grad"
_ON_TENSORS = (
    "t.resize_(t.numel() + 1).fill_(1.); y = t.sum()",
    "t.resize_(t.numel() + 1).fill_(1.)",
    "t.resize_(max(t.numel() - 1, 1)); y = t.sum()",
    "t.resize_(2, t.numel()).fill_(2.); y = t.sum()",
    "t.resize_as_(torch.ones(t.numel() + 3)).fill_(1.); y = t.sum()",
    "t.set_(torch.ones(t.numel() + 1)); y = t.sum()",
    "t.set_(torch.ones(t.numel())); y = t.sum()",
    "t.set_(); y = float(t.numel())",
    "t.set_(torch.ones(5).untyped_storage(), 1, (2,), (2,)); y = t.sum()",
    "t.data = torch.ones(t.numel() + 1); y = t.sum()",
    "t.data = torch.ones(t.numel(), dtype=torch.float64); y = t.sum().float()",
    "setattr(t, 'data', torch.ones(t.numel() + 1)); y = t.sum()",
    "t.data.add_(1); y = t.sum()",
    "t.data.resize_(t.numel() + 1).fill_(1.); y = t.sum()",
    "t.detach().add_(1); y = t.sum()",
    "t[1:].add_(1); y = t.sum()",
    "t[:2].add_(1); t.mul_(2); y = t.sum()",
    "t.mul_(2); t[:2].add_(1); y = t.sum()",
    "v = t[:2]; v.resize_(3).add_(1.); y = t.sum()",
    "t.unsqueeze_(0); y = float(t.dim())",
    "t.unsqueeze_(0).mul_(2); y = float(t.sum())",
    "t.as_strided_((2,), (2,)) if t.numel() > 2 else t.mul_(2); y = t.sum()",
    "t.untyped_storage().resize_(t.untyped_storage().nbytes() + 4)",
    "t.untyped_storage().fill_(0); y = t.sum()",
    "t.storage()[0] = 7.; y = t.sum()",
    "torch._foreach_add_([t, t[:2]], 1); y = t.sum()",
    "torch.add(t, 1, out=t); y = t.sum()",
    "torch.cat([t, t], out=t.new_empty(0)); torch.ones(t.numel() + 1, out=t); y = t.sum()",
    "o = t; o += 1; y = t.sum()",
    "t.numpy()[0] += 1; y = t.sum()",
    "np.asarray(t)[0] += 1; y = t.sum()",
    "memoryview(t.numpy())[0] = 5.; y = t.sum()",
    "np.add(t.numpy(), 1, out=t.numpy()); y = t.sum()",
    "np.random.shuffle(t); y = t[0]",
    "np.random.shuffle(t.numpy()); y = t[0]",
    "t.random_(); y = t.sum()",
    "t.copy_(t.flip(0)); y = t[0]",
    "torch.nn.init.normal_(t); y = t[0]",
)
_ON_MATRICES = (
    "t.t_(); y = t[0].sum()",
    "t.transpose_(0, 1); t.add_(1); y = t[0].sum()",
    "t.swapaxes_(0, 1); y = t[0].sum()",
    "t.squeeze_(); t.add_(1); y = t.sum()",
    "t.resize_(3, 3).zero_(); y = t.sum()",
    "t.add_(1).t_(); y = t[0].sum()",
    "t[:, 0].add_(1); y = t.sum()",
    "t.diagonal().mul_(2); y = t.sum()",
    "t.T.add_(1); y = t[0].sum()",
    "t.fill_diagonal_(3.); y = t.sum()",
)
MOVED = [
    *deeds(_T, _ON_TENSORS, _TELLS_T, _MOVED + ("python_random", "attribute_written")),
    *deeds("t = torch.arange(6.).view(2, 3)", _ON_MATRICES, _TELLS_T, _MOVED),
    *deeds("t = torch.arange(6.).view(3, 2).t()", _ON_MATRICES, _TELLS_T, _MOVED),
    *deeds(
        "t = torch.arange(12.).view(3, 4)[:, 1:3]", _ON_MATRICES, _TELLS_T + ", t._base", _MOVED
    ),
    *deeds("t = torch.empty(0)", _ON_TENSORS[:2], _TELLS_T, _MOVED),
    *deeds(
        "t = torch.arange(4.); v = t[:2]; w = t[1:]",
        (
            "y = v.sum(); t.add_(1)",
            "y = v.sum() + w.sum(); t.mul_(2)",
            "v.add_(1); w.add_(1); y = t.sum()",
            "w.add_(1); t.add_(1); v.add_(1); y = t.sum()",
            "v.resize_(4).add_(1); y = t.sum()",
            "v.set_(w); v.add_(1); y = t.sum()",
        ),
        "t, v, w",
        _MOVED,
    ),
    *deeds(
        "t = torch.nn.Parameter(torch.arange(4.))",
        (
            "with torch.no_grad(): t.add_(1); y = t.sum().detach()",
            "t.data.add_(1); y = t.detach().sum()",
            "t.data.resize_(t.numel() + 1).fill_(1.); y = t.detach().sum()",
            "with torch.no_grad(): t.set_(torch.ones(5)); y = t.detach().sum()",
        ),
        _TELLS_T,
        (*_MOVED, "unsupported_parameter"),
    ),
    *deeds(
        "t = torch.tensor([1., 0., 2.]).to_sparse()",
        ("t.add_(t); y = t.to_dense().sum()", "t.mul_(2); y = t.to_dense().sum()"),
        "t.to_dense()",
    ),
    *deeds(
        "t = torch.tensor([1 + 2j, 3j]); h = torch.ones(2, dtype=torch.float8_e4m3fn)",
        ("t.add_(1); y = t.real.sum()", "h.copy_(torch.zeros(2)); y = h.float().sum()"),
        "t, h.float()",
    ),
    *deeds(
        "t = net.lin.weight",
        (
            "t.data.add_(1)",
            "with torch.no_grad(): self.lin.weight.mul_(2)",
            "with torch.no_grad(): self.lin.weight[0].add_(1)",
            "self.lin.double(); self.lin.float()",
            "self.lin.bias.data.resize_(3).fill_(1.)",
        ),
        "[t, *net.parameters()]",
    ),
]


_ON_LOCKS = (
    "k.release() if k.locked() else k.acquire(); y = 1. + k.locked()",
    "k.locked() or k.acquire(); y = 1. + k.locked()",
    "k.locked() or k.__enter__(); y = 1. + k.locked()",
    "k.acquire(blocking=False); y = 1. + k.locked()",
    "k.acquire(False); y = 1. + k.locked()",
    "k.acquire(timeout=0); y = 1. + k.locked()",
    "k.locked() or operator.methodcaller('acquire')(k); y = 1. + k.locked()",
    "k.locked() or functools.partial(k.acquire)(); y = 1. + k.locked()",
    "k.locked() or [*map(type(k).acquire, [k])]; y = 1. + k.locked()",
    "k.locked() or contextlib.ExitStack().enter_context(k)",
)
_ON_HELD = ("k.locked() and k.release(); y = 1. + k.locked()", "k.locked() and k.__exit__()")
_ON_COUNTED = (
    "k.acquire(); y = 2.",
    "k.__enter__(); k.acquire(); y = 2.",
    "k.acquire(); k.acquire(); k.release(); y = 2.",
    "k.acquire(); y = next(numbers)",
    "k.acquire(); y = next(numbers); k.release()",
)
_BALANCED = (
    "with k: y = 2.",
    "k.acquire(); k.release(); y = 2.",
    "k.__enter__(); k.__exit__(None, None, None); y = 2.",
    "k.acquire(); y = 2.; k.release()",
    "c = threading.RLock(); c.acquire(); y = [2. for _ in '1'][0]; c.release()",
    "c = threading.RLock(); (c.__enter__(), c.__enter__(), c.release(), c.release())",
    "c = threading.Lock(); c.acquire(); c.release(); y = 2.",
)
LOCKS = [
    *deeds("k = threading.Lock()", _ON_LOCKS, "k.locked()"),
    *deeds("k = threading.Lock(); k.acquire()", _ON_HELD, "k.locked()"),
    *deeds(
        "k = threading.RLock(); numbers = iter(range(9))",
        _ON_COUNTED,
        "k._recursion_count(), numbers.__reduce__()[-1]",
        _WRITTEN,
    ),
    *deeds(
        "k = threading.RLock(); k.acquire(); numbers = iter(range(9))",
        (*_ON_COUNTED, "k._recursion_count() and k.release()"),
        "k._recursion_count(), numbers.__reduce__()[-1]",
    ),
    *deeds(
        "k = threading.Lock(); numbers = iter(range(9))",
        (
            "k.acquire(); y = next(numbers); k.release()",
            "with k: y = next(numbers)",
            "with contextlib.ExitStack() as e: e.enter_context(k); y = next(numbers)",
        ),
        "k.locked(), numbers.__reduce__()[-1]",
        _WRITTEN,
    ),
    *deeds("k = threading.Lock()", _BALANCED, "k.locked()"),
    *deeds(
        "k = threading.RLock()",
        ("with k, k: y = 2.", "k.acquire(); (k.__enter__(), k.__exit__()); k.release()"),
        "k._recursion_count()",
    ),
    *deeds("k = threading.RLock()", _BALANCED, "k._recursion_count()"),
    *deeds(
        "k = threading.Semaphore(9); e = threading.Event()",
        ("k.acquire(); y = float(k._value)", "k.release(); y = float(k._value)", "e.set()"),
        "k._value, e.is_set()",
    ),
]

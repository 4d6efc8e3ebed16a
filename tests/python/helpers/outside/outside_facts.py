"""Rows of outside_rows.py: what tensors of outside tell of themselves."""

from __future__ import annotations

from outside_rows import Row, rows_of

FACTS: list[Row] = []
_TENSORS = """
class O: pass
t = torch.ones(4); o = O(); o.t = torch.zeros(3); L = [torch.ones(3)]; D = {'t': torch.ones(3)}
w = torch.ones(3, requires_grad=True) * 1; v = torch.ones(2, 3); p = nn.Parameter(torch.ones(3))
def asks(answer): return 2. if answer else 3.
"""
FACTS += rows_of(
    _TENSORS,
    {
        # Whether it takes part in autograd.
        "asks(t.requires_grad)": "t.requires_grad_()",
        "asks(o.t.requires_grad)": "o.t.requires_grad = True",
        "asks(getattr(o.t, 'requires_grad'))": "o.t.requires_grad_()",
        "asks(L[0].requires_grad)": "L[0].requires_grad_()",
        "asks(any(q.requires_grad for q in L))": "L[0].requires_grad_()",
        "asks(D['t'].requires_grad)": "D['t'].requires_grad_()",
        "asks(D['t'].requires_grad)*1.": "D['t'] = torch.ones(3, requires_grad=True)",
        "asks(p.requires_grad)": "p.requires_grad_(False)",
        "asks(operator.attrgetter('t.requires_grad')(o))": "o.t.requires_grad_()",
        "asks(list(filter(operator.attrgetter('requires_grad'), L)))": "L[0].requires_grad_()",
        "asks(D['t'].is_leaf)": "D['t'] = torch.ones(3, requires_grad=True) * 1",
        "asks(D['t'].grad_fn is None)": "D['t'].mul_(torch.ones(3, requires_grad=True))",
        "asks(w.retains_grad)": "w.retain_grad()",
        "asks('Mul' in type(w.grad_fn).__name__)": "w.add_(1)",
        "asks(p._backward_hooks)": "p.register_hook(lambda g: g)",
        "asks(p._post_accumulate_grad_hooks)": "p.register_post_accumulate_grad_hook(print)",
        # Its form, where nothing is computed with it.
        "1.+t.shape[0]": "t.resize_(6)",
        "1.+t.size(0)": "t.resize_(6)",
        "1.+len(t)": "t.resize_(6)",
        "1.+t.numel()": "t.data = torch.ones(6)",
        "1.+torch.numel(t)": "t.data = torch.ones(6)",
        "1.+v.dim()": "v.data = torch.ones(6)",
        "1.+v.ndim": "v.data = torch.ones(6)",
        "1.+v.stride(0)": "v.t_()",
        "asks(v.is_contiguous())": "v.t_()",
        "asks(t.dtype is torch.float32)": "t.data = t.double()",
        "asks(t.is_floating_point())": "t.data = t.long()",
        "asks(torch.is_floating_point(t))": "t.data = t.long()",
        "1.+t.element_size()": "t.data = t.double()",
        "1.+t.nbytes": "t.data = torch.ones(8)",
        "1.+t.storage_offset()": "t.set_(torch.ones(9)[2:])",
        # What code in C asks it without an operator.
        "1.*t.__len__()": "t.resize_(6)",
        "1.*operator.length_hint(t)": "t.resize_(6)",
        "1.*torch.Tensor.size(t, 0)": "t.resize_(6)",
        "1.*sum(map(len, [t]))": "t.resize_(6)",
        "1.*np.shape(t)[0]": "t.resize_(6)",
        "1.+np.ndim(v)": "v.data = torch.ones(6)",
        "torch.tensor([2.5]).to(t)": "t.data = t.long()",
        "torch.tensor([2.5]).type_as(t)": "t.data = t.long()",
        "torch.ones(1, 1).expand_as(v).sum()": "v.resize_(5, 3)",
        "asks(torch.result_type(t, v) is torch.float32)": "t.data = t.double()",
        "asks(torch.is_same_size(t, v))": "t.data = v",
        "torch.zeros_like(t).add(1).sum()": "t.resize_(6)",
        # Its memory.
        "asks(t.is_shared())": "t.share_memory_()",
        "asks(L[0].is_shared())": "L[0].share_memory_()",
        "1.+t._version": "t.add_(1)",
        # Where it is computed with, another tensor may take its place.
        "asks(o.t.is_shared())*(1+o.t.sum())": "o.t.share_memory_()",
        "asks(o.t.is_shared())*(2+o.t.sum())": "o.t = torch.zeros(3).share_memory_()",
        "asks(L[0].requires_grad)*L[0]": "L[0] = torch.full((3,), 5.)",
    },
)
FACTS += rows_of(
    "def asks(answer): return 2. if answer else 3.",
    {
        "asks(self.prior.requires_grad)": "net.prior.requires_grad_()",
        "asks(self.held.t.requires_grad)": "net.held.t.requires_grad_()",
        "asks(self.listed[0].is_shared())": "net.listed[0].share_memory_()",
        "asks(self.prior.is_shared())": "net.prior.share_memory_()",
    },
    made="self.prior = torch.ones(3); self.held = types.SimpleNamespace(t=torch.ones(3)); "
    "self.listed = [torch.ones(3)]",
)
FACTS += rows_of(
    "t, v = torch.ones(3), torch.ones(3)\ndef asks(answer): return 2. if answer else 3.",
    {
        "asks(t.is_set_to(v))": "t.set_(v)",
        "asks(self.lin.weight._version > 1)": "net.lin.weight.data.add_(1.)",
        "asks(self.b.is_shared())": "net.b.share_memory_()",
        "asks(self.b._version > 2)": "net.b.add_(1.).sub_(1.).add_(0.)",
    },
    made="self.register_buffer('b', torch.ones(3))",
    refused="outside_state",
)

"""What a forward() may do to its own module, as rows of text: the trial before a capture undoes it.

The rows are deeds as in outside_undone.py. Writes that come first and reads of a whole container
that come second are the point of many: what is read first is then no longer what was there before.
"""

from __future__ import annotations

import itertools

from outside_undone import Deed, deeds

_HELPERS = """
import types
from torch.nn.utils import parameters_to_vector, vector_to_parameters
class Helper:
    def __init__(self, held): self.held = held
class Slotted:
    __slots__ = ('held',)
    def __init__(self, held): self.held = held
class Computed:
    def __init__(self, held): self._held = held
    held = property(lambda self: self._held, lambda self, value: setattr(self, '_held', value))
"""
# Where a container is kept: how it gets there, and its name in forward() and outside.
_PLACES = (
    ("net.held = {}", "self.held"),
    ("net.lin.held = {}", "self.lin.held"),
    ("net.by = types.SimpleNamespace(held={})", "self.by.held"),
    ("net.by = Helper({})", "self.by.held"),
    ("net.by = Slotted({})", "self.by.held"),
    ("net.by = Computed({})", "self.by.held"),
    ("net.by = {{'deep': [{}]}}", "self.by['deep'][0]"),
    ("Net.held = {}", "type(self).held"),
    ("held = {}", "held"),
)
_TABLES = ("dict(a=1.0, b=2.0)", "collections.OrderedDict(a=1.0)", "collections.Counter(a=1)")
_ON_TABLES = (
    "X['a'] += 1; y = float(len(X) + X['a'])",
    "X['a'] += 1; y = sum(X.values())",
    "X['a'] += 1; y = [v for _, v in X.items()][0]",
    "X['a'] += 1; y = dict(X)['a']",
    "X['a'] += 1; y = {**X}['a']",
    "X['a'] += 1; y = float(len(str(X))) + X['a']",
    "X['a'] += 1; y = X['a'] if X else 1.0",
    "X[len(X)] = 1.0; y = float(len(X))",
    "v = X['a']; del X['a']; X['a'] = v; k = next(iter(X)); X[k] += 1; y = sum(X.values())",
    "X['z'] = 1.0; del X[next(iter(X))]; y = sum(X.values())",
)
_LISTS = ("[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]", "collections.deque([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])")
_ON_LISTS = (
    "X[0] *= 2; y = sum(X)",
    "X[0] *= 2; y = [v for v in X][0]",
    "X[0] *= 2; y = float(np.mean(X))",
    "X[0] *= 2; first, *rest = X; y = first",
    "X[0] *= 2; X.append(1.0); y = float(len(X)) + X[0]",
    "del X[0]; y = float(len(X))",
    "del X[0]; y = X[0]",
    "X[0] = X[0] * torch.ones(()); y = torch.stack([torch.as_tensor(v) for v in X]).sum()",
)


def _combined(objects: tuple[str, ...], bodies: tuple[str, ...]) -> list[Deed]:
    """Every place with every statement; the kinds of containers take turns."""
    found = []
    for number, ((put, name), body) in enumerate(itertools.product(_PLACES, bodies)):
        made = put.format(objects[number % len(objects)])
        outside = name.replace("type(self)", "Net").replace("self", "net")
        tells = f"str({outside})"
        found.append(Deed(f"{_HELPERS}\n{made}", body.replace("X", name), tells))
    return found


CONTAINERS = [*_combined(_TABLES, _ON_TABLES), *_combined(_LISTS, _ON_LISTS)]


_STATE = """
net.done = False; net.mid = nn.Linear(3, 3); net.act = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
net.rows = nn.ModuleList([nn.Linear(3, 3)]); net.named = nn.ModuleDict({'a': nn.Linear(3, 3)})
net.scales = nn.ParameterList([torch.ones(3)]); net.tuned = nn.ParameterDict({'a': torch.ones(3)})
net.register_buffer('mean', torch.ones(3)); net.plain = torch.ones(3)
def new(value):
    made = nn.Linear(3, 3)
    nn.init.constant_(made.weight, value); nn.init.zeros_(made.bias)
    return made
"""
_TELLS_STATE = (
    "net.done, net.plain, sorted(net.__dict__), [type(m).__name__ for m in net.modules()], "
    "[list(m._modules) for m in net.modules()], [m.training for m in net.modules()], "
    "len(net.scales), list(net.tuned), [m.__dict__.get('mark') for m in net.modules()], "
    "[(n, str(p.dtype), p.requires_grad, p.detach()) "
    "for n, p in net.named_parameters(remove_duplicate=False)], "
    "[(n, b) for n, b in net.named_buffers()], [len(m._forward_hooks) for m in net.modules()]"
)
_LINE = "\n        "  # of forward()
_USES = (
    f"{_LINE}h = self.named['a'](self.rows[-1](self.act(self.mid(self.lin(x))))) * self.scales[-1]"
    "; y = (h * [*self.tuned.values()][-1] * self.plain * self.mean).sum().detach()"
)
# Done once, behind a flag that is written first.
_ONCE = (
    "self.mid = nn.Sequential(self.mid, nn.Tanh())",
    "self.act[1] = nn.Tanh()",
    "self.act.append(nn.Tanh())",
    "self.add_module('mid', new(.2))",
    "self.set_submodule('act.1', nn.Tanh())",
    "self._modules['mid'] = new(.2)",
    "self.rows.append(new(.2))",
    "self.rows.insert(0, new(.2)); self.rows[1] = new(.3)",
    "self.rows = nn.ModuleList([*self.rows, new(.2)])",
    "self.named['a'] = new(.2); self.named['b'] = new(.3)",
    "del self.named['a']; self.named['a'] = nn.Tanh()",
    "del self.mid; self.mid = nn.Tanh()",
    "self.mid, self.act = self.act, self.mid",
    "self.scales.append(nn.Parameter(torch.ones(3) * 2))",
    "self.scales.extend([nn.Parameter(torch.ones(3) * 2)])",
    "self.tuned['b'] = nn.Parameter(torch.ones(3) * 2)",
    "self.tuned.update({'b': nn.Parameter(torch.ones(3) * 2)})",
    "self.tuned['b'] = nn.Parameter(torch.ones(3) * 2); self.tuned.pop('a')",
    "self.register_parameter('more', nn.Parameter(torch.ones(3)))",
    "self.mid.register_parameter('bias', None)",
    "self.mid.weight = nn.Parameter(self.mid.weight.detach() * 2)",
    "self.mid.weight = self.rows[0].weight",
    "self.register_buffer('more', torch.ones(3)); self.plain = self.plain * 2",
    "self.mean = self.mean * 2; self.mid = nn.Sequential(self.mid)",
    "self.__dict__.update(plain=self.plain * 2); self.act[1] = nn.Tanh()",
    "object.__setattr__(self, 'plain', self.plain * 2); self.act[1] = nn.Tanh()",
    "setattr(self, 'mid', new(.2)); delattr(self, 'plain'); self.plain = torch.ones(3) * 2",
    "self.apply(lambda m: setattr(m, 'mark', 1)); self.mid = new(.2)",
    "self.mid.register_forward_hook(lambda m, i, o: o * 2); self.act[1] = nn.Tanh()",
    "nn.utils.parametrizations.weight_norm(self.mid)",
    "self.eval(); self.mid = new(.2)",
)
# Done at every call, without any other write: nothing but the object itself is another one.
_ALWAYS = (
    "self.act[1] = nn.Tanh()",
    "self.mid.weight = nn.Parameter(self.mid.weight.detach() * 2)",
    "self.mid = new(float(x.shape[0]))",
    "self.rows[0], self.named['a'] = self.named['a'], self.rows[0]",
)
# The same, but that it is as it was from the second call on.
_SOON_DONE = (
    "self.mid.weight = self.rows[0].weight",
    "self.act.add_module('0', self.act._modules.pop('0'))",
    "k = next(iter(self.act._modules)); self.act._modules[k] = self.act._modules.pop(k)",
)
REPLACED = [
    *deeds(
        _STATE,
        tuple(
            f"if not self.done: {body}{_USES}"
            for once in _ONCE
            for body in (f"self.done = True; {once}", f"{once}; self.done = True")
        ),
        _TELLS_STATE,
    ),
    *deeds(_STATE, tuple(body + _USES for body in _ALWAYS), _TELLS_STATE, ("attribute_written",)),
    *deeds(_STATE, tuple(body + _USES for body in _SOON_DONE), _TELLS_STATE),
]


_CLASSES = """
class Above: count = 1.0
class Below(Above): pass
class Noted(dict):
    writes = 0
    def __setitem__(self, key, value): dict.__setitem__(self, key, value); self.writes += 1
class Told(type):
    def __setattr__(cls, name, value): type.__setattr__(cls, name, value); told.append(name)
class Ruled(metaclass=Told): count = 1.0
told = []
net.held = Noted(a=1.0); by = Noted(a=1.0)
"""
OF_USERS = deeds(
    _CLASSES,
    (
        "self.held['a'] += 1; y = sum(self.held.values()) + self.held.writes",
        "by['a'] += 1; y = sum(by.values()) + by.writes",
        "y = Above.count + Below.count; Above.count += 1",
        "y = Below.count + Above.count; Above.count += 1",
        "y = Above.count + Below.count; Below.count += 1",
        "y = Above.count + Below.count; Below.count = Above.count + 1; Above.count *= 2",
        "Ruled.count += 1; y = Ruled.count",
        "setattr(Ruled, 'count', Ruled.count + 1); y = Ruled.count",
    ),
    "dict(net.held), net.held.writes, dict(by), by.writes, Above.count, 'count' in vars(Below), "
    "Below.count, Ruled.count, list(told)",
)


_TEACHER = "; net.mid = nn.Linear(3, 3); net.hidden = [nn.Linear(3, 3)]; outer = nn.Linear(3, 3)"
_TELLS_TEACHER = (
    "[(str(p.dtype), p.detach()) for m in (net.mid, net.hidden[0], outer) for p in m.parameters()]"
)
# Code of torch gives parameters another memory; W is a module.
_MOVES = (
    "vector_to_parameters(parameters_to_vector(W.parameters()) * .9, W.parameters())",
    "vector_to_parameters(torch.ones(12), W.parameters())",
    "W.double(); W.weight.mul_(.9); W.float()",
    "W.weight.mul_(.9); W.double(); W.weight.mul_(.9); W.float()",
    "W.half().float()",
    "W.half(); W.bias.add_(1); W.float(); W.bias.mul_(2)",
    "W.to(torch.float64); W.bias.add_(1); W.to(torch.float32)",
    "W._apply(lambda t: t * 2)",
    "W.share_memory(); W.weight.mul_(.9)",
    "W.share_memory(); W.weight.view(-1)[:4].mul_(.9)",
    "W.weight.mul_(2); W.share_memory(); W.bias.detach().add_(1)",
    "W.to_empty(device='cpu'); W.weight.fill_(.5); W.bias.fill_(.5)",
    "W.weight.share_memory_().mul_(.9)",
)
_BY = ("self.mid", "self.hidden[0]", "outer")
MEMORY = deeds(
    f"{_HELPERS}\nnet.unused = 0{_TEACHER}",
    tuple(
        f"with torch.no_grad(): {body.replace('W', by)}{_LINE}y = {by}(self.lin(x)).sum().detach()"
        for by in _BY
        for body in _MOVES
    ),
    _TELLS_TEACHER,
)

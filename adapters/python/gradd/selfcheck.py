"""The first training step of every capture, compared with PyTorch.

Loss (or outputs) and every gradient are computed twice, without chance on both sides: in the
daemon by the run flag, in PyTorch by a function mode (quiet.py): dropout passes its input through,
other random numbers stand still. PyTorch works on stand-ins that share the parameters' memory, so
`.grad`, hooks, buffers, attributes and the random state of the trainer stay as they are. The bound
is that of the parity tests; where it is missed, PyTorch in double precision decides. What computes
in bf16 is compared with PyTorch in float32: it may be a few times as far from that as PyTorch's
own bf16 is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from gradd import protocol, schema
from gradd.export.spec import CaptureError
from gradd.fallback import SelfCheckError
from gradd.graphs import Graph
from gradd.quiet import Quiet, without_checkpoints

if TYPE_CHECKING:
    from gradd.bridge import Bridge

_OWN = 1e-4  # of a gradient's own largest entry
_FLOOR = 1e-4  # of the largest entry of all gradients, times _OWN
_LOSS = 1e-5
_ROUNDING = 2.0**-8  # one step between bf16 numbers, relative
_WORSE = 4  # times PyTorch's own error in bf16
_WORSE_F32 = 10  # in f32; attention that keeps no weights loses a digit where they saturate

Values = tuple[list[torch.Tensor], dict[str, torch.Tensor | None]]


def check(
    bridge: Bridge, graph: Graph, leaves: list, args: tuple, kwargs: dict, params: tuple[int, ...]
) -> None:
    """Raises SelfCheckError if the daemon's first step differs from PyTorch's.

    Args:
        bridge: The bridge, whose lock the caller holds.
        graph: The graph to check.
        leaves: Flattened arguments of the call.
        args: The call.
        kwargs: The call.
        params: Positions in graph.bound of the parameters that need a gradient.
    """
    checked = _checked_outputs(graph, params)
    ours = _in_daemon(bridge, graph, leaves, params, checked)
    theirs = _in_torch_or_named(bridge, graph, args, kwargs, params, checked)
    half = graph.info.half
    bad = None if half else _difference(ours, theirs, None)
    if half or bad is not None:
        exact = None
        # A module may insist on its own precision: then nothing exact is to be had.
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            higher = torch.float32 if half else torch.float64
            exact = _in_torch(bridge, graph, args, kwargs, params, checked, higher)
        if half and exact and _same_bits(exact, theirs):
            exact = None  # forward() enters autocast by itself
        bad = (_rounded_difference if half else _difference)(ours, theirs, exact)
    if bad is not None:
        raise SelfCheckError(
            f"the first training step of {type(bridge.module).__name__} differs from PyTorch: "
            f"{bad}. GRADD_SELF_CHECK=0 disables this check"
        )


def _checked_outputs(graph: Graph, params: tuple[int, ...]) -> list[int]:
    """The loss alone if the graph holds one, else every differentiable output."""
    flags, _, _ = graph.differentiable(params, ())
    for i, spec in enumerate(graph.user):
        if flags[i] and spec.leaf == graph.cap.loss_leaf:
            return [i]
    return [i for i, flag in enumerate(flags) if flag]


def _seeds(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients to start from: ones for scalars, else a fixed pattern without structure."""
    return [
        torch.cos(torch.arange(t.numel(), dtype=torch.float64) * 1.7).reshape(t.shape).to(t.dtype)
        if t.dim()
        else torch.ones_like(t)
        for t in outputs
    ]


def _in_daemon(
    bridge: Bridge, graph: Graph, leaves: list, params: tuple[int, ...], checked: list[int]
) -> Values:
    binding, bound = graph.bind(bridge.state)
    inputs = [t.detach() for t in bridge._inputs(graph, leaves)]
    names = tuple(graph.user[i].name for i in checked)
    gmask = tuple(range(len(names)))
    flags = protocol.DROPOUT_OFF
    run = bridge._run(graph, binding, bound, inputs, params, (), names, gmask, flags)
    try:
        outputs = run.start()
        grads = run.backward(_seeds(outputs), keep=False)
        return outputs, dict(zip(run.plan.params, grads, strict=True))
    finally:
        run.end()


def _in_torch_or_named(
    bridge: Bridge, graph: Graph, args: tuple, kwargs: dict, params: tuple[int, ...], checked: list
) -> Values:
    """PyTorch's side of the comparison; its failure is one of the check, not of training."""
    try:
        return _in_torch(bridge, graph, args, kwargs, params, checked, None)
    except CaptureError:
        raise
    except Exception as error:  # whatever the module raises when it runs without chance
        raise SelfCheckError(
            f"the first training step of {type(bridge.module).__name__} cannot be compared: in "
            f"PyTorch it raises {type(error).__name__}: {error}. GRADD_SELF_CHECK=0 disables this "
            "check"
        ) from error


def _in_torch(
    bridge: Bridge,
    graph: Graph,
    args: tuple,
    kwargs: dict,
    params: tuple[int, ...],
    checked: list[int],
    dtype: torch.dtype | None,
) -> Values:
    """The same in PyTorch; with a dtype everything is converted to it first."""
    from torch.nn.utils.stateless import _reparametrize_module

    from gradd.export.refuse import kept_state
    from gradd.export.results import Result

    stand_ins = _stand_ins(bridge.module, graph, dtype)
    wanted = {graph.bound[i] for i in params}
    leaves, _, _ = schema.flatten_inputs(args, kwargs)
    leaves = [_leaf(x, dtype) if torch.is_tensor(x) else x for x in leaves]
    args, kwargs = schema.unflatten_inputs(args, kwargs, leaves)
    with (
        kept_state(bridge.module),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False) if dtype else contextlib.nullcontext(),
        _reparametrize_module(bridge.module, stand_ins, tie_weights=True),
        Quiet(),
        without_checkpoints(),
        torch.autograd.graph.saved_tensors_hooks(_detached, _same),  # not the trainer's hooks
    ):
        flat = Result().flatten(bridge.forward(*args, **kwargs))
        outputs = [flat[graph.user[i].leaf] for i in checked]
        _backward(outputs, stand_ins.values())
    grads = {n: t.grad for n, t in stand_ins.items() if n in wanted}
    return [t.detach() for t in outputs], grads


def _stand_ins(
    module: torch.nn.Module, graph: Graph, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Leaves that share the memory of parameters, and copies of buffers."""
    stand_ins: dict[str, torch.Tensor] = {}
    for name, tensor in module.named_parameters():
        stand_ins[name] = _leaf(tensor, dtype)
    for first, *others in graph.cap.aliases:
        # Tied by memory, though different objects: one stand-in collects the whole gradient.
        stand_ins.update({n: stand_ins[first] for n in others if n in stand_ins})
    for name, tensor in module.named_buffers():
        stand_ins[name] = _cast(tensor.detach().clone(), dtype)
    return stand_ins


def _leaf(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return _cast(tensor.detach(), dtype).requires_grad_(tensor.requires_grad)


def _backward(outputs: list[torch.Tensor], ours: Iterable[torch.Tensor]) -> None:
    """Fills `.grad` of our own leaves, and of no others.

    What a module computes again in its backward does not know autograd.grad() or `inputs`, and
    needs the caller's contexts: they must still be open.
    """
    known = {id(t) for t in ours}
    others = [(t, t.grad) for t in _leaves_of(outputs) if id(t) not in known]
    for leaf, _ in others:
        if isinstance(leaf, torch.nn.Parameter):
            raise CaptureError(
                "unsupported_parameter",
                f"forward() uses a trainable parameter of shape {list(leaf.shape)} that is not "
                "registered in the module (in a plain list?) and would get no gradient; register "
                "it, or keep modules in a ModuleList",
            )
    for leaf, _ in others:
        leaf.grad = None  # else it would be added to in place
    try:
        live = [(t, s) for t, s in zip(outputs, _seeds(outputs), strict=True) if t.requires_grad]
        if live:
            torch.autograd.backward([t for t, _ in live], [s for _, s in live])
    finally:
        for leaf, grad in others:
            leaf.grad = grad


def _leaves_of(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in whose `.grad` a backward from these outputs would write."""
    found: dict[int, torch.Tensor] = {}
    nodes = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        more = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= more
        nodes += more
    return list(found.values())


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """A result that its own node saves would keep itself alive if no gradient passes there."""
    return tensor.detach()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


def _same_bits(exact: Values, theirs: Values) -> bool:
    """Whether the higher precision made no difference at all."""
    pairs = [*zip(exact[0], theirs[0], strict=True)]
    pairs += [(g, theirs[1][n]) for n, g in exact[1].items() if g is not None]
    return all(b is not None and torch.equal(a.float(), b.float()) for a, b in pairs)


def _missing(name: str, a: torch.Tensor | None, b: torch.Tensor | None) -> str | None:
    """Says which side has no gradient, if the other's matters."""
    value = b if a is None else a
    if value is None or _largest(value) == 0.0:
        return None
    return f"{'the daemon' if a is None else 'PyTorch'} has no gradient for {name}"


def _difference(ours: Values, theirs: Values, exact: Values | None) -> str | None:
    """The first disagreement in words, or None."""
    for i, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True)):
        truth = exact[0][i] if exact else None
        if not _close(a, b, max(_LOSS * _largest(b), 1e-12), truth):
            return f"output {i} by {_largest(a - b):.3g} (largest value {_largest(b):.3g})"
    largest = max((_largest(g) for g in theirs[1].values() if g is not None), default=0.0)
    for name, b in theirs[1].items():
        a = ours[1].get(name)
        if a is None or b is None:
            if text := _missing(name, a, b):
                return text
            continue
        truth = exact[1].get(name) if exact else None
        if not _close(a, b, _OWN * max(_largest(b), _FLOOR * largest), truth):
            return (
                f"the gradient of {name} by {_largest(a - b):.3g} (largest entry "
                f"{_largest(b):.3g}, of all gradients {largest:.3g})"
            )
    return None


def _rounded_difference(ours: Values, theirs: Values, exact: Values | None) -> str | None:
    """The same for what computes in bf16: by the length of the difference from `exact`.

    Without `exact` PyTorch's own result stands in for it, with an error of a few roundings.
    """
    truth = exact or theirs
    for i, (a, b, e) in enumerate(zip(ours[0], theirs[0], truth[0], strict=True)):
        if text := _too_far(a, b, e, 0.0, exact is None):
            return f"output {i} {text}"
    lengths = [_length(g) for g in truth[1].values() if g is not None]
    floor = _FLOOR * max(lengths, default=0.0)
    for name, b in theirs[1].items():
        a = ours[1].get(name)
        e = truth[1].get(name)
        if a is None or b is None or e is None:
            if text := _missing(name, a, b):
                return text
        elif text := _too_far(a, b, e, floor, exact is None):
            return f"the gradient of {name} {text}"
    return None


def _too_far(
    a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor, floor: float, guess: bool
) -> str | None:
    """In words how far `a` is from `exact`, if that is too far for PyTorch's own `b`."""
    scale = max(_length(exact), floor)
    off, own = _length(a.double() - exact.double()), _length(b.double() - exact.double())
    if guess:
        own = 2 * _ROUNDING * scale
    if off <= _WORSE * own + _ROUNDING * scale or off != off and not exact.isfinite().all():
        return None
    return f"by {off:.3g} (length {scale:.3g}, PyTorch's own error {own:.3g})"


def _length(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().norm())


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _close(a: torch.Tensor, b: torch.Tensor, bound: float, truth: torch.Tensor | None) -> bool:
    if torch.equal(torch.isnan(a), torch.isnan(b)) and torch.isnan(a).any():
        a, b = torch.nan_to_num(a, nan=0.0), torch.nan_to_num(b, nan=0.0)
    difference = _largest(a.double() - b.double())
    if difference <= bound or difference != difference and not b.isfinite().all():
        return True
    if truth is None:
        return False
    own = _largest(b.double() - truth.double())
    return _largest(a.double() - truth.double()) <= _WORSE_F32 * own

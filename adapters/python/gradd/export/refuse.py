"""What a graph cannot hold: checks before a trace, and watching during one.

A hook or a torch.autograd.Function would be lost or baked in without any visible difference in
the loss, so they are refused by name (autocast.py refuses what it cannot capture).
quiet_trace() is the context in which every trace runs: it catches autograd Functions of this
thread, refuses what forward() writes or draws outside of the graph, and leaves random states and
the attributes of every submodule as it found them.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradd.check.without_chance import without_checkpoints
from gradd.export import inner, places, replaced
from gradd.export.attributes import BACKWARD_HOOKS, FORWARD_HOOKS, Attributes, is_harmless
from gradd.export.guards import policy
from gradd.export.random_draws import Chance
from gradd.session.shm import DTYPE_CODES
from gradd.spec import CaptureError
from gradd.tensor_kinds import is_dense, is_plain, refusal

_patch_lock = threading.RLock()


def check_module(module: torch.nn.Module) -> None:
    """Refuses hooks and foreign parameter types.

    Raises:
        CaptureError: "forward_hooks", "backward_hooks", "unsupported_operator",
            "tensor_subclass" or "unsupported_parameter".
    """
    for name, sub in module.named_modules():
        where = f"{name or 'the root'} ({type(sub).__name__})"
        _check_nested(sub, where)
        for reason, tables in (
            ("forward_hooks", FORWARD_HOOKS),
            ("backward_hooks", BACKWARD_HOOKS),
        ):
            for hook in (h for table in tables for h in getattr(sub, table).values()):
                if not is_harmless(hook):
                    raise CaptureError(reason, _hook_text(where, hook))
    _check_global_hooks()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not is_plain(type(tensor)):
            raise refusal(name, type(tensor))
    for name, param in module.named_parameters():
        if not isinstance(param, torch.nn.Parameter):
            raise CaptureError(
                "unsupported_parameter",
                f"{name} is a tensor that is no Parameter (functional_call put it there?): make "
                "it a Parameter, or call the module as it is first",
            )
        if param.is_complex() or not is_dense(param):
            raise CaptureError(
                "unsupported_parameter", f"{name} is {param.dtype}, {param.layout}; use dense reals"
            )


def check_states(module: torch.nn.Module, program: Any) -> None:
    """Refuses what a graph reads of the module and the daemon has no element type for.

    Raises:
        CaptureError: "unsupported_parameter".
    """
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    own = dict(module.named_parameters(remove_duplicate=False))
    own |= dict(module.named_buffers(remove_duplicate=False))
    for node in program.graph.nodes:
        tensor = own.get(names.get(node.name, ""))
        if tensor is None or not node.users or tensor.dtype in DTYPE_CODES:
            continue
        reader = places.place_of(next(iter(node.users)))
        raise CaptureError(
            "unsupported_parameter",
            f"{reader}: forward() reads {names[node.name]!r}, of {tensor.dtype}, which the daemon "
            "does not have; keep it as real numbers of a usual type",
        )


def check_call(module: torch.nn.Module) -> None:
    """Refuses a root that does something around forward(), where only forward() is captured.

    Raises:
        CaptureError: "forward_hooks".
    """
    for name in ("__call__", "_call_impl"):
        owner = next(cls for cls in type(module).__mro__ if name in cls.__dict__)
        code = getattr(owner.__dict__[name], "__code__", None)
        if code is None or not policy.is_torch_file(code.co_filename):
            raise CaptureError(
                "forward_hooks",
                f"{owner.__qualname__} has a {name}() of its own; put its work into forward()",
            )


def _check_nested(sub: torch.nn.Module, where: str) -> None:
    """torch computes such an encoder on nested tensors, which leave zeros where padding was."""
    if torch.is_grad_enabled() or sub.training:
        return
    if isinstance(sub, torch.nn.TransformerEncoder) and getattr(sub, "use_nested_tensor", False):
        raise CaptureError(
            "unsupported_operator",
            f"{where} runs on nested tensors in eval mode without gradients, which give zeros at "
            "padded positions; build it with enable_nested_tensor=False",
        )


def _hook_text(where: str, hook: object) -> str:
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return f"{where} has the hook {name}; remove it, or put its work into forward()"


def _check_global_hooks() -> None:
    hooks = torch.nn.modules.module
    for attr in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        if getattr(hooks, attr):
            raise CaptureError("forward_hooks", f"torch.nn.modules.module.{attr} is not empty")
    for attr in ("_global_backward_hooks", "_global_backward_pre_hooks"):
        if getattr(hooks, attr):
            raise CaptureError("backward_hooks", f"torch.nn.modules.module.{attr} is not empty")


class _Watched(torch.autograd.Function):
    """Owner of the code that stands in for Function.apply while a trace runs."""

    @classmethod
    def apply(cls, *args, **kwargs):
        # Runs with the globals of torch's own function, hence the import.
        from gradd.export import refuse

        assert __class__ is not None  # code may only be exchanged if it has the same free names
        return refuse._called(cls, args, kwargs)


_APPLY = torch.autograd.Function.__dict__["apply"].__func__
_PLAIN = types.FunctionType(
    _APPLY.__code__, _APPLY.__globals__, "apply", _APPLY.__defaults__, _APPLY.__closure__
)
_traces: dict[int, list[CaptureError]] = {}  # thread that traces -> what was found


def _called(cls: type, args: tuple, kwargs: dict) -> Any:
    """A call of Function.apply, however it was reached, while some thread traces."""
    found = _traces.get(threading.get_ident())
    # torch.cond and its like are refused later, by what they become.
    if found is None or cls.__module__.startswith("torch._higher_order_ops"):
        return _PLAIN(cls, *args, **kwargs)
    found.append(custom_function(f"{cls.__module__}.{cls.__qualname__}"))
    raise found[0]


def custom_function(name: str) -> CaptureError:
    """What is said of a torch.autograd.Function."""
    return CaptureError(
        "autograd_function",
        f"forward() applies {name}, a torch.autograd.Function whose backward() cannot be "
        "captured: write it with ordinary operations or keep that part in torch",
    )


@contextlib.contextmanager
def _no_custom_backward() -> Iterator[None]:
    """Turns Function.apply and Tensor.register_hook of this thread into a CaptureError.

    The tracer inlines the forward of a Function and forgets its backward, and a hook on a tensor
    altogether. A module may keep F.apply in an attribute, so it is the code of torch's function
    that is exchanged, not the name under which it is found.
    """
    me = threading.get_ident()
    found: list[CaptureError] = []
    over = False
    register_hook = torch.Tensor.register_hook

    def hook(tensor, function):
        if over or threading.get_ident() != me:
            return register_hook(tensor, function)
        found.append(
            CaptureError(
                "backward_hooks",
                f"forward() calls register_hook({getattr(function, '__qualname__', function)}) on "
                "a tensor; the hook would be lost",
            )
        )
        raise found[0]

    with _patch_lock:
        _traces[me] = found
        _APPLY.__code__ = _Watched.__dict__["apply"].__func__.__code__
        torch.Tensor.register_hook = hook
        try:
            yield
        finally:
            _APPLY.__code__ = _PLAIN.__code__
            torch.Tensor.register_hook = register_hook
            over = True
            del _traces[me]
            first = found[0] if found else None
            found.clear()  # errors hold frames, and so the module
    if first is not None:  # a module that swallows exceptions must not hide the loss of a backward
        raise first


def attribute_written(where: str) -> CaptureError:
    """What is said of an attribute of the module that forward() writes."""
    return CaptureError(
        "attribute_written",
        f"forward() writes {where}; a graph computes results and buffers only: return the value, "
        "or register a tensor as a buffer, or change the attribute outside of forward()",
    )


@contextlib.contextmanager
def kept_state(
    module: torch.nn.Module, attributes: Attributes | None = None
) -> Iterator[Callable[[], None]]:
    """Restores the attributes of every submodule and all random states.

    Args:
        module: The module.
        attributes: Those of the module, if the caller has noted them already.

    Yields:
        A function that refuses what forward() has written or drawn so far.
    """
    attributes, chance = attributes or Attributes(module), Chance(module)

    def refuse_effects() -> None:
        where = attributes.written()
        if where is not None:
            raise attribute_written(where)
        name = chance.drawn()
        if name is not None:
            raise CaptureError(
                "python_random",
                f"forward() draws from {name}, whose numbers would stay those of the capture; "
                "draw with torch, or outside of forward()",
            )

    try:
        yield refuse_effects
    finally:
        attributes.restore()
        chance.restore()


@contextlib.contextmanager
def quiet_trace(module: torch.nn.Module, gradients: bool) -> Iterator[Callable[[], None]]:
    """Context of a trace: gradient mode as given, random states and module left as they were.

    Yields:
        What to call when forward() is done, as of kept_state(). After the trace is too late: the
        exporter puts back most attributes itself.
    """
    with (
        kept_state(module) as refuse_effects,
        _no_custom_backward(),
        inner.refused(),
        replaced.own_functions(),
        without_checkpoints(),  # one is a Function, and the other's frames would outlive the trace
        torch.inference_mode(False),
        torch.set_grad_enabled(gradients),
    ):
        yield refuse_effects

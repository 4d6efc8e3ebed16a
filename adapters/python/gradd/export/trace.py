"""From a module call to a torch.export program whose sizes are as dynamic as possible.

The module is traced through a shell that shares its parameter tables (so qualified names stay)
but takes the tensor leaves of the call as flat arguments and returns the tensor leaves of the
result: argument and result structure never reach the exporter. Sizes 0 and 1 are specialised: a
branch on them or a squeeze() makes another graph. Other sizes are dynamic; where the exporter
cannot have that, the next attempt is more literal.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gradd import schema
from gradd.export import answers, assigned, autocast, dims, places, refuse, regions, results
from gradd.export.identity import Originals, Same, like, standing
from gradd.export.naming import Call
from gradd.export.silence import silence
from gradd.spec import CaptureError, DimRules


class _Shell(torch.nn.Module):
    """Flat-argument view of a module: same parameters and names, other signature."""

    def __init__(self, module: torch.nn.Module, call: Callable[[tuple], tuple]) -> None:
        super().__init__()
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = module.__dict__[table]
        self.__dict__["training"] = module.training
        self.__dict__["_gradd_call"] = call

    def forward(self, *leaves: torch.Tensor) -> tuple:
        return self._gradd_call(leaves)


class Trace:
    """Result of trace(): the exported program and what it takes to interpret it."""

    def __init__(self, program: Any, rules: DimRules, result: results.Result) -> None:
        self.program = program
        self.rules = rules
        self.result = result
        # Flat position of a traced argument -> leaf number of the call.
        self.leaf_numbers: list[int] = []
        self.sizes: list[tuple[int, ...]] = []  # of those arguments
        self._decided = dims.decisions(program)

    def close(self) -> None:
        """Makes rules of what was decided about sizes after the trace."""
        known = set(self._decided)
        more = [guard for guard in dims.decisions(self.program) if guard not in known]
        if more:
            self.rules = dims.with_decisions(self.rules, more, self.sizes)


def trace(
    call: Call, cast: torch.dtype | None, gradients: bool = True, asking: Sequence[dict] = ()
) -> Trace:
    """Traces a call in its module's current mode, under autocast to `cast`.

    Args:
        call: The call.
        cast: Element type of the autocast around it, or None.
        gradients: Whether gradients are enabled inside; False only for a forward() that asks.
        asking: Globals of code that asks type() for the class of a number.

    Raises:
        CaptureError: The reason names what the module does that a graph cannot hold.
    """
    args, kwargs = call.args, call.kwargs
    leaves, structure, paths = schema.flatten_inputs(args, kwargs)
    numbers = [i for i, (x, p) in enumerate(zip(leaves, paths)) if schema.is_tensor_leaf(x, p)]
    tensors = [_dense(schema.as_tensor_leaf(leaves[i]), paths[i]) for i in numbers]
    result = results.Result()
    same, originals = Same(call.module, leaves), Originals(call.module)

    def run(values: tuple) -> tuple:
        originals.impersonate()
        filled = list(leaves)
        for number, value in zip(numbers, values, strict=True):
            tensor = leaves[number]
            filled[number] = like(value, tensor) if torch.is_tensor(tensor) else value
        same.fill(filled, standing(call.module))
        new_args, new_kwargs = schema.unflatten_inputs(args, kwargs, filled)
        with autocast.entered(cast), regions.followed(call.module):
            write_back = assigned.kept(call.module)
            returned = result.flatten(call.forward(*new_args, **new_kwargs))
            write_back()
        left, structure_left, _ = schema.flatten_inputs(new_args, new_kwargs)
        if structure_left != structure or any(a is not b for a, b in zip(left, filled)):
            raise CaptureError(
                "input_mutation",
                "forward() changes a list or dict among its arguments, which a graph cannot; "
                "return the values instead",
            )
        return returned

    error: CaptureError | None = None
    sizes = [tuple(t.shape) for t in tensors]
    for spec in _attempts(tensors):
        try:
            with answers.as_untraced(asking):
                program = _export(call.module, run, tuple(tensors), spec, gradients)
        except _RetryError as err:
            error = err.error
            continue
        _refuse_item(program)
        rules = dims.rules_of(program, numbers)
        if dims.violated(rules, sizes) is None:
            done = Trace(program, rules, result)
            done.leaf_numbers, done.sizes = numbers, sizes
            return done
    raise error or CaptureError("export_failed", "no attempt at a trace accepts the given sizes")


def _refuse_item(program: Any) -> None:
    for node in program.graph.nodes:
        if node.op == "call_function" and isinstance(
            node.meta.get("val"), (torch.SymFloat, torch.SymBool)
        ):
            if "item" in str(node.target) or "local_scalar" in str(node.target):
                raise CaptureError(
                    "data_dependent_control_flow",
                    f"{places.place_of(node)}: .item() or float() takes a value out of the graph; "
                    "keep it a tensor",
                )


def _dense(tensor: torch.Tensor, path: str) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_complex():
        raise CaptureError(
            "unsupported_input_type",
            f"argument {path!r} is {tensor.dtype}, {tensor.layout}; use dense real tensors",
        )
    if tensor.is_inference():  # autograd refuses those, and a trace needs autograd
        with torch.inference_mode(False):
            return tensor.clone()
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _attempts(tensors: list[torch.Tensor]) -> Iterator[tuple]:
    """Sizes as symbols, but for those that the trace itself has to fix; then literal ones."""
    yield tuple(dict.fromkeys(_varying(t), torch.export.Dim.AUTO) for t in tensors)
    yield tuple({} for _ in tensors)


def _varying(tensor: torch.Tensor) -> list[int]:
    """Axes whose size may differ in the next call.

    Of colour pictures only the batch: networks that cut them into windows keep the tracer busy
    for many minutes with symbolic heights and widths.
    """
    if tensor.dim() == 4 and tensor.is_floating_point() and tensor.shape[1] == 3:
        return [0] if tensor.shape[0] > 1 else []
    return [j for j, n in enumerate(tensor.shape) if n > 1]


class _RetryError(Exception):
    def __init__(self, error: CaptureError) -> None:
        super().__init__(str(error))
        self.error = error


def _export(
    module: torch.nn.Module, call: Callable, sample: tuple, spec: tuple, gradients: bool
) -> Any:
    shapes = (spec,) if sample else None
    with (
        refuse.quiet_trace(module, gradients) as refuse_effects,
        silence(),
        autocast.lowered(),
        _no_stale_gradients(),
        _no_question_of_precision(),
    ):

        def watched(values: tuple) -> tuple:
            done = call(values)
            refuse_effects()
            return done

        shell = _Shell(module, watched)
        try:
            # The exporter prints the partial graph of a failure; the CaptureError says enough.
            with contextlib.redirect_stderr(io.StringIO()) as text:
                program = torch.export.export(shell, sample, dynamic_shapes=shapes, strict=False)
            sys.stderr.write(text.getvalue())
            return program
        except CaptureError:
            raise
        except Exception as err:  # the exporter raises whatever the module or torch raises
            error = _explain(err, module)
            if error.reason == "export_failed":
                raise _RetryError(error) from err
            raise error from err


@contextlib.contextmanager
def _no_question_of_precision() -> Iterator[None]:
    """The exporter takes libraries out of the way by functions that read and write TF32 as well.

    They fail where `torch.backends.fp32_precision` is set, as transformers does for `tf32=False`.
    """
    from torch.export import _trace

    libraries = ("mkldnn", "nnpack", "cudnn")

    @contextlib.contextmanager
    def ignored() -> Iterator[None]:
        before = [getattr(torch._C, f"_get_{name}_enabled")() for name in libraries]
        for name in libraries:
            getattr(torch._C, f"_set_{name}_enabled")(False)
        try:
            yield
        finally:
            for name, value in zip(libraries, before, strict=True):
                getattr(torch._C, f"_set_{name}_enabled")(value)

    plain = _trace._ignore_backend_decomps
    _trace._ignore_backend_decomps = ignored
    try:
        yield
    finally:
        _trace._ignore_backend_decomps = plain


@contextlib.contextmanager
def _no_stale_gradients() -> Iterator[None]:
    """The tracer copies `.grad` of parameters too, and fails on one of an earlier size or type.

    Such a gradient is left over from before the parameter was resized through `.data`; the next
    zero_grad() drops it. Other threads may trace meanwhile: theirs would fail as well.
    """
    from torch._subclasses import meta_utils

    read = meta_utils.safe_grad

    def fitting(tensor: torch.Tensor) -> torch.Tensor | None:
        grad = read(tensor)
        if grad is None or (grad.shape == tensor.shape and grad.dtype == tensor.dtype):
            return grad
        return None

    meta_utils.safe_grad = fitting
    try:
        yield
    finally:
        meta_utils.safe_grad = read


def _explain(err: BaseException, module: torch.nn.Module) -> CaptureError:
    """Maps an exporter's exception to a named reason with the place in the user's code."""
    for cause in _chain(err):
        if isinstance(cause, CaptureError):
            return cause
    text = f"{type(err).__name__}: {err}"
    where = places.user_line(_chain(err))
    first = text.strip().splitlines()[0][:300]
    if any("DataDependent" in type(c).__name__ for c in _chain(err)) or "data-dependent" in text:
        instead = "use torch.where, torch.cond or move the decision out of forward()"
        if places.passes(_chain(err), torch.distributions.__file__):
            instead = "torch.distributions checks its arguments: pass validate_args=False"
        return CaptureError(
            "data_dependent_control_flow",
            f"{where}: Python code depends on the value of a tensor ({first}); {instead}",
        )
    if "Unexpected key _export_root" in first:  # the tracer lost track of where it is
        first = "forward() catches an exception of a submodule; decide by sizes or types instead"
    if "found a fake tensor in the exported program" in text:
        return CaptureError(
            "export_failed",
            f"{where}: torch cannot trace what forward() differentiates itself "
            "(torch.autograd.grad) or makes of the values of a traced tensor",
        )
    if "support saved tensor hooks" in text:  # the place is inside of the transform
        return CaptureError(
            "func_transform",
            "forward() differentiates a function (torch.func.grad, vjp, jacrev or hessian), which "
            "a graph cannot hold",
        )
    if ".numpy() is not supported" in text:
        first = "forward() takes the values of a tensor (.numpy()), which a graph does not know"
    return CaptureError("export_failed", f"{where}: {first}")


def _chain(err: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = err
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__

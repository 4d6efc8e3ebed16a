"""Outputs that are not computed until they are read.

Hugging Face models return logits beside the loss, which a training step does not read. Such an
output is a LazyTensor: it knows its shape, its dtype and its run, and requests the value from the
daemon when its content is first used. It is a proper output of the autograd function, so a loss
computed from it outside the graph gets the right gradients. Both cost another forward, but only
once: from the next call on, a requested output is computed with the others.

Reading metadata (shape, dtype) does not compute the value, nor does a conversion to another
floating type: accelerate converts every bf16 output to float32, which gives another LazyTensor. The
value is kept for the life of the run's outputs.

A read after the parameters have changed raises a StaleError. Loops that compute a metric after
`optimizer.step()` do so from their first step on, so the first step of an optimizer computes the
outputs that are still alive just before it changes the parameters. Loops that keep them, for a
metric of an epoch, hold those of the first step in the second one: from then on they count as read.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradd import errors, private

if TYPE_CHECKING:
    from gradd.calls.graph import Graph
    from gradd.calls.run import Run
    from gradd.spec import OutputSpec

_STEPS = 2  # of an optimizer that look at lazy outputs
_WAITING = 64  # references are looked through when there are more

_waiting: list[weakref.ref] = []  # lazy outputs of graphs for which optimizers have not yet stepped
_hooks: list[Any] = []
_CONVERSIONS = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.double: torch.float64,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
}
_CPU = torch.device("cpu")
_METADATA = {
    *(torch.Tensor.dim, torch.Tensor.get_device, torch.Tensor.size, torch.Tensor.numel),
    *(torch.Tensor.nelement, torch.Tensor.element_size, torch.Tensor.is_floating_point),
    *(torch.Tensor.is_complex, torch.Tensor.__len__, torch.is_floating_point, torch.is_complex),
    *(torch.numel,),
}
_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf"),
    *("output_nr", "_version", "is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_meta"),
    *("is_nested", "is_mkldnn", "is_xla", "is_mps", "is_xpu", "names", "itemsize", "nbytes"),
)
for _name in _PROPERTIES:
    _getter = getattr(getattr(torch.Tensor, _name, None), "__get__", None)
    if _getter is not None:
        _METADATA.add(_getter)


def untouched(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function that does not read the values of lazy outputs."""
    return torch.Tensor.__torch_function__(func, (), args, kwargs)


class LazyTensor(torch.Tensor):
    """See the top of this file."""

    _run: Run | None
    _output: str
    _source: LazyTensor | None  # the source of a conversion, which has no run of its own
    _casts: list[weakref.ref]  # conversions of this one that were not computed either
    _ahead: torch.Tensor | None  # the value, computed but not requested yet
    _value: torch.Tensor | None
    _read: torch.Tensor | None  # the value as a step of autograd, once requested

    @staticmethod
    def make(run: Run, spec: OutputSpec) -> LazyTensor:
        dtype, shape = run.type_of_output(spec.name)
        device = run.client.memory.device
        self = LazyTensor._new(shape, dtype, device, run, spec.name, None)
        if run.graph.steps < _STEPS:
            _await_step(self)
        return self

    @staticmethod
    def cast(source: LazyTensor, dtype: torch.dtype) -> LazyTensor:
        """A lazy output in another type."""
        self = LazyTensor._new(source.shape, dtype, source.device, None, source._output, source)
        source._casts.append(weakref.ref(self))
        return self

    @staticmethod
    def _new(
        shape: Any,
        dtype: torch.dtype,
        device: torch.device,
        run: Run | None,
        output: str,
        source: LazyTensor | None,
    ) -> LazyTensor:
        self = private.make_wrapper(LazyTensor, shape, dtype=dtype, device=device)
        self._run = run
        self._output = output
        self._source = source
        self._casts = []
        self._ahead = None
        self._value = None
        self._read = None
        return self

    def gradd_value(self) -> torch.Tensor:
        """The value, without connection to autograd; asks the daemon the first time."""
        if self._value is None:
            if self._source is not None:
                self._source.gradd_value()  # which sets this one's as well
            elif self._ahead is not None:
                self._run.graph.asked_for.add(self._output)  # type: ignore[union-attr]
                self._set(self._ahead)
            else:
                self._set(self._run.read(self._output))  # type: ignore[union-attr]
        return self._value  # type: ignore[return-value]

    def gradd_compute_ahead(self) -> None:
        """Computes and keeps the value, for reads after it can no longer be computed."""
        with contextlib.suppress(errors.GraddError):  # a later read raises it
            self._ahead = self._run.read(self._output, asked=False)  # type: ignore[union-attr]

    def _set(self, value: torch.Tensor) -> None:
        """Conversions get theirs now: afterwards the value may be changed in place."""
        self._value = value
        for cast in [c for c in (ref() for ref in self._casts) if c is not None]:
            cast._set(value.to(cast.dtype))
        self._run = self._source = self._ahead = None
        self._casts = []

    @property
    def gradd_is_computed(self) -> bool:
        """True once the value has been read."""
        return self._value is not None

    def _is_lost(self) -> bool:
        try:
            self.gradd_value()
        except errors.StaleError:
            return True
        return False

    def _describe(self) -> str:
        """Debuggers and notebooks print all that they find: that must not be an error."""
        sizes = ", ".join(str(n) for n in self.shape)
        return (
            f"tensor(<{sizes}> {self.dtype}, not computed, and the parameters have changed since)"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return untouched(func, *args, **kwargs)
        wanted = _converted_type(func, args, kwargs)
        if wanted is not None and wanted is args[0].dtype:
            return args[0]
        if wanted is not None and not args[0].gradd_is_computed:
            return _Cast.apply(args[0], wanted)
        if func is torch.Tensor.__reduce_ex__ or func is torch.Tensor.__deepcopy__:
            return func(args[0].gradd_value().clone(), *args[1:], **kwargs)
        if func in _FROM_ROOTS:
            args, kwargs = private.pytree.tree_map_only(
                LazyTensor, lambda x: x if x._read is None else x._read, (args, kwargs)
            )
        if func in _AUTOGRAD:
            return untouched(func, *args, **kwargs)
        if func is torch.Tensor.__repr__ and args[0]._is_lost():
            return args[0]._describe()
        read = _plain if func is torch.Tensor.detach else connected
        args = private.pytree.tree_map_only(LazyTensor, read, args)
        kwargs = private.pytree.tree_map_only(LazyTensor, read, kwargs)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """What reaches the value from C++ without passing by __torch_function__."""
        args = private.pytree.tree_map_only(LazyTensor, _plain, args)
        kwargs = private.pytree.tree_map_only(LazyTensor, _plain, kwargs or {})
        return func(*args, **kwargs)


# They start from tensors, or ask for gradients of tensors, whose values they do not need.
_FROM_ROOTS = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
_AUTOGRAD = {
    *_FROM_ROOTS,
    *(torch.Tensor.register_hook, torch.Tensor.retain_grad, torch.Tensor.grad.__get__),
    *(torch.Tensor.retains_grad.__get__,),
}


def _converted_type(func: Any, args: tuple, kwargs: dict) -> torch.dtype | None:
    """The floating type that a conversion of args[0] asks for; None: this is no mere conversion."""
    tensor = args[0] if args else None
    if not isinstance(tensor, LazyTensor):
        return None
    if func is torch.Tensor.to and kwargs.keys() <= {"dtype", "device"}:
        return _type_in(tensor, (*args[1:], *kwargs.values()))
    if kwargs or len(args) > 1:
        return None
    if func is torch.Tensor.contiguous or func is torch.Tensor.cpu and tensor.device == _CPU:
        return tensor.dtype
    return _CONVERSIONS.get(func)


def _type_in(tensor: torch.Tensor, given: tuple) -> torch.dtype | None:
    """The type among the arguments of `to`, if they are nothing but types and its device."""
    wanted = tensor.dtype
    for value in given:
        if isinstance(value, torch.dtype):
            wanted = value
        elif not isinstance(value, (str, torch.device)) or torch.device(value) != tensor.device:
            return None
    return wanted if wanted is tensor.dtype or wanted.is_floating_point else None


def _await_step(tensor: LazyTensor) -> None:
    """Its value is to be there after the first step of an optimizer that finds it alive."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
    if len(_waiting) > _WAITING:
        _waiting[:] = [ref for ref in _waiting if ref() is not None]
    _waiting.append(weakref.ref(tensor))


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    held = [tensor for tensor in (ref() for ref in _waiting) if tensor is not None]
    _waiting.clear()
    of_graph: dict[Graph, list[LazyTensor]] = {}
    for tensor in held:
        run = tensor._run
        if run is None or run.graph.steps == _STEPS:
            continue
        if run.is_changed_by(optimizer):
            of_graph.setdefault(run.graph, []).append(tensor)
        else:
            _waiting.append(weakref.ref(tensor))
    for graph, tensors in of_graph.items():
        kept = {tensor._output for ref in graph.ahead if (tensor := ref()) is not None}
        graph.asked_for |= kept
        ahead = [t for t in tensors if graph.steps == 0 or t._output in kept]
        for tensor in ahead:
            tensor.gradd_compute_ahead()
        graph.steps += 1
        graph.ahead = [weakref.ref(t) for t in ahead] if graph.steps < _STEPS else []


def _plain(tensor: LazyTensor) -> torch.Tensor:
    return tensor.gradd_value()


def connected(tensor: LazyTensor) -> torch.Tensor:
    """The value with its history: always the same tensor, so that it may be changed in place."""
    if tensor._read is None and torch.is_grad_enabled() and tensor.requires_grad:
        tensor._read = _Read.apply(tensor)
    return tensor.gradd_value() if tensor._read is None else tensor._read


class _Read(torch.autograd.Function):
    """Identity from a lazy output to its value: hands the gradient on to the run."""

    @staticmethod
    def forward(ctx: Any, tensor: LazyTensor) -> torch.Tensor:
        return tensor.gradd_value().detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _Cast(torch.autograd.Function):
    """A conversion that computes nothing: the result is a lazy output as well."""

    @staticmethod
    def forward(ctx: Any, tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
        ctx.dtype = tensor.dtype
        return LazyTensor.cast(tensor, dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.to(ctx.dtype), None

"""torch's undocumented names: the purpose of each, and the consequence if it is missing.

Nothing else in the adapters uses such a name; a test walks the sources. Each is looked up at its
first use. If a name that has a substitute is missing, gradd continues as the table says; if another
is missing, features that need it fail by name. Documented names are used where they are needed
(DOCUMENTED), including operators (`torch.ops.aten._to_copy`).
"""

from __future__ import annotations

import functools
import importlib
import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

_numbers = itertools.count()


class Name(NamedTuple):
    """One of them.

    Attributes:
        path: From the module on.
        use: Its purpose.
        without: The consequence in a torch that does not have it.
        substitute: Makes what is taken in its place; None = there is nothing, an ImportError says
            so.
    """

    path: str
    use: str
    without: str = "what needs it raises an ImportError that names it"
    substitute: Callable[[], Any] | None = None


NAMES: dict[str, Name] = {
    # --- what Dynamo gives, and what a graph of it is made of
    "set_grad_enabled": Name(
        "torch._C._set_grad_enabled", "Dynamo writes a change of grad mode as a call of it"
    ),
    "counters": Name(
        "torch._dynamo.utils.counters",
        "what Dynamo could not trace, and why",
        "messages name no cause, and such functions are not counted",
        lambda: defaultdict(Counter),
    ),
    "tracer": Name(
        "torch._dynamo.symbolic_convert.InstructionTranslator",
        "what a function does beside its graph; how it traces `in`",
        "self-checks do not run the user's own forward; `in` is not compared with changed numbers",
        lambda: None,
    ),
    "compile_lock": Name(
        "torch._dynamo.convert_frame.compile_lock",
        "is held while Dynamo compiles",
        "a self-check in one thread and a compilation in another may wait for each other",
        threading.RLock,
    ),
    "dict_version": Name(
        "torch._C._dynamo.guards.dict_version",
        "changes with every write to a dictionary",
        "each call compares what stands in the dictionaries",
        lambda: lambda table: next(_numbers),
    ),
    "settings": Name(
        "torch._dynamo.config._config",
        "holds the variables of Dynamo's settings",
        "a call takes 40 us longer",
        dict,
    ),
    "get_data": Name(
        "torch._C._autograd._get_data_attr",
        "Dynamo writes `x.data` as a call of it",
    ),
    "tracing": Name(
        "torch._guards.tracing",
        "torch.export decomposes graphs in the fake mode of their tensors, not in Dynamo's",
    ),
    "enable_python_dispatcher": Name(
        "torch._dispatch.python.enable_python_dispatcher",
        "records operators before autograd and autocast, and leaves sizes open",
    ),
    "decompositions": Name(
        "torch._decomp.decomposition_table",
        "some of torch's rules take arguments wrongly: they are put aside",
    ),
    "schema": Name("torch.ops.aten.add.Tensor._schema", "what an operator takes, writes and gives"),
    "pytree": Name("torch.utils._pytree", "what stands in nested results, those of libraries too"),
    # --- torch's exporter to ONNX
    "ONNXRegistry": Name(
        "torch.onnx._internal.exporter._registration.ONNXRegistry", "the table of translations"
    ),
    "to_onnx_program": Name(
        "torch.onnx._internal.exporter._core._exported_program_to_onnx_program", "translates"
    ),
    "promote": Name(
        "torch.onnx._internal.exporter._fx_passes.insert_type_promotion_nodes",
        "makes the conversions explicit that operators do",
    ),
    "handle_node": Name(
        "torch.onnx._internal.exporter._core._handle_call_function_node_with_lowering",
        "is wrapped: constants beside doubles are doubles",
    ),
    "input_type": Name(
        "torch.onnx._internal.exporter._building._determine_input_dtype",
        "is wrapped for the same",
    ),
    # --- what goes on around a call
    "transforms": Name(
        "torch._C._functorch.get_interpreter_stack", "transforms of torch.func that are active"
    ),
    "dispatch_mode": Name(
        "torch.utils._python_dispatch._get_current_dispatch_mode",
        "the mode that records a call's operators",
    ),
    "dual_level": Name(
        "torch.autograd.forward_ad._current_level", "whether forward-mode derivatives are active"
    ),
    "keeps_graph": Name(
        "torch._C._autograd._get_current_graph_task_keep_graph",
        "whether a backward keeps its graph (retain_graph)",
        "a backward raises an UnsupportedError",
        lambda: None,
    ),
    # --- tensors and their memory
    "storage_users": Name(
        "torch._C._storage_Use_Count",
        "whether memory that is to move, or may be written, has another owner",
    ),
    "tensor_users": Name(
        "torch.Tensor._use_count",
        "references to a tensor that Python does not see",
        "a buffer that was exported by DLPack may move",
        lambda: lambda tensor: 1,
    ),
    "hooks": Name("torch.Tensor._backward_hooks", "hooks that wait for the gradient of an output"),
    "make_wrapper": Name(
        "torch.Tensor._make_wrapper_subclass", "a tensor without memory: an output that is lazy"
    ),
}

# What FullyShardedDataParallel leaves on modules, and on parts of its flat parameter. If these go,
# a model in it is no longer refused, and its flat parameter gets no gradients.
FSDP_MODULE = "_is_fsdp_managed_module"
FSDP_TENSOR = "_fsdp_flattened"

# Names with an underscore that torch's documentation shows, by the page or the text.
DOCUMENTED: dict[str, str] = {
    "torch._dynamo.config": "torch.compile Troubleshooting",
    "torch._dynamo.maybe_mark_dynamic": "Dynamic Shapes",
    "torch._guards.detect_fake_mode": "Fake tensor",
    "torch._higher_order_ops.associative_scan": "Control Flow: Associative Scan",
    "torch._subclasses.fake_tensor.FakeTensor": "Fake tensor",
    "torch.utils._python_dispatch.TorchDispatchMode": "Extending PyTorch: modes",
    "torch.Tensor._version": "torch.inference_mode",
}


# Level of forward-mode derivatives, from 0 on; below there are none. Every call asks: a function of
# C, without a frame of its own.
dual_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level")


def replace(name: str, value: Any) -> None:
    """Replaces the object in torch that a name refers to."""
    module, _, attribute = NAMES[name].path.rpartition(".")
    setattr(named(module), attribute, value)


def schema(operator: Any) -> Any:
    """An operator's arguments, writes and results; None for anything else."""
    return getattr(operator, "_schema", None)


def hooks(tensor: torch.Tensor) -> Any:
    """Those that wait for a tensor's gradient; None or empty if there are none."""
    return tensor._backward_hooks


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = _found(NAMES[name])
    return found


def _found(name: Name) -> Any:
    try:
        return named(name.path)
    except (AttributeError, ImportError) as error:
        if name.substitute is not None:
            return name.substitute()
        raise ImportError(
            f"torch {torch.__version__} has no {name.path}, which gradd needs ({name.use}); use a "
            "version of torch that gradd was tested with"
        ) from error


def named(path: str) -> Any:
    """The object that a dotted path names, through modules and their attributes."""
    first, *rest = path.split(".")
    found = importlib.import_module(first)
    for i, name in enumerate(rest):
        if not hasattr(found, name) and isinstance(found, type(torch)):
            importlib.import_module(".".join((first, *rest[: i + 1])))
        found = getattr(found, name)
    return found

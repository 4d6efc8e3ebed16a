"""Why a call, or a part of it, runs in PyTorch: the one list of reasons.

`gradd_stats()` counts by these names, warnings name them, and docs/messages.md is made of the list.
A status code that may cause a fallback is a row under its name in lower case. An error that is no
row counts under the name of its type. This module imports neither torch nor others of the package.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FallbackPolicy(enum.IntFlag):
    """Kinds of failure that cause a fallback to PyTorch."""

    FALLBACK_DISABLE = 1
    FALLBACK_FORCE_TORCH_FORWARD = 2
    FALLBACK_FORCE_TORCH_BACKWARD = 4
    FALLBACK_UNSUPPORTED_DEVICE = 8
    FALLBACK_UNSUPPORTED_DATA = 16
    FALLBACK_UNSUPPORTED_TORCH_MODEL = 32
    FALLBACK_UNSUPPORTED_ONNX_MODEL = 64
    FALLBACK_BAD_INITIALIZATION = 128


DEFAULT_POLICY = (
    FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE
    | FallbackPolicy.FALLBACK_UNSUPPORTED_DATA
    | FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL
    | FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL
)
_DEVICE = FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE
_DATA = FallbackPolicy.FALLBACK_UNSUPPORTED_DATA
_TORCH = FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL
_ONNX = FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL
_START = FallbackPolicy.FALLBACK_BAD_INITIALIZATION


@dataclass(frozen=True)
class Reason:
    """One reason.

    Attributes:
        name: In statistics and warnings; stable.
        flag: The policy that allows it; None = it is no error, whatever the policy is.
        meaning: One sentence.
        remedy: What a user does about it.
    """

    name: str
    flag: FallbackPolicy | None
    meaning: str
    remedy: str


REASONS = (
    Reason(
        "autocast",
        _TORCH,
        "Autocast is active for a type other than bf16 or f16, or hides its casts inside an "
        "operator.",
        "Use `torch.bfloat16` or `torch.float16`; put the operator that the message names inside "
        "`torch.autocast(device_type, enabled=False)`.",
    ),
    Reason(
        "autograd_function",
        _TORCH,
        "`forward()` calls a `torch.autograd.Function`, whose backward is Python code.",
        "Write it with torch's differentiable functions, or accept that this part runs in PyTorch.",
    ),
    Reason(
        "being_traced",
        _TORCH,
        "`torch.jit.trace`, `torch.export`, `make_fx` or a dispatch mode records the operators of "
        "the call.",
        "Nothing: a tracer needs PyTorch's operators. Other calls are not affected.",
    ),
    Reason(
        "create_graph",
        _TORCH,
        "A backward with `create_graph=True`, whose gradients have derivatives of their own: "
        "PyTorch computes the graph again.",
        "Nothing. It takes PyTorch's time and memory; a graph that draws random numbers raises "
        "`UnsupportedError` instead.",
    ),
    Reason(
        "data_dependent_control_flow",
        _TORCH,
        "`forward()` reads the value of a tensor as a Python number, or as a size.",
        "Keep the value in a tensor: `torch.where` in place of `if`, no `.item()`.",
    ),
    Reason(
        "decoding",
        None,
        "A call without gradients passes `past_key_values`, or `generate()` was used: such calls "
        "run in PyTorch.",
        "Nothing: a step of one token is too short to gain from the daemon.",
    ),
    Reason(
        "device",
        _DEVICE,
        "A parameter, an input or a part of `forward()` is on another device than the daemon's.",
        "Move the model and the inputs to that device. A daemon computes on the CPU, or on the GPU "
        "that `GRADD_DEVICE=cuda` gives it.",
    ),
    Reason(
        "export_failed",
        _TORCH,
        "A graph, or a part of one, cannot be translated for an error that nothing expects; the "
        "message has torch's words.",
        "Simplify the line that the message names, and report it.",
    ),
    Reason(
        "flush_denormal",
        _TORCH,
        "The calling thread flushes numbers below 1.2e-38 to zero, and the daemon does not.",
        "Call `torch.set_flush_denormal(False)` first.",
    ),
    Reason(
        "forward_ad",
        _TORCH,
        "The call is inside `forward_ad.dual_level()`.",
        "Use backward-mode derivatives.",
    ),
    Reason(
        "func_transform",
        _TORCH,
        "The call, or a part of `forward()`, is under `torch.func` (`vmap`, `grad`, `jvp`).",
        "Write the batch dimension out, or accept PyTorch for this part.",
    ),
    Reason(
        "graph",
        _ONNX,
        "The daemon refuses the captured graph for these sizes.",
        "The message names the node. If the sizes are ordinary, report it.",
    ),
    Reason(
        "graph_break",
        _TORCH,
        "PyTorch runs operators between the graphs of a call: behind a graph break, in a function "
        "with `torch.compiler.disable`, in a layer with a backward hook.",
        "The message names the line, and why torch.compile has no graph of it: move the cause out "
        "of `forward()`, or accept that this part runs in PyTorch.",
    ),
    Reason(
        "input_mutation",
        _DATA,
        "`forward()` writes in place to an argument that has a gradient, or that shares its memory "
        "with another one.",
        "`clone()` the argument before the write.",
    ),
    Reason(
        "memory_layout",
        _TORCH,
        "`torch.as_strided` reads memory outside of the tensor's own elements.",
        "Read the tensor that owns the memory, by indexing or `reshape`.",
    ),
    Reason(
        "model",
        _ONNX,
        "The daemon cannot read the captured graph.",
        "Report it: a capture should always be readable.",
    ),
    Reason(
        "no_graph",
        _TORCH,
        "torch.compile gives no graph for the call, which runs in PyTorch as a whole; the message "
        "has torch's words.",
        "`TORCH_LOGS=graph_breaks` shows the line. Remove a `torch.compiler.disable`, or simplify "
        "the line.",
    ),
    Reason(
        "python_random",
        _TORCH,
        "`forward()` draws from Python's `random`, or sets the seed of torch.",
        "Draw with torch; set seeds outside of `forward()`.",
    ),
    Reason(
        "self_check",
        _ONNX,
        "A result or gradient of the daemon differs from PyTorch's; calls of this form go on in "
        "PyTorch.",
        "Report it with the message. If `forward()` gives another result each time, that is the "
        "cause.",
    ),
    Reason(
        "sequence_or_loop",
        _TORCH,
        "The translation of an operator (`embedding_bag`, for instance) needs a loop or a list of "
        "tensors.",
        "Use operators on whole tensors (`embedding` and a sum).",
    ),
    Reason(
        "session",
        _START,
        "No daemon can be reached when the module is wrapped.",
        "See [`GRADD_E_SESSION`](#gradd_e_session).",
    ),
    Reason(
        "sharded_parameters",
        _TORCH,
        "`FullyShardedDataParallel` or ZeRO of stage 3 keeps the parameters in a flat one of its "
        "own.",
        "Use `fully_shard()`, ZeRO of stage 1 or 2, or DistributedDataParallel: "
        "[launchers.md](launchers.md).",
    ),
    Reason(
        "tensor_subclass",
        _TORCH,
        "A parameter or input is a subclass of Tensor with functions of its own.",
        "Pass a plain tensor: `x.as_subclass(torch.Tensor)`.",
    ),
    Reason(
        "unsupported",
        _ONNX,
        "The daemon has no kernel for an operator or type of the graph, as for determinants.",
        "See [operators.md](operators.md) for those that it has.",
    ),
    Reason(
        "unsupported_input_type",
        _DATA,
        "`forward()` reads an input or buffer of a dtype that the daemon does not have, or takes "
        "an int of more than 64 bits.",
        "Convert it before the call.",
    ),
    Reason(
        "unsupported_operator",
        _TORCH,
        "An operator has no translation to ONNX, or not in this form.",
        "The message names the line of `forward()`, and often another form that works.",
    ),
    Reason(
        "unsupported_parameter",
        _TORCH,
        "A parameter has no size before the first call (`LazyLinear`) or a dtype that the daemon "
        "does not have, or a buffer has a name that torch.fx uses.",
        "Call the module once before wrapping it, convert the parameter, or rename the buffer.",
    ),
    Reason(
        "untraced_function",
        None,
        "torch.compile fails at a function that `forward()` calls. PyTorch runs that function; no "
        "operators were seen in it (with operators, it is a `graph_break`).",
        "`TORCH_LOGS=graph_breaks` shows where. Move locks, prints and files out of `forward()`.",
    ),
    Reason(
        "version",
        _START,
        "The daemon speaks another protocol when the module is wrapped.",
        "See [`GRADD_E_VERSION`](#gradd_e_version).",
    ),
)
BY_NAME = {reason.name: reason for reason in REASONS}

"""Exceptions of gradd: one class per status code of the daemon.

The codes are the list in shm/status.h; a test compares the two. The bare code travels on the wire,
`from_code()` turns it and its sentence into the exception. Classes also derive from the built-in
exception that a caller would expect (ValueError for a tensor that does not fit, and so on). This
module imports neither torch nor the client. The docstrings of these classes, each with cause and
remedy, are docs/messages.md.
"""

from __future__ import annotations


class GraddError(RuntimeError):
    """Base of everything that gradd raises on purpose.

    Attributes:
        code: Bare name of the status code ("TENSOR"), the same in C, Python and the documentation.
        what: The sentence without the code.
        session: "alive" or "lost": whether the daemon still knows this client.
    """

    code = "INTERNAL"

    def __init__(self, what: str, session: str = "alive") -> None:
        super().__init__(f"GRADD_E_{self.code}: {what}")
        self.what = what
        self.session = session

    def __reduce__(self) -> tuple:
        return (type(self), (self.what, self.session))


class SessionError(GraddError):
    """No session: no daemon, a foreign or lost session, or a process that forked.

    Cause: No daemon could be started, or it died several times for the same request. An unfit
        directory is `GRADD_E_IO`.
    Remedy: Read `daemon.log` in the daemon's directory; set `GRADD_BIN` to the binary. After a
        fork, make the model in the new process, or start it with `spawn`.
    """

    code = "SESSION"


class ModelError(GraddError, ValueError):
    """The bytes are not a usable ONNX model.

    Cause: A file that was given to `gradd explain` is cut off, or is no ONNX model.
    Remedy: Check it with `onnx.checker`. If ORTModule raises it, report it.
    """

    code = "MODEL"


class GraphError(GraddError, ValueError):
    """The graph is not valid; the message names the node.

    Cause: Operands of a node do not fit, or an attribute is missing.
    Remedy: Correct the node in the model. If ORTModule raises it, report it.
    """

    code = "GRAPH"


class IndexOutOfRangeError(GraddError, IndexError):
    """An index (token id, label) is out of range; the message names the node.

    Cause: The tokenizer has more tokens than the embedding, a label is not a class, or an integer
        is divided by zero.
    Remedy: Compare `ids.max()` and `labels.max()` with the model's sizes.
    """

    code = "INDEX"


class SharedMemoryError(GraddError):
    """A shared memory region is not usable.

    Cause: A client other than ours sent a descriptor that is no sealed memfd, or a device cannot
        map memory.
    Remedy: For a client of your own, see [protocol.md](protocol.md); else report it.
    """

    code = "SHM"


class TensorError(GraddError, ValueError):
    """A tensor's shape, dtype or place does not fit; the message names expected and actual.

    Cause: `FusedAdam` got sparse, float64 or GPU tensors, or a parameter was moved or retyped after
        wrapping.
    Remedy: Convert the tensor that the message names, or use an optimizer of torch.
    """

    code = "TENSOR"


class StaleError(GraddError):
    """An object is gone or has changed since it was named.

    Cause: Parameters changed between a forward and its backward, an output was read after
        `optimizer.step()`, or a run was released.
    Remedy: Run backward before the step, read outputs before the step (or `GRADD_LAZY=0`), pass
        `retain_graph=True`, or repeat the forward.
    """

    code = "STALE"


class VersionError(GraddError):
    """Client and daemon speak different protocol versions.

    Cause: A daemon of another version still runs.
    Remedy: `gradd stop`, and install the same version on both sides; the message has the commands.
    """

    code = "VERSION"


class LimitError(GraddError, ValueError):
    """A limit is exceeded; the message names the limit.

    Cause: A graph takes too long to compile, a message is too large, or `ulimit` allows too few
        files.
    Remedy: Raise the limit: [options.md](options.md) or `ulimit`.
    """

    code = "LIMIT"


class OutOfMemoryError(GraddError, MemoryError):
    """Out of memory.

    Cause: A batch needs more than the daemon's limit or the memory budget.
    Remedy: Use smaller batches (accelerate's `find_executable_batch_size` tries them), a
        `memory_budget` that can be met, or a higher `--memory-mib`; `gradd ps` shows what sessions
        hold.

    The text matches what find_executable_batch_size looks for.
    """

    code = "NOMEM"

    def __init__(self, what: str, session: str = "alive") -> None:
        super().__init__(what, session)
        if " out of memory." not in self.args[0]:
            short = "the call" if "memory budget" in what else "the daemon"
            self.args = (f"{self.args[0]}; {short} is out of memory.",)


class NoSpaceError(GraddError):
    """There is no space to back shared memory.

    Cause: The parameters, gradients and outputs need more than the machine or its cgroup has free.
    Remedy: Use smaller batches, or end other processes; `gradd ps` shows what sessions hold.

    The text is for accelerate as well.
    """

    code = "NOSPC"

    def __init__(self, what: str, session: str = "alive") -> None:
        super().__init__(what, session)
        self.args = (f"{self.args[0]}; the machine is out of memory.",)


class NonFiniteError(GraddError, ArithmeticError):
    """A value is NaN or infinite; the message names the first node.

    Cause: `DebugOptions(finite_check=True)` or `torch.autograd.detect_anomaly()` asks for [a
        check](watching.md#the-first-nan), and the node's result has such a value.
    Remedy: Look at the inputs of the node: a logarithm or division by zero, an overflow. If the
        message says that an input has a NaN already, an earlier step has written it.
    """

    code = "NONFINITE"


class DeviceLostError(GraddError):
    """The device that runs the models does not work any more; its daemon ends.

    Cause: A GPU failed, or its driver or plug-in is missing. A trainer sees that its daemon is
        gone; `daemon.log` has the reason (`device_lost`).
    Remedy: See `gradd doctor`. `GRADD_DEVICE=cpu` avoids the device.
    """

    code = "DEVICE"


class PeerError(GraddError):
    """Another process that trains the same model does not take part.

    Cause: With `ORTModule(model, process_group=)`, a process has ended or failed, has not come as
        far within the time limit, or runs another backward.
    Remedy: The message says which of these. End all processes and start them again; a longer
        `GRADD_REDUCE_SECONDS` lets them wait for a slow one.
    """

    code = "PEER"


class IoError(GraddError):
    """An input or output operation failed.

    Cause: The daemon's directory is not private, not writable, or its path is too long; or a file
        cannot be read.
    Remedy: Do what the message says (`chmod 700`), or set `GRADD_DIR` to another directory.
    """

    code = "IO"


class ExternalDataError(GraddError):
    """External data in a model is not accepted.

    Cause: An ONNX file keeps its weights in other files.
    Remedy: Save the model with its weights inside, or make them graph inputs.
    """

    code = "EXTDATA"


class UnsupportedError(GraddError, NotImplementedError):
    """Something that gradd does not do; the message names it.

    Cause: A graph has an operator without a kernel, `create_graph=True` asks for second derivatives
        of a graph with random numbers, or the device was lost twice over a plan.
    Remedy: Compute that part in PyTorch; [operators.md](operators.md) lists the operators.
    """

    code = "UNSUPPORTED"


class InternalError(GraddError):
    """A defect in gradd.

    Cause: A self-check, with `strict=True`, found another gradient than PyTorch's; or a check
        inside the daemon failed.
    Remedy: Report it with the message and `daemon.log`.
    """

    code = "INTERNAL"


BY_CODE: dict[str, type[GraddError]] = {cls.code: cls for cls in GraddError.__subclasses__()}


def from_code(code: str, what: str, session: str = "alive") -> GraddError:
    """The exception for a code on the wire.

    Args:
        code: Bare name of the code; an unknown one (newer daemon) gives a GraddError that names it.
        what: The daemon's sentence.
        session: "alive" or "lost".
    """
    cls = BY_CODE.get(code)
    if cls is None:
        return GraddError(f"{code}: {what}", session)
    return cls(what, session)

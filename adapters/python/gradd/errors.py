"""Exceptions of gradd: one class per status code of the daemon.

The codes are the list in shm/status.h; a test compares the two. The bare code travels on the wire,
`from_code()` turns it and its sentence into the exception. Classes also derive from the built-in
exception that a caller would expect (ValueError for a tensor that does not fit, and so on). This
module imports neither torch nor the client.
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
    """No session: no daemon, a foreign or lost session, or a process that forked."""

    code = "SESSION"


class ModelError(GraddError, ValueError):
    """The bytes are not a usable ONNX model."""

    code = "MODEL"


class GraphError(GraddError, ValueError):
    """The graph is not valid; the message names the node."""

    code = "GRAPH"


class IndexOutOfRangeError(GraddError, IndexError):
    """An index (token id, label) is out of range; the message names the node."""

    code = "INDEX"


class SharedMemoryError(GraddError):
    """A shared memory region is not usable."""

    code = "SHM"


class TensorError(GraddError, ValueError):
    """A tensor's shape, dtype or place does not fit; the message names expected and actual."""

    code = "TENSOR"


class StaleError(GraddError):
    """An object is gone or has changed since it was named."""

    code = "STALE"


class VersionError(GraddError):
    """Client and daemon speak different protocol versions."""

    code = "VERSION"


class LimitError(GraddError, ValueError):
    """A limit is exceeded; the message names the limit."""

    code = "LIMIT"


class OutOfMemoryError(GraddError, MemoryError):
    """Out of memory. The text matches what accelerate's find_executable_batch_size looks for."""

    code = "NOMEM"

    def __init__(self, what: str, session: str = "alive") -> None:
        super().__init__(what, session)
        if " out of memory." not in self.args[0]:
            short = "with this budget the call" if "memory budget" in what else "the daemon"
            self.args = (f"{self.args[0]}; {short} is out of memory.",)


class NoSpaceError(GraddError):
    """There is no space to back shared memory. Its text is for accelerate as well."""

    code = "NOSPC"

    def __init__(self, what: str, session: str = "alive") -> None:
        super().__init__(what, session)
        self.args = (f"{self.args[0]}; the machine is out of memory.",)


class NonFiniteError(GraddError, ArithmeticError):
    """A value is NaN or infinite; the message names the first node."""

    code = "NONFINITE"


class DeviceLostError(GraddError):
    """The device that runs the models does not work any more; its daemon ends."""

    code = "DEVICE"


class IoError(GraddError):
    """An input or output operation failed."""

    code = "IO"


class ExternalDataError(GraddError):
    """External data in a model is not accepted."""

    code = "EXTDATA"


class UnsupportedError(GraddError, NotImplementedError):
    """Something that gradd does not do; the message names it."""

    code = "UNSUPPORTED"


class InternalError(GraddError):
    """A defect in gradd: please report it with the message."""

    code = "INTERNAL"


BY_CODE: dict[str, type[GraddError]] = {
    cls.code: cls
    for cls in (
        SessionError,
        ModelError,
        GraphError,
        IndexOutOfRangeError,
        SharedMemoryError,
        TensorError,
        StaleError,
        VersionError,
        LimitError,
        OutOfMemoryError,
        NoSpaceError,
        NonFiniteError,
        DeviceLostError,
        IoError,
        ExternalDataError,
        UnsupportedError,
        InternalError,
    )
}


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

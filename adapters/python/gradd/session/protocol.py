"""Encoding of docs/protocol.md: envelopes, type descriptors, limits.

Pure functions without sockets. The client adds sequence number, token and releases to the fields of
a request; the fields built here stay the same when a request is sent again after a restart.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgpack

from gradd import errors

logger = logging.getLogger("gradd")

PROTOCOL = (2, 2)  # lowest and highest version spoken here
FRAME_BYTES = 16 << 20  # a larger payload goes through a segment
SOURCE_BYTES = 4 << 20  # of a table of sources, which takes no other way
SOURCE_ROWS = ((1 << 18) - 5) // 2  # a message holds 2^18 values: five, and two per row
PLANS_KEPT = 200  # the daemon keeps some more; those used least recently go
RELEASES_PER_REQUEST = 1024
DROPOUT_OFF = 1
FINITE_CHECK = 2
GRADIENT_CHECK = 8
ONCE = 4  # the arena is not kept for the next run

Type = tuple[int, tuple[int, ...]]  # element type code, dims
Tensor = tuple[int, int, int, tuple[int, ...]]  # segment, offset, element type code, dims
Sizes = tuple[int | str | None, ...]  # a size, the name of a dynamic one, or nothing known


@dataclass(frozen=True)
class GraphInfo:
    """Reply of graph.put.

    Attributes:
        id: sha256 of the bytes and alias groups.
        inputs: (name, element type code, dims with -1 = dynamic) in graph order.
        outputs: Names in graph order.
        unsupported: (node, operator, domain) that the daemon has no kernel for.
        random: It draws random numbers.
        half: Code of the coarsest 16-bit float that it computes with somewhere, whose rounding its
            results carry; 0 = none.
        reach: Per output, the names of the inputs that its gradient can reach.
        types: Per input and output, element type code and sizes (None if not declared).
        put: Fields and frames of the request, for a restarted daemon.
    """

    id: bytes
    inputs: tuple[tuple[str, int, tuple[int, ...]], ...]
    outputs: tuple[str, ...]
    unsupported: tuple[tuple[str, str, str], ...]
    random: bool
    half: int
    reach: dict[str, frozenset[str]] = field(repr=False)
    types: dict[str, tuple[int, Sizes | None]] = field(repr=False)
    put: tuple[dict[str, Any], Sequence[bytes]] = field(compare=False, repr=False)


@dataclass(frozen=True)
class Live:
    """The rows that a plan over all rows could leave out: see calls/liverows.py."""

    labels: int  # position of the labels among the graph's inputs
    mask: int  # the same of the mask that tells real rows; -1 = there is none
    ignore: int  # label of the rows that count nothing
    shift: bool  # row (b, s) answers for the label at (b, s + 1)
    batch: int  # sequences
    positions: int  # of each
    label_share: float  # part of the forward's operations that is made in labelled rows alone
    real_share: float  # the same of real rows
    source: int  # position of the mask that tells an encoder's real rows; -1 = there is none
    source_positions: int  # of each sequence of the encoder
    source_share: float  # part of the forward's operations that is made in such rows alone
    flops: float  # operations of the forward


@dataclass(frozen=True)
class PlanInfo:
    """Reply of graph.plan.

    Attributes:
        id: Chosen by the client.
        outputs: Types of the wanted outputs.
        peak: Planned bytes of one run.
        saved: Of the peak, bytes alive between forward and backward.
        early: Per wanted gradient: does the forward form it.
        recomputed: Bytes that are not kept for the backward, but computed again.
        live: The rows that it could leave out.
        final: Per wanted gradient, after so many launches of the expected backward it is final.
    """

    id: int
    outputs: tuple[Type, ...]
    peak: int
    saved: int = 0
    early: tuple[bool, ...] = ()
    recomputed: int = 0
    live: Live | None = None
    final: tuple[int, ...] = ()


def tensor(one: Tensor) -> dict[str, Any]:
    """The value of a field that is one tensor."""
    segment, offset, dtype, dims = one
    return {"segment": segment, "offset": offset, "dtype": dtype, "dims": dims}


def tensors(many: Sequence[Tensor], at: Sequence[int] | None = None) -> dict[str, Any]:
    """The value of a field that is a list of tensors: a list per property, not a map per tensor.

    Args:
        many: The tensors.
        at: Position of each in a list of which some are left out, rising.
    """
    columns = zip(*many, strict=True) if many else ((), (), (), ())
    found = dict(zip(("segments", "offsets", "dtypes", "dims"), columns, strict=True))
    return found if at is None else {**found, "at": at}


def types(many: Sequence[Type]) -> dict[str, Any]:
    """The value of a field that is a list of types."""
    return {"dtypes": [code for code, _ in many], "dims": [dims for _, dims in many]}


def packer() -> Callable[[dict[str, Any]], bytes]:
    """Packs one envelope after the other; for one thread at a time."""
    return msgpack.Packer(use_bin_type=True).pack


def pack(fields: dict[str, Any]) -> bytes:
    return packer()(fields)


def pack_sources(rows: Sequence[Sequence[str]]) -> bytes:
    """The payload frame of a graph that says where its nodes come from: rows of (node, source)."""
    nodes, sources = zip(*rows, strict=True) if rows else ((), ())
    return msgpack.packb({"nodes": nodes, "sources": sources}, use_bin_type=True)


read = partial(msgpack.unpackb, raw=False, strict_map_key=False)


def unpack(frame: bytes) -> dict[str, Any]:
    """One reply envelope.

    Raises:
        InternalError: The bytes are not a msgpack map.
    """
    try:
        reply = read(frame)
    except (ValueError, msgpack.UnpackException) as error:
        raise errors.InternalError(f"the daemon's reply cannot be read: {error}") from None
    if not isinstance(reply, dict):
        raise errors.InternalError(f"the daemon's reply is a {type(reply).__name__}, not a map")
    return reply


def error_of(reply: dict[str, Any]) -> errors.GraddError | None:
    """The error that a reply tells of; None = it says ok."""
    if reply.get("ok"):
        return None
    return errors.from_code(
        str(reply.get("code", "INTERNAL")),
        str(reply.get("what", "no reason given")),
        str(reply.get("session", "alive")),
    )


def checked(reply: dict[str, Any]) -> dict[str, Any]:
    """The reply itself if it says ok, else its error as an exception."""
    error = error_of(reply)
    if error is not None:
        raise error
    return reply


@contextlib.contextmanager
def _reading(verb: str) -> Iterator[None]:
    """Turns a reply of another form into an error with a name.

    hello has settled the version, so only a daemon of another build can send one.
    """
    try:
        yield
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise errors.VersionError(
            f"the daemon's reply to {verb} has not the form of protocol {PROTOCOL[1]} "
            f"({type(error).__name__}: {error}): it is another build. `gradd stop` ends it, and "
            "the next call starts this one's"
        ) from None


@_reading("graph.put")
def graph_info(reply: dict[str, Any], put: tuple[dict[str, Any], Sequence[bytes]]) -> GraphInfo:
    """Decodes the reply of graph.put; `put` is the request."""
    inputs, outputs = reply["in"], reply["out"]
    names = [entry["name"] for entry in inputs]
    declared = {
        entry["name"]: (entry["dtype"], None if entry["sizes"] is None else tuple(entry["sizes"]))
        for entry in (*outputs, *inputs)
    }  # of an input that is an output as well: the input's
    return GraphInfo(
        id=reply["graph"],
        inputs=tuple((e["name"], e["dtype"], _dims(e["sizes"])) for e in inputs),
        outputs=tuple(e["name"] for e in outputs),
        unsupported=tuple((n["node"], n["op"], n["domain"]) for n in reply["unsupported"]),
        random=bool(reply["random"]),
        half=int(reply["half"]),
        reach={e["name"]: _named(names, e["reach"]) for e in outputs},
        types=declared,
        put=put,
    )


def _dims(sizes: Sequence[int | str | None] | None) -> tuple[int, ...]:
    """Declared sizes, -1 where dynamic."""
    return tuple(size if isinstance(size, int) else -1 for size in sizes or ())


def _named(names: Sequence[str], bits: bytes) -> frozenset[str]:
    """The names whose bits are set, the first in the lowest bit of the first byte."""
    number = int.from_bytes(bits, "little")
    return frozenset(n for i, n in enumerate(names) if number >> i & 1)


@_reading("graph.plan")
def plan_info(plan_id: int, reply: dict[str, Any]) -> PlanInfo:
    return PlanInfo(
        id=plan_id,
        outputs=tuple(
            (d, tuple(dims))
            for d, dims in zip(reply["out"]["dtypes"], reply["out"]["dims"], strict=True)
        ),
        peak=int(reply.get("peak", 0)),
        saved=int(reply.get("saved", 0)),
        early=tuple(bool(e) for e in reply.get("early", ())),
        recomputed=int(reply.get("recomputed", 0)),
        live=_live(reply.get("live")),
        final=tuple(reply.get("final", ())),
    )


def _live(entry: dict[str, Any] | None) -> Live | None:
    if entry is None:
        return None
    return Live(**{**entry, "shift": bool(entry["shift"])})


def plan_fields(
    graph: bytes,
    inputs: Sequence[Type],
    bound: Sequence[str],
    grads: Sequence[str],
    outputs: Sequence[str],
    grad_outputs: Sequence[int],
    *,
    parameters: Sequence[int] = (),
    plain: bool = False,
    dense: bool = False,
    live: tuple[int, int, int] = (0, 0, 0),
) -> dict[str, Any]:
    """Fields of graph.plan, without the plan's id.

    Args:
        graph: Id of the graph.
        inputs: Types of all its inputs.
        bound: Names of the inputs that a binding gives.
        grads: Names of those whose gradient is wanted.
        outputs: Names of the wanted outputs.
        grad_outputs: Positions among these whose gradient may arrive.
        parameters: Positions of the inputs that are parameters, trained or not.
        plain: Leave patterns unrecognised.
        dense: Make the logits of a loss as a whole.
        live: Sizes of the lists of labelled, real and source rows; 0 = all rows.
    """
    return {
        "graph": graph,
        "in": types(inputs),
        "bound": list(bound),
        "grad": list(grads),
        "out": list(outputs),
        "gmask": list(grad_outputs),
        "parameters": list(parameters),
        "plain": int(plain),
        "early": int(bool(grads)),
        "dense": int(dense),
        "label_rows": live[0],
        "real_rows": live[1],
        "source_rows": live[2],
    }


def source_frames(sources: Sequence[Sequence[str]]) -> list[bytes]:
    """The table of sources as a payload frame; none if it is beyond what the daemon accepts.

    It only makes messages better, so a large graph must not fail for it.
    """
    if len(sources) <= SOURCE_ROWS:
        frame = pack_sources(sources)
        if len(frame) <= SOURCE_BYTES:
            return [frame]
    logger.warning(
        "the table of source lines of a graph of %d nodes is larger than %d rows or %d MiB: errors "
        "and `gradd explain` name its nodes without a line of Python",
        len(sources),
        SOURCE_ROWS,
        SOURCE_BYTES >> 20,
    )
    return []

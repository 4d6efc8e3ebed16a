"""Bases: frozen weights that one process gives a name, and that others map.

    gradd.share(model, "base")             in one process
    gradd.load("base", model)              in others: the same class, also on the meta device

The weights are in memory once. Nothing is copied, and no process can change them for another.
Buffers come along as values: each process has its own.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
from typing import Any

import torch

from gradd import errors
from gradd.keeping import exchange
from gradd.kept_checks import check_name
from gradd.memory.shm import BASE_SEALS, DTYPE_CODES, PAGE, nbytes, round_up
from gradd.memory.waiting import seconds_of
from gradd.memory.watch import data_ptr
from gradd.session import client as clients
from gradd.session import kept as sessions
from gradd.session.kept import Manifest

logger = logging.getLogger("gradd")

_F_ADD_SEALS = 1033
_WRITE_BYTES = 1 << 30  # at once: Linux takes 2 GiB at most


def _is_plain(tensor: torch.Tensor) -> bool:
    on_cpu = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return on_cpu and tensor.dtype in DTYPE_CODES


def _frozen(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters that are not trained, under all their names."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    named = model.named_parameters(remove_duplicate=False)
    found = {name: p for name, p in named if not p.requires_grad and p.numel()}
    if not found:
        raise ValueError("share: no parameter is frozen: call model.requires_grad_(False) first")
    for name, p in found.items():
        if not _is_plain(p):
            raise errors.UnsupportedError(
                f"share: {name} is a {p.dtype} tensor on {p.device}; a base has plain tensors of "
                "the CPU only"
            )
    return found


def _buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers, under all their names, of the kinds that a base can have."""
    found = {n: b for n, b in model.named_buffers(remove_duplicate=False) if b.numel()}
    for name, b in list(found.items()):
        if not _is_plain(b):
            logger.warning(
                "share: the buffer %s, a %s tensor on %s, is not in the base: each process has its "
                "own values",
                *(name, b.dtype, b.device),
            )
            del found[name]
    return found


def _written(tensors: dict[str, torch.Tensor]) -> tuple[int, list[dict[str, Any]]]:
    """A descriptor of sealed memory with the tensors, and their places in it."""
    places: dict[int, list[Any]] = {}
    rows, end = [], 0
    for name, tensor in tensors.items():
        if id(tensor) not in places:
            code = DTYPE_CODES[tensor.dtype]
            places[id(tensor)] = [1, end, code, list(tensor.shape)]
            end += round_up(nbytes(tensor.dtype, tensor.shape))
        rows.append({"name": name, "at": places[id(tensor)]})
    fd = os.memfd_create("gradd-base", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, round_up(end, PAGE))
        os.posix_fallocate(fd, 0, round_up(end, PAGE))
        for tensor in {id(t): t for t in tensors.values()}.values():
            _write(fd, tensor, places[id(tensor)][1])
        fcntl.fcntl(fd, _F_ADD_SEALS, BASE_SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd, rows


def _write(fd: int, tensor: torch.Tensor, offset: int) -> None:
    whole = tensor.detach().contiguous()
    size = nbytes(whole.dtype, whole.shape)
    data = memoryview((ctypes.c_char * size).from_address(data_ptr(whole))).cast("B")
    done = 0
    while done < size:
        done += os.pwrite(fd, data[done : done + _WRITE_BYTES], offset + done)


def share(model: torch.nn.Module, name: str, *, keep_alive: str | float = "10m") -> None:
    """Gives the frozen parameters of a model a name, under which other processes map them.

    The values of its buffers come along; a process that loads the base has a copy of them.

    They move into memory that is sealed against writing; the model goes on with it. The daemon
    holds it as long as a process uses it, and `keep_alive` longer; `gradd ps` lists it, and
    `gradd.forget(name)` ends the name, though not the memory of those that have it. On the CPU.

    Args:
        model: Its parameters with requires_grad=False are shared, others stay as they are.
        name: Of up to 64 characters, without blanks.
        keep_alive: Seconds, or a text such as "90s", "10m", "2h"; -1: as long as the daemon lives.

    Raises:
        ValueError: No parameter is frozen, or `keep_alive` is no duration.
        SessionError: There is a base, or a kept session, of that name.
        UnsupportedError: A parameter is not on the CPU.
    """
    check_name(name)
    seconds = seconds_of(keep_alive)
    client = clients.get_client()
    frozen, saved = _frozen(model), model.state_dict(keep_vars=True)
    fd, rows = _written(frozen | _buffers(model))
    tensors = [row for row in rows if row["name"] in frozen]
    buffers = [{**row, "saved": row["name"] in saved} for row in rows if row["name"] not in frozen]
    fields = {"name": name, "seconds": seconds}
    try:
        manifest = Manifest({"tensors": tensors, "buffers": buffers}).file()
        try:
            client.connected(
                "share a base", lambda connection: connection.share(fields, (fd, manifest))
            )
        finally:
            os.close(manifest)
    finally:
        os.close(fd)
    load(name, model)


def load(name: str, model: torch.nn.Module | None = None) -> Any:
    """Maps the weights of a base that share() has named, in this process or another.

    A tensor that is written, or gets requires_grad=True, becomes this process's own, with one
    warning; others keep the base as it is.

    Args:
        name: Of the base.
        model: Gets them as its parameters, which are frozen then, and the values of the base's
            buffers; they may be on the meta device. Parameters and buffers that the base has not,
            such as adapters, stay as they are.

    Returns:
        The model; without one, a dict from name to tensor, as `load_state_dict(..., assign=True)`
        takes it.

    Raises:
        SessionError: There is no such base.
        TensorError: The model has no such parameter or buffer, or one of another type or shape.
    """
    check_name(name)
    client = clients.get_client()
    taken = sessions.take(client, name, "peek")
    try:
        made: dict[tuple[int, ...], torch.Tensor] = {}
        tensors = {}
        for row in taken.content["tensors"]:
            segment, offset, code, shape = row["at"]
            at = (segment, offset, code, *shape)
            if at not in made:
                made[at] = taken.tensor(row["at"])
            tensors[row["name"]] = made[at]
        rows = taken.content.get("buffers", ())
        buffers = {row["name"]: taken.tensor(row["at"]) for row in rows}
        if model is None:
            return tensors | {row["name"]: buffers[row["name"]].clone() for row in rows
                              if row["saved"]}  # fmt: skip
        _put(name, model, tensors, buffers)
        return model
    finally:
        with client.lock:
            taken.drop()


def _put(
    base: str,
    model: torch.nn.Module,
    tensors: dict[str, torch.Tensor],
    buffers: dict[str, torch.Tensor],
) -> None:
    """Checks all, and then exchanges; buffers are copied."""
    own = dict(model.named_parameters(remove_duplicate=False))
    own |= dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in (tensors | buffers).items():
        mine = own.get(name)
        got = "none" if mine is None else f"{mine.dtype}{list(mine.shape)}"
        if mine is None or (mine.dtype, mine.shape) != (tensor.dtype, tensor.shape):
            raise errors.TensorError(
                f"base '{base}': {name}: expected {tensor.dtype}{list(tensor.shape)}, got {got} in "
                "this model"
            )
    for name, tensor in tensors.items():
        mine = own[name]
        if mine.is_meta or type(mine) is not torch.nn.Parameter:
            exchange(model, name, torch.nn.Parameter(tensor, requires_grad=False))
        else:
            mine.requires_grad_(False)
            mine.data = tensor
    made: dict[int, torch.Tensor] = {}  # one for all names
    with torch.no_grad():
        for name, value in buffers.items():
            mine = own[name]
            if mine.is_meta:
                exchange(model, name, made.setdefault(data_ptr(value), value.clone()))
            else:
                mine.copy_(value)

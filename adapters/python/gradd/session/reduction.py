"""Gradients that the daemons of several GPUs average among themselves, by NCCL.

`ORTModule(model, process_group=group)` makes the daemons of the group's processes ranks of one
communicator. Each backward of the module names it, and the daemon gives back gradients that are
averaged over all ranks, group by group (calls/groups.py), as DistributedDataParallel would. Python
takes no part in that: torch.distributed carries the communicator's id, and the values of rank 0,
when the module is wrapped.
"""

from __future__ import annotations

import hashlib
import weakref
from typing import TYPE_CHECKING, Any

import torch

from gradd import errors, options
from gradd.memory import devices
from gradd.session.client import Client, get_client

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Reduction:
    """A rank of a communicator.

    Attributes:
        client: Whose daemon has joined.
        id: The number of the communicator in its session.
        ranks: How many there are.
    """

    def __init__(self, client: Client, number: int, ranks: int) -> None:
        self.client, self.id, self.ranks = client, number, ranks
        end = weakref.finalize(self, client.later, "reduce.leave", {"communicator": number})
        end.atexit = False  # the session ends then

    def check(self, client: Client) -> None:
        """Raises UnsupportedError if the module has moved to another device."""
        if client is not self.client:
            raise errors.UnsupportedError(
                f"process_group: the model was wrapped on {self.client.memory.device} and is on "
                f"{client.memory.device} now: wrap it there, in all processes"
            )

    # A copy of a module takes part as the module does; in another process nothing can.
    def __copy__(self) -> Reduction:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Reduction:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "an ORTModule with a process_group cannot be pickled: pickle its module (model.module)"
        )


def join(module: torch.nn.Module, group: ProcessGroup) -> Reduction:
    """Makes this process a rank, and gives the module the values of the group's first rank.

    All processes of the group call it, with modules of the same structure.

    Args:
        module: Its parameters and buffers are on one GPU.
        group: Of torch.distributed, for tensors on that GPU.

    Raises:
        UnsupportedError: A module on the CPU or on several devices, no NCCL, GRADD_DISABLE.
        ValueError: This process is not in the group, or torch.distributed is not initialized.
        PeerError: Another process has failed, has another module, or does not come.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise ValueError("process_group: torch.distributed.init_process_group() comes first")
    rank, ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    if rank < 0:
        raise ValueError("process_group: this process is not in it")
    found: list[Any] = [None] * ranks
    error: errors.GraddError | None = None
    client, number = None, b""
    try:
        client = _client_of(module)
        number = client.request("reduce.id", {})["id"] if rank == 0 else b""
    except errors.GraddError as own:
        error = own
    said = (str(error) if error else "", number, _structure(module))
    torch.distributed.all_gather_object(found, said, group=group)
    if error is not None:
        raise error
    check_all(found)
    made = client.next_id()  # type: ignore[union-attr]
    fields = {"communicator": made, "id": found[0][1], "rank": rank, "ranks": ranks}
    seconds = options.get("GRADD_REDUCE_SECONDS")
    client.request("reduce.join", {**fields, "limit_ms": int(seconds) * 1000})  # type: ignore
    reduction = Reduction(client, made, ranks)  # type: ignore[arg-type]
    _spread(module, group)
    return reduction


def check_all(found: list[tuple[str, bytes, str]]) -> None:
    """Raises PeerError if a rank has failed, or has another module than rank 0.

    Args:
        found: Per rank its error or "", the id, and the structure of its module.
    """
    for rank, (error, _, structure) in enumerate(found):
        if error:
            raise errors.PeerError(f"process_group: rank {rank} has failed: {error}")
        if structure != found[0][2]:
            raise errors.PeerError(
                f"process_group: the module of rank {rank} has other parameters or buffers than "
                "that of rank 0: names, sizes, types and requires_grad must be the same"
            )


def _tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _client_of(module: torch.nn.Module) -> Client:
    if options.get("GRADD_DISABLE"):
        raise errors.UnsupportedError(
            "process_group: GRADD_DISABLE=1 runs the module in PyTorch, where nothing averages its "
            "gradients: use DistributedDataParallel"
        )
    where = {t.device for _, t in _tensors(module)}
    if len(where) != 1:
        names = ", ".join(sorted(map(str, where))) or "none"
        raise errors.UnsupportedError(
            f"process_group: parameters and buffers must be on one GPU, they are on: {names}"
        )
    device = where.pop()
    if device.type == "cpu" or not devices.is_known(device):
        raise errors.UnsupportedError(
            f"process_group: no daemon averages gradients on {device}: use "
            "DistributedDataParallel(ORTModule(model)), over gloo"
        )
    client = get_client(device=device)
    client.connect()
    return client


def _structure(module: torch.nn.Module) -> str:
    hashed = hashlib.sha256()
    for name, t in _tensors(module):
        hashed.update(repr((name, t.dtype, tuple(t.shape), t.requires_grad)).encode())
    return hashed.hexdigest()


def _spread(module: torch.nn.Module, group: ProcessGroup) -> None:
    """Parameters and buffers become those of the first rank, as in DistributedDataParallel."""
    first = torch.distributed.get_global_rank(group, 0)
    with torch.no_grad():
        for _, tensor in _tensors(module):
            sent = tensor.detach().contiguous()
            torch.distributed.broadcast(sent, first, group=group)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)

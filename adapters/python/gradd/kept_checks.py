"""What a process must have in common with a session that it takes over: names, types, groups."""

from __future__ import annotations

import logging
from typing import Any

import torch

from gradd import errors
from gradd.memory.shm import DTYPES
from gradd.optim import FusedAdam

logger = logging.getLogger("gradd")


def check_name(name: str) -> None:
    """Refuses what the daemon does not take as a name, in terms of Python."""
    if not isinstance(name, str):
        raise TypeError(f"a name is a str, got {type(name).__name__}")
    fine = 0 < len(name) <= 64 and all(" " < c <= "~" and c != '"' for c in name)
    if not fine:
        raise ValueError(
            f"name {name!r}: expected 1 to 64 printable characters of ASCII, without blanks and "
            "quotes"
        )


def stepped(name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a manifest says of an optimizer: its class, and names of parameters by group."""
    names = {id(p): n for n, p in model.named_parameters()}
    groups = [[names.get(id(p), "") for p in g["params"]] for g in optimizer.param_groups]
    known = {n for group in groups for n in group}
    left = [n for n, p in model.named_parameters() if p.requires_grad and n not in known]
    if "" in known and left:
        logger.warning(
            "session '%s': the optimizer has parameters that the model has not, and not the "
            "model's %s: make it of those (load_state_dict(assign=True) gives a model others)",
            *(name, left[0]),
        )
    return {"kind": type(optimizer).__name__, "groups": groups}


def check_same(
    name: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    content: dict[str, Any],
) -> None:
    """Model and optimizer have what the manifest has; else nothing is changed."""
    own = {n: (t.dtype, list(t.shape)) for n, t in model.named_parameters() if t.numel()}
    own |= {n: (t.dtype, list(t.shape)) for n, t in model.named_buffers() if t.numel()}
    there = {row["name"]: (DTYPES[row["at"][2]], row["at"][3]) for row in content["tensors"]}
    there |= {row["name"]: (DTYPES[row["dtype"]], row["dims"]) for row in content["small"]}
    for one in sorted(own.keys() | there.keys()):
        if own.get(one) != there.get(one):
            expected, got = (_described(d.get(one)) for d in (there, own))
            raise errors.TensorError(
                f"session '{name}': {one}: expected {expected}, got {got} in this model"
            )
    states = (content.get("optimizer") or {}).get("states")
    if optimizer is None:
        return
    meta = [n for n, p in model.named_parameters() if p.is_meta]
    if meta or any(p.is_meta for group in optimizer.param_groups for p in group["params"]):
        raise errors.TensorError(
            f"session '{name}': {', '.join(meta[:1]) or 'a parameter of the optimizer'} is on the "
            "meta device, and reattach() puts another parameter in its place, which the optimizer "
            "does not have: call model.to_empty(device='cpu') before the optimizer is made"
        )
    if (states is not None) != isinstance(optimizer, FusedAdam):
        kind = "FusedAdam" if states is not None else "another optimizer than FusedAdam"
        raise errors.TensorError(
            f"session '{name}': expected {kind}, got {type(optimizer).__name__}"
        )
    if isinstance(optimizer, FusedAdam):
        names = {id(p): n for n, p in model.named_parameters()}
        order = [names.get(id(p), "") for p in optimizer.kept_parameters()]
        if order != [row["of"] for row in states]:
            raise errors.TensorError(
                f"session '{name}': the optimizer has other parameters, or another order"
            )
    mine, kept = stepped(name, model, optimizer), content.get("stepped")
    if kept is None:  # no optimizer was given, or by an older version
        return
    if mine["kind"] != kept["kind"]:
        raise errors.TensorError(f"session '{name}': expected {kept['kind']}, got {mine['kind']}")
    if mine["groups"] != kept["groups"]:
        sizes = [" + ".join(str(len(g)) for g in d["groups"]) for d in (kept, mine)]
        raise errors.TensorError(
            f"session '{name}': the groups of the optimizer have other parameters: expected "
            f"{sizes[0]}, got {sizes[1]} (the same names in the same order)"
        )


def _described(found: tuple[torch.dtype, list[int]] | None) -> str:
    return "none" if found is None else f"{found[0]}{found[1]}"

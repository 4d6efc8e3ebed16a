"""Locations in the user's code: the Python line that made a node of a graph, or raised an error.

Files in the packages of torch, sympy and gradd itself are not the user's. Files are compared with
the real folders of those packages, so a project may live in a folder of any name.
"""

from __future__ import annotations

import functools
import os
import re
from typing import Any

import sympy
import torch

_LOCAL = re.compile(r"^[LG]\['[^']*'\]")
_TABLE = re.compile(r"(?:\._modules|\['_modules'\])?\[['\"]?([^'\"\]]+)['\"]?\]")
_FRAME = re.compile(r'\s*File "([^"]+)", line (\d+)')


def _folder(file: str) -> str:
    return os.path.join(os.path.dirname(os.path.realpath(file)), "")


_OURS = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_INSIDE = (_folder(torch.__file__), _folder(sympy.__file__), os.path.join(_OURS, ""))


@functools.lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """True for files outside of torch, sympy and gradd."""
    return not os.path.realpath(filename).startswith(_INSIDE)


def is_installed(filename: str) -> bool:
    """True for files of installed libraries; Debian has a name of its own for their folder."""
    return "site-packages" in filename or "dist-packages" in filename


def source_of(node: Any) -> str | None:
    """ "module.path @ file:line" of the Python line that made an onnx_ir node, if known."""
    fx_node = node.meta.get("node")
    return None if fx_node is None else location_of(fx_node)


def translated(node: Any) -> tuple[str, str]:
    """The location in the user's code of a translated node, and the operator that it is made of."""
    made_by = node.meta.get("node")
    name = node.op_type if made_by is None else str(made_by.target)
    return source_of(node) or f"node {node.name}", name


@functools.lru_cache(maxsize=4096)
def _plain(path: str) -> str:
    """`layers.0` of what Dynamo writes: "L['self'].layers.0", "L['m']._modules['layers'][0]"."""
    path = _LOCAL.sub("", path)
    return _TABLE.sub(r".\1", path).replace(".__dict__", "").strip(".")


def location_of(fx_node: torch.fx.Node) -> str:
    """ "module.path @ file:line" of the Python line that made an FX node.

    The root is `module`. Without a line of the user's (a bare layer of torch), the module alone.
    """
    stack = fx_node.meta.get("nn_module_stack") or {}
    path = next((p for p, _ in reversed(stack.values()) if p), "") if stack else ""
    path = _plain(path)
    line = ""
    for text in (fx_node.meta.get("stack_trace") or "").splitlines():
        match = _FRAME.match(text)
        if match and is_users(match[1]):
            line = f"{match[1]}:{match[2]}"
    return f"{path or 'module'} @ {line}" if line else path or "module"


def is_named(fx_node: torch.fx.Node, text: str) -> bool:
    """Whether an error of the daemon names the Python line that made an FX node."""
    path, _, line = location_of(fx_node).partition(" @ ")
    name = f"{path}, {os.path.basename(line)}" if line else path
    return f"(from {name})" in text

"""All environment variables of the Python side, in one table.

`get(name)` reads a variable with the type of its row. Variables of ONNX Runtime Training are in the
table too: some have their meaning here, the others are accepted without effect. For the first
wrapped module, `warn_ineffective` names those that are set, together with unknown ORTMODULE_*
names.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass

logger = logging.getLogger("gradd")

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}


@dataclass(frozen=True)
class Option:
    """One variable: name, default (None is that of a text), help, and whether it works."""

    name: str
    default: bool | str | int | None
    help: str
    effective: bool = True

    @property
    def kind(self) -> str:
        """Its type: "bool", "text" or "int"."""
        return {bool: "bool", int: "int"}.get(type(self.default), "text")


OPTIONS: tuple[Option, ...] = (
    Option("GRADD_DIR", None, "directory of the daemon's sockets"),
    Option("GRADD_BIN", None, "the daemon's binary for auto-start"),
    Option("GRADD_BUILD", None, "build folder: auto-start runs its bin/gradd"),
    Option("XDG_RUNTIME_DIR", None, "parent of gradd's directory if GRADD_DIR is not set"),
    Option("TMPDIR", None, "the same without XDG_RUNTIME_DIR; default /tmp"),
    Option("GRADD_AUTOSTART", True, "start a daemon when none listens"),
    Option(
        "GRADD_DEVICE",
        None,
        "device for a daemon that is started; a warning names a running one's other device",
    ),
    Option("GRADD_WAIT", False, "wait for each reply of a GPU's daemon: errors at once"),
    Option("GRADD_QUIET", False, "say nothing of compiling, and nothing at the end of a run"),
    Option("GRADD_METRICS", True, "add the daemon's numbers to what ORTTrainer logs"),
    Option("GRADD_CACHE", True, "keep translated graphs on disk, for the next process"),
    Option(
        "GRADD_GPU_MEMORY",
        None,
        "share a GPU's memory in this way alone: vmm, handles or pinned; default the first that "
        "its driver takes",
    ),
    Option("GRADD_DISABLE", False, "run everything in PyTorch"),
    Option("GRADD_STRICT", False, "raise where a module would fall back to PyTorch"),
    Option("GRADD_FUSE", True, "recognise patterns; 0 runs each operator by itself"),
    Option("GRADD_CHUNKED_LOSS", True, "logits of a loss in chunks; 0 makes them whole"),
    Option("GRADD_LIVE_ROWS", True, "leave out padding and rows without a label"),
    Option(
        "GRADD_SELF_CHECK",
        "decades",
        "compare with PyTorch: 0 never, first at first calls, decades at calls 2, 10, 100, ... too",
    ),
    Option("GRADD_LAZY", True, "compute outputs beside the loss only if they are read"),
    Option("GRADD_MEMORY_BUDGET", None, "limit of a run's activations and workspace: 2GiB"),
    Option(
        "GRADD_WAIT_FOR_MEMORY",
        None,
        "how long a run waits for memory of other sessions: 90s, 10m; 0 not at all, -1 for ever; "
        "default what the daemon does",
    ),
    Option(
        "GRADD_GROUP_BYTES",
        None,
        "gradients leave a backward in groups of this size; 0: together; default: 25MiB if "
        "several processes train",
    ),
    Option(
        "GRADD_NCCL",
        None,
        "file that a GPU's daemon opens as NCCL; default that of torch's wheel, else libnccl.so.2",
    ),
    Option(
        "GRADD_REDUCE_SECONDS",
        600,
        "how long a process of ORTModule(model, process_group=) waits for the others, each time",
    ),
    Option("GRADD_NO_ALIASES", False, "1 serves no names of ONNX Runtime Training"),
    Option("ORTMODULE_LOG_LEVEL", None, "VERBOSE, DEVINFO, INFO, WARNING, ERROR, FATAL"),
    Option("ORTMODULE_SAVE_ONNX_PATH", None, "folder for DebugOptions(save_onnx=True)"),
    Option("ORTMODULE_JSON_CONFIG_PATH", None, "file of load_from_json(), before its argument"),
    Option("ORTMODULE_FALLBACK_POLICY", None, "FALLBACK_... names joined by |: see messages.md"),
    Option("ORTMODULE_FALLBACK_RETRY", False, "try the daemon again in every step"),
    Option(
        "ORTMODULE_MEMORY_OPT_LEVEL", None, "recompute: 0 nothing, 1 layers, 2 for the least memory"
    ),
    Option("ORTMODULE_MEMORY_OPT_CONFIG", None, "refused: set a budget or a level"),
    Option("ORTMODULE_MEMORY_OPT_PROBE_RECOMPUTE_LEVEL", None, "a level probes by itself", False),
    Option("ORTMODULE_ONNX_OPSET_VERSION", None, "graphs have opset 23", False),
    Option("ORTMODULE_CONV_ALGO_SEARCH", None, "no cuDNN here", False),
    Option("ORTMODULE_SKIPCHECK_POLICY", None, "checks are always on", False),
    Option("ORTMODULE_ENABLE_CUSTOM_AUTOGRAD", None, "autograd.Function runs in PyTorch", False),
    Option("ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT", None, "checkpoints recompute by level 1", False),
    Option("ORTMODULE_ENABLE_COMPUTE_OPTIMIZER", True, "0 acts as GRADD_LIVE_ROWS=0"),
    Option("ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER", True, "leave out rows without a label"),
    Option("ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER", True, "leave out padding"),
    Option("ORTMODULE_ENABLE_SPARSE_OPTIMIZER", True, "0 acts as 0 for both of these"),
    Option("ORTMODULE_PRINT_INPUT_DENSITY", False, "print the rows that a batch needs"),
    Option("ORTMODULE_PRINT_MEMORY_STATS", False, "print memory after every forward"),
    Option(
        "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT", None, "gradients are always in place", False
    ),
    Option("ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT", None, "never needed", False),
    Option("ORTMODULE_CACHE_DIR", None, "folder of translated graphs"),
    Option("ORTMODULE_ENABLE_ZERO_STAGE3", None, "ZeRO of stage 3 runs in PyTorch", False),
    Option("ORTMODULE_USE_TRITON", None, "no Triton here", False),
    Option("ORTMODULE_TRITON_CONFIG_FILE", None, "no Triton here", False),
    Option("ORTMODULE_TRITON_DEBUG", None, "no Triton here", False),
    Option("ORTMODULE_ENABLE_TUNING", None, "no tuning", False),
    Option("ORTMODULE_MAX_TUNING_DURATION_MS", None, "no tuning", False),
    Option("ORTMODULE_TUNING_RESULTS_PATH", None, "no tuning", False),
    Option("ORTMODULE_USE_FLASH_ATTENTION", None, "the engine chooses", False),
    Option("ORTMODULE_USE_EFFICIENT_ATTENTION", None, "the engine chooses", False),
    Option("ORTMODULE_ATEN_SDPA_FALLBACK", None, "the engine chooses", False),
)
_BY_NAME = {o.name: o for o in OPTIONS}
_warned = False


def get(name: str) -> bool | str | int | None:
    """Value of a variable of the table, with its type.

    Raises:
        ValueError: The text cannot be read as the option's type.
        KeyError: There is no such row.
    """
    option = _BY_NAME[name]
    text = os.environ.get(name)
    if text is None or (text == "" and option.kind != "bool"):
        return option.default
    if option.kind == "text":
        return text
    if option.kind == "int":
        with contextlib.suppress(ValueError):
            return int(text)
        raise ValueError(f"{name}={text!r}: expected a whole number")
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(f"{name}={text!r}: expected one of 1, 0, true, false, yes, no, on, off")


def self_check() -> str:
    """GRADD_SELF_CHECK: "0" (never), "first" (call of a kind) or "decades" (and 2, 10, 100, ...).

    Raises:
        ValueError: Another text; what means true in other options is "decades", false is "0".
    """
    text = os.environ.get("GRADD_SELF_CHECK", "decades").lower()
    if text in _FALSE:
        return "0"
    if text in _TRUE or text == "decades":
        return "decades"
    if text == "first":
        return text
    raise ValueError(f"GRADD_SELF_CHECK={text!r}: expected one of 0, first, decades")


def gpu_memory(ways: Iterable[str]) -> str:
    """GRADD_GPU_MEMORY: one of these ways, "" for any.

    Raises:
        ValueError: Another text.
    """
    text = str(get("GRADD_GPU_MEMORY") or "")
    if text and text not in ways:
        raise ValueError(f"GRADD_GPU_MEMORY={text!r}: expected one of {', '.join(ways)}")
    return text


def check() -> None:
    """Reads all variables of the table, so that a wrong one is found before anything runs.

    Raises:
        ValueError: One cannot be read as its option's type.
    """
    for option in OPTIONS:
        get(option.name)


def ineffective() -> list[str]:
    """Variables that are set and change nothing: rows without effect, unknown ORTMODULE_*."""
    found = []
    for name in sorted(os.environ):
        option = _BY_NAME.get(name)
        if option is not None and not option.effective:
            found.append(f"{name} ({option.help})")
        elif option is None and name.startswith("ORTMODULE_"):
            found.append(f"{name} (unknown)")
    return found


def warn_ineffective() -> None:
    """Names the variables of `ineffective()` once per process."""
    global _warned
    if _warned:
        return
    _warned = True
    names = ineffective()
    if names:
        logger.warning("these variables have no effect in gradd: %s", ", ".join(names))

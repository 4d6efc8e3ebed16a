"""DebugOptions and LogLevel, as ONNX Runtime Training's users know them."""

from __future__ import annotations

import enum
import logging
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradd import options

if TYPE_CHECKING:
    import torch

    from gradd.calls.graph import Graph, Plan
    from gradd.session.client import Client
    from gradd.spec import Capture

logger = logging.getLogger("gradd")


class LogLevel(enum.IntEnum):
    """Verbosity; the environment variable ORTMODULE_LOG_LEVEL wins over the argument."""

    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5


_PYTHON_LEVELS = {
    LogLevel.VERBOSE: logging.DEBUG,
    LogLevel.DEVINFO: logging.DEBUG,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
    LogLevel.FATAL: logging.CRITICAL,
}


class DebugOptions:
    """The log level, and whether to save captured graphs and to check values.

    Args:
        log_level: How much to log; ORTMODULE_LOG_LEVEL overrides it.
        save_onnx: Save every captured graph as `<prefix>_torch_exported_<mode>.onnx`, and with its
            first plan, which is noted in every node, as `<prefix>_execution_model_<mode>.onnx`;
            later ones as `..._2.onnx` and so on. The mode is `training` or `inference`. The table
            of `gradd_explain()` has the daemon's gradient graph, which is no ONNX.
        onnx_prefix: First part of the file name, required with save_onnx.
        save_path: Folder; ORTMODULE_SAVE_ONNX_PATH overrides it, default is the current one.
        config: Accepted for compatibility; not used.
        finite_check: Look at the result of every operator that the daemon runs: a NaN, or an
            infinity in an output or gradient, raises a NonFiniteError that names the first node,
            with its module and its Python line. The values stay the same; a step takes longer.
            `torch.autograd.detect_anomaly()` looks at gradients alone, as in PyTorch.

    Raises:
        ValueError: save_onnx without a prefix, or an unknown ORTMODULE_LOG_LEVEL.
        TypeError: The prefix is not text, or the level no LogLevel.
        OSError: The folder cannot be written to.
    """

    def __init__(
        self,
        log_level: LogLevel = LogLevel.WARNING,
        save_onnx: bool = False,
        onnx_prefix: str = "",
        save_path: str = "",
        config: Any = None,
        *,
        finite_check: bool = False,
    ) -> None:
        if not isinstance(log_level, (LogLevel, int)):
            raise TypeError(f"Expected log_level of type LogLevel, got {type(log_level)}.")
        self.log_level = _level_from_environment() or LogLevel(log_level)
        self.save_onnx = save_onnx
        self.onnx_prefix = onnx_prefix
        self.config = config
        self.finite_check = finite_check
        folder = options.get("ORTMODULE_SAVE_ONNX_PATH") or save_path or os.getcwd()
        self.save_path = Path(str(folder))
        self._saved: Counter[str] = Counter()
        if save_onnx:
            self._check_saving()

    def _check_saving(self) -> None:
        if not isinstance(self.onnx_prefix, str):
            raise TypeError(f"Expected name prefix of type str, got {type(self.onnx_prefix)}.")
        if not self.onnx_prefix:
            raise ValueError("onnx_prefix must be provided when save_onnx is set.")
        if not self.save_path.is_dir() or not os.access(self.save_path, os.W_OK):
            raise OSError(f"Directory {self.save_path} is not writable.")

    def apply(self) -> None:
        """Sets the level of the `gradd` logger, if it is not left at the default."""
        if self.log_level != LogLevel.WARNING:
            logger.setLevel(_PYTHON_LEVELS[self.log_level])

    def save(self, capture: Capture, module: torch.nn.Module) -> None:
        """Writes one captured graph if that is wanted; called after every capture."""
        if not self.save_onnx:
            return
        from gradd.explain import with_sources

        path = self._path("torch_exported", module)
        path.write_bytes(with_sources(capture.onnx, capture.sources))
        logger.info("saved %s", path)

    def save_plan(self, client: Client, graph: Graph, plan: Plan, module: torch.nn.Module) -> None:
        """Writes a graph with its first plan if that is wanted; called before the plan runs."""
        if not self.save_onnx:
            return
        from gradd.explain import explain_plan

        path = self._path("execution_model", module)
        explain_plan(client, plan, graph).save_onnx(path)
        logger.info("saved %s", path)

    def _path(self, stage: str, module: torch.nn.Module) -> Path:
        mode = "training" if module.training else "inference"
        name = f"{self.onnx_prefix}_{stage}_{mode}"
        self._saved[name] += 1
        number = f"_{self._saved[name]}" if self._saved[name] > 1 else ""
        return self.save_path / f"{name}{number}.onnx"


def _level_from_environment() -> LogLevel | None:
    text = options.get("ORTMODULE_LOG_LEVEL")
    if not text:
        return None
    try:
        return LogLevel[str(text).upper()]
    except KeyError:
        known = ", ".join(LogLevel.__members__)
        raise ValueError(f"ORTMODULE_LOG_LEVEL={text!r}: expected one of {known}") from None

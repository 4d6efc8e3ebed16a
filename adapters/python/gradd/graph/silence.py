"""Silences logging while a graph is made: a failure is raised, not logged."""

from __future__ import annotations

import logging
import warnings
from typing import Any


def silence() -> Any:
    """Silences the exporter's warnings and log lines; failures are raised, not logged."""
    return _Silence()


class _Silence:
    LOGGERS = (
        *("onnxscript", "onnx_ir", "torch.onnx", "torch.fx", "torch.export", "torch._export"),
        *("torch._dynamo", "torch._subclasses"),
    )

    def __enter__(self) -> None:
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")
        self._levels = [(logging.getLogger(n), logging.getLogger(n).level) for n in self.LOGGERS]
        for logger, _ in self._levels:
            logger.setLevel(logging.CRITICAL)

    def __exit__(self, *exc: object) -> None:
        for logger, level in self._levels:
            logger.setLevel(level)
        self._warnings.__exit__(*exc)

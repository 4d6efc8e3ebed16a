"""How much memory a run may take, and what its backward recomputes to stay within the limit.

A budget is given to the wrapper or in GRADD_MEMORY_BUDGET; without one a policy decides, which
ORTMODULE_MEMORY_OPT_LEVEL numbers as ONNX Runtime Training does. Both go with every plan that has a
backward, and the daemon chooses. Activation checkpoints have no effect in a graph: a module that
uses them is treated as if it asked for the first policy.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from gradd import options

# By level. The daemon knows the names.
POLICIES = ("none", "layers", "compromise")
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_TEXT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)", re.ASCII)
_MOST = 2**63 - 1


@dataclass(frozen=True)
class Memory:
    """The memory settings for the plans of one wrapper.

    Attributes:
        budget: Bytes of the arena of one run; 0 = no budget.
        level: Position in POLICIES, where there is no budget.
    """

    budget: int = 0
    level: int = 0

    @staticmethod
    def of(budget: Any = None) -> Memory:
        """Settings that the caller gives, else those of the environment.

        Raises:
            ValueError: A text that is no size, a level that there is none of, or
                ORTMODULE_MEMORY_OPT_CONFIG.
            TypeError: A budget that is neither a number nor a text.
        """
        name = "memory_budget"
        if budget is None:
            budget, name = options.get("GRADD_MEMORY_BUDGET"), "GRADD_MEMORY_BUDGET"
        _refuse_clusters()
        return Memory(0 if budget is None else parse_bytes(budget, name), _level())

    def fields(self, checkpoints: bool) -> dict[str, Any]:
        """Fields of graph.plan.

        Args:
            checkpoints: The graph was captured from a forward with activation checkpoints.
        """
        if self.budget:
            return {"memory_budget": self.budget}
        level = max(self.level, int(checkpoints))
        return {"recompute": POLICIES[level]} if level else {}


def amount(size: float) -> str:
    """Bytes as the tables have them: "1.5 GiB"."""
    unit = 0
    while size >= 1024 and unit + 1 < len(UNITS):
        size /= 1024
        unit += 1
    return f"{size:.1f} {UNITS[unit]}" if unit else f"{size:.0f} B"


def parse_bytes(value: Any, name: str) -> int:
    """Bytes of "2GiB", "1.5 GiB", "512MiB", "65536", or of a number.

    Args:
        value: The text or number.
        name: Of what it was given for, for messages.

    Raises:
        ValueError: It is no size, or not above 0.
        TypeError: It is neither text nor number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(
            f"{name}: expected bytes or a text such as '2GiB', got {type(value).__name__}"
        )
    number: float = 0
    if isinstance(value, str):
        match = _TEXT.fullmatch(value.strip())
        if match is not None and (unit := match[2] or "B") in UNITS:
            digits, scale = match[1], 1024 ** UNITS.index(unit)
            number = int(digits) * scale if digits.isdigit() else float(digits) * scale
    elif math.isfinite(value) and value == int(value):  # 1.5 was meant in another unit
        number = value
    if not 1 <= number <= _MOST:
        raise ValueError(
            f"{name}={value!r}: expected bytes from 1, as in '2GiB', '512MiB', '1.5 GiB' or 1048576"
        )
    return int(number)


def _level() -> int:
    text = options.get("ORTMODULE_MEMORY_OPT_LEVEL")
    if text is None:
        return 0
    if str(text).strip() not in ("0", "1", "2"):
        raise ValueError(
            f"ORTMODULE_MEMORY_OPT_LEVEL={text!r}: expected 0 (keep everything), 1 (recompute "
            "layers) or 2 (recompute the values between layers as well)"
        )
    return int(str(text))


def _refuse_clusters() -> None:
    text = options.get("ORTMODULE_MEMORY_OPT_CONFIG")
    if text:
        raise ValueError(
            f"ORTMODULE_MEMORY_OPT_CONFIG={text!r}: gradd has no clusters of operators. Unset "
            "it, and set memory_budget= (GRADD_MEMORY_BUDGET) or ORTMODULE_MEMORY_OPT_LEVEL (1 or "
            "2)"
        )

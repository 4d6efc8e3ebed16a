"""Plans a module without moving it: `gradd.estimate()`."""

from __future__ import annotations

from typing import Any

import torch

from gradd.calls.planned import Planned
from gradd.dynamo.frontend import function_of
from gradd.dynamo.owner import Owner
from gradd.dynamo.planning import plans
from gradd.session.client import Client
from gradd.spec import CaptureError


class Planner:
    """A module whose calls are planned; it stays where it is, and may be on the meta device."""

    def __init__(self, module: torch.nn.Module, client: Client) -> None:
        self._owner = Owner(module, type(module).__name__, client=client, moves=False)
        self._function = function_of(self._owner, module)

    def plans(
        self, args: tuple, kwargs: dict[str, Any], values: bool, budget: int = 0
    ) -> tuple[list[Planned], dict[str, Exception]]:
        """Of a call, and why something of it runs in PyTorch, by the names of operators.

        Args:
            args: Of the call.
            kwargs: Of the call.
            values: They have those of a call, and are not only of the right size.
            budget: Of all of them together; 0 = there is none.

        Raises:
            CaptureError: Nothing of it runs in the daemon.
            OutOfMemoryError: The budget is too small.
        """
        found, in_torch = plans(self._owner, self._function, args, kwargs, values, budget)
        if not found:
            none = CaptureError("export_failed", "torch.compile makes no graph of this call")
            raise next(iter(in_torch.values()), self._owner.refused or none)
        return found, in_torch

    def close(self) -> None:
        """Gives up all that the daemon holds."""
        self._owner.finish()()

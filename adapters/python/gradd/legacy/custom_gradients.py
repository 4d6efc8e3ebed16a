"""register_gradient(): gradients by the names of operators, which gradd has no use for.

ONNX Runtime Training asked for them where its exporter gave a graph an operator that it could not
differentiate. Here no such operator is in a graph: the daemon has a gradient for each of its own,
and what it does not run, PyTorch runs and differentiates. A registration is accepted, so that a
script that has one trains, and a warning says what holds in its place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

logger = logging.getLogger("gradd")

Definition = Callable[[], list[Any]]


def _say(what: str, key: tuple[str, ...]) -> None:
    if not all(isinstance(part, str) for part in key):
        raise TypeError(f"{what}: domain, name and attributes must be texts, got {key!r}")
    logger.warning(
        "%s%r has no effect: the operator has the derivative that PyTorch gives it; for another "
        "one write a torch.autograd.Function (docs/old-names.md)",
        what,
        key,
    )


def register_gradient(
    domain: str, name: str, *attributes: str
) -> Callable[[Definition], Definition]:
    """Accepts a gradient of an operator as a list of nodes, and says that it has no effect.

    Args:
        domain: Of the operator: "org.pytorch.aten", or the user's own.
        name: "ATen", or the operator's name.
        attributes: Name and overload of an operator of PyTorch.

    Returns:
        A decorator, which returns the function as it is; it is not called.

    Raises:
        TypeError: An argument is no text.
    """
    _say("register_gradient", (domain, name, *attributes))
    return lambda definition: definition


class CustomGradientRegistry:
    """Registrations of gradients by name; it keeps none."""

    @classmethod
    def register(cls, domain: str, name: str, attributes: Iterable[str], fn: Definition) -> None:
        """As register_gradient(); `fn` is not called."""
        _say("CustomGradientRegistry.register", (domain, name, *attributes))

    @classmethod
    def register_custom_stop_gradient_edges(
        cls, edges: Iterable[int], domain: str, name: str, *attributes: str
    ) -> None:
        """Inputs that get no gradient: those that PyTorch gives none, whatever `edges` are."""
        _say("register_custom_stop_gradient_edges", (domain, name, *attributes))

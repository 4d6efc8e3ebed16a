"""The torch versions that gradd was tested with (`make versions`), and a warning for newer ones."""

from __future__ import annotations

import functools
import logging

import torch

TORCH = ((2, 11), (2, 13), (2, 14))
logger = logging.getLogger("gradd")


@functools.cache
def tell() -> None:
    """Warns once per process that this torch is newer than those; gradd uses it all the same."""
    numbers = torch.__version__.split(".")[:2]
    if all(n.isdigit() for n in numbers) and tuple(map(int, numbers)) > TORCH[-1]:
        newest = ".".join(map(str, TORCH[-1]))
        logger.warning(
            "torch %s is newer than %s, the latest version that gradd was tested with",
            torch.__version__,
            newest,
        )

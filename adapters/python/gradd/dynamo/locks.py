"""The order of locks: first Dynamo's, which it holds while it compiles, then the client's.

Dynamo calls a back end under its own lock, and the back end sends requests to the daemon. Code that
may make Dynamo compile while it holds the client's lock takes both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from gradd import private
from gradd.session.client import Client


@contextlib.contextmanager
def both(client: Client) -> Iterator[None]:
    with private.compile_lock, client.lock:
        yield


def compiles_here() -> bool:
    """Whether this thread is within a compilation; that of another one is waited for.

    torch.compiler.is_compiling() is true in all threads.
    """
    with private.compile_lock:
        return torch.compiler.is_compiling()

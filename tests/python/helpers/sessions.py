"""The session with the daemon that computes on the tests' tensors."""

from __future__ import annotations

import torch

from gradd.session.client import Client, get_client


def session() -> Client:
    """The client of the device on which tests make their tensors (GRADD_TEST_TENSORS)."""
    return get_client(device=torch.get_default_device())

"""A plan that crashes the worker is computed again once, and refused by name after that."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch
from conftest import Daemon
from torch import nn

from gradd import ORTModule, errors
from gradd.session import client
from helpers.waiting import until


class Slow(nn.Module):
    """Its forward takes about a second."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 700 * 700).reshape(700, 700))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            x = torch.tanh(x @ self.weight)
        return x.mean()


def _small() -> torch.Tensor:
    torch.manual_seed(1)
    model = ORTModule(nn.Linear(8, 3), strict=True)
    model(torch.ones(2, 8)).sum().backward()
    return model.weight.grad.clone()


def _signalled(daemon: Daemon, number: int, times: int, act: Callable[[], object]) -> None:
    """Sends a signal to the worker in the middle of a request, to as many workers."""

    first = daemon.ps()["workers_lost"]

    def send() -> None:
        for lost in range(first, first + times):
            until(lambda n=lost: _runs(daemon, n), "nothing runs")
            os.kill(daemon.worker(), number)
            until(lambda n=lost: daemon.ps()["workers_lost"] > n, "the worker lives")

    thread = threading.Thread(target=send)
    thread.start()
    try:
        act()
    finally:
        thread.join()


def _runs(daemon: Daemon, lost: int) -> bool:
    said = daemon.ps()
    return said["workers_lost"] == lost and any(s["state"] == "running" for s in said["sessions"])


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_the_second_crash_refuses_the_plan(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    expected = _small()
    model, x = ORTModule(Slow(), strict=True), torch.linspace(1, -1, 700 * 700).reshape(700, 700)
    said = r"refused, because .* 2 times in a forward of this plan, or the process has crashed"

    def run() -> None:
        with pytest.raises(errors.UnsupportedError, match=said):
            model(x)

    _signalled(daemon, number, 2, run)
    with pytest.raises(errors.UnsupportedError, match=said):
        model(x)
    assert daemon.log().count(f"event=worker_lost status={128 + number}") == 2
    assert client.get_client().recoveries == 2 and daemon.ps()["workers_lost"] == 2
    assert torch.equal(_small(), expected), "other plans are computed"


def test_looking_on_during_a_long_request_leaves_nothing(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each `ps` asks owner and worker, over a connection to each."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    model, x = ORTModule(Slow(), strict=True), torch.linspace(1, -1, 700 * 700).reshape(700, 700)
    seen = []

    def look() -> None:
        until(lambda: _runs(daemon, 0), "nothing runs")
        seen.extend(len(daemon.ps()["sessions"]) for _ in range(10))

    thread = threading.Thread(target=look)
    thread.start()
    with torch.no_grad():
        for _ in range(3):
            model(x)
    thread.join()
    assert seen == [1] * 10


def test_what_runs_to_its_end_is_forgiven(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    model, x = ORTModule(Slow(), strict=True), torch.linspace(1, -1, 700 * 700).reshape(700, 700)
    with torch.no_grad():
        for _ in range(2):
            _signalled(daemon, signal.SIGSEGV, 1, lambda: model(x))
        expected = model(x)
        _signalled(daemon, signal.SIGKILL, 3, lambda: model(x))  # which is no crash
        assert torch.equal(model(x), expected)

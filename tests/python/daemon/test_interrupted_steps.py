"""A step of FusedAdam whose request ended in an exception: done, half done, or not begun.

Whichever it was, the next step goes on from there: no update is lost, none is mixed of two
gradients, and what cannot be put right is an error with a name.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from gradd import errors
from gradd.optim import FusedAdam
from gradd.session import client
from helpers import sessions

pytestmark = pytest.mark.fake
LARGE = 8_000_000  # a step of it takes long enough to be interrupted


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has many of them on any device."""
    monkeypatch.setattr("gradd.optim._LONG_CHUNK", 128 << 10)


def _pair(size: int = 1000, **options: Any) -> list[tuple[torch.nn.Parameter, FusedAdam]]:
    """Two equal parameters with an optimizer each: one to disturb, one to compare with."""
    found = []
    for _ in range(2):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, size))
        found.append((parameter, FusedAdam([parameter], lr=1e-2, **options)))
    return found


def _step(parameter: torch.nn.Parameter, optimizer: FusedAdam, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.param_groups[0]["lr"] = 1e-2 / (1 + seed)
    optimizer.step()


def _assert_same(pair: list[tuple[torch.nn.Parameter, FusedAdam]]) -> None:
    (p, one), (q, two) = pair
    assert torch.equal(p, q)
    assert one.state[p]["step"] == two.state[q]["step"]
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(one.state[p][name], two.state[q][name])


def _fail(monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """The next step's request raises, before it is sent or after it was answered."""
    request = client.Client.request

    def failing(self: client.Client, verb: str, *args: Any) -> Any:
        if verb != "step":
            return request(self, verb, *args)
        monkeypatch.setattr(client.Client, "request", request)
        if after:
            request(self, verb, *args)
        raise errors.SessionError("the daemon was lost 6 times", "lost")

    monkeypatch.setattr(client.Client, "request", failing)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_step_that_was_done_counts(
    daemon: object, monkeypatch: pytest.MonkeyPatch, clip: float | None
) -> None:
    pair = _pair(max_grad_norm=clip)
    for i in range(4):
        if i == 1:
            _fail(monkeypatch, after=True)
            with pytest.raises(errors.SessionError, match="6 times"):
                _step(*pair[0], i)
        else:
            _step(*pair[0], i)
        _step(*pair[1], i)
    _assert_same(pair)


def test_a_step_that_was_not_begun_does_not_count(
    daemon: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = _pair()
    for i in range(4):
        if i == 1:
            _fail(monkeypatch, after=False)
            with pytest.raises(errors.SessionError, match="6 times"):
                _step(*pair[0], 99)
        for parameter, optimizer in pair:
            _step(parameter, optimizer, i)
    _assert_same(pair)


def test_a_refused_step_leaves_nothing_behind(
    daemon: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = _pair()
    p, optimizer = pair[0]
    with monkeypatch.context() as patch:  # of its own: the fixture's directory stays
        patch.setattr(optimizer, "_groups", lambda kinds: {})
        with pytest.raises(errors.TensorError, match="groups.lr"):
            _step(p, optimizer, 7)
    assert optimizer._doubtful is None and not sessions.session().ledger.steps
    for i in range(2):
        for parameter, one in pair:
            _step(parameter, one, i)
    _assert_same(pair)


def _interrupt(
    daemon: Any, monkeypatch: pytest.MonkeyPatch, p: torch.nn.Parameter, optimizer: FusedAdam
) -> None:
    """Kills the daemon in the middle of the second step, with no other daemon to take over."""
    pid = daemon.pid()
    daemon.killed.add(pid)
    for thread_id in os.listdir(f"/proc/{daemon.worker()}/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread_id), 10)  # the killer must not wait for it
    words = optimizer._journal_words
    begin = 1 << 24

    def killer() -> None:
        while int(words[1]) <= begin + 20:
            time.sleep(0)
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=killer)
    with monkeypatch.context() as patch:
        patch.setenv("GRADD_AUTOSTART", "0")
        patch.setattr("gradd.session.daemon.connect.__defaults__", (0.2,))
        thread.start()
        with pytest.raises(errors.SessionError, match="no daemon listens"):
            _step(p, optimizer, 1)
        thread.join()
    assert optimizer._doubtful.is_torn(), (
        f"the step of {LARGE} values was over before the kill came, so nothing is proven: "
        "had the thread that kills no core?"
    )


def test_half_a_step_is_finished_with_its_own_gradients(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = _pair(LARGE, max_grad_norm=1.0)
    for parameter, optimizer in pair:
        _step(parameter, optimizer, 0)
    p, optimizer = pair[0]
    _interrupt(daemon, monkeypatch, p, optimizer)
    p.grad.fill_(3.0)  # it is the user's
    sessions.session().request("release", {"runs": []})  # anything that connects
    assert optimizer._doubtful.is_done()
    for seed in (1, 2):
        _step(*pair[1], seed)
    _step(p, optimizer, 2)
    _assert_same(pair)


@pytest.mark.parametrize("is_held", [False, True])
def test_half_a_step_on_other_parameters_is_an_error(
    is_held: bool, daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a copy is stepped, because the parameter's memory is held by another tensor."""
    pair = _pair(LARGE)
    holders = [pair[0][0].detach()[:]] * is_held
    for parameter, optimizer in pair:
        _step(parameter, optimizer, 0)
    p, optimizer = pair[0]
    assert (optimizer.copied_params > 0) == bool(holders)
    saved = p.detach().clone(), copy.deepcopy(optimizer.state_dict())
    _interrupt(daemon, monkeypatch, p, optimizer)
    with torch.no_grad():
        p.copy_(saved[0])  # half of the way back
    for _ in range(2):
        with pytest.raises(errors.StaleError, match="step 1 was interrupted.*Load the states"):
            _step(p, optimizer, 1)
        assert torch.equal(p, saved[0])
    optimizer.load_state_dict(saved[1])
    for seed in (1, 2):
        for parameter, one in pair:
            _step(parameter, one, seed)
    _assert_same(pair)

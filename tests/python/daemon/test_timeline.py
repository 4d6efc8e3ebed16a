"""Turns of requests: the daemon begins when the client's device has come so far, and says so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from gradd import errors
from gradd.memory.devices import Words
from gradd.memory.shm import Segment
from gradd.session import control, protocol

pytestmark = pytest.mark.usefixtures("shared_daemon")
_SOON = 0.2  # seconds in which the daemon would have begun


class Session:
    """A session whose device is the test itself."""

    def __init__(self, directory: Any) -> None:
        self.connection = control.Connection(directory)
        self.segment = Segment(0, 1)
        self.words = self.segment.view.cast("Q")
        self.connection.timeline(self.segment)
        self.connection.attach()

    def send(self, verb: str, turn: int, chain: int = 1, **fields: Any) -> int:
        """A request with a turn."""
        return self.connection.send_later({"v": verb, "turn": turn, "chain": chain, **fields})

    def answer(self, q: int) -> dict[str, Any]:
        """Its reply."""
        reply = self.connection.collect(q, wait=True)
        assert reply is not None
        return reply

    def has_no_answer(self, q: int) -> bool:
        """Whether the daemon leaves it waiting."""
        time.sleep(_SOON)
        return self.connection.collect(q, wait=False) is None

    def close(self) -> None:
        self.connection.close()
        self.words.release()
        self.segment.close()


@pytest.fixture
def session(shared_daemon: Any) -> Iterator[Session]:
    made = Session(shared_daemon.directory)
    yield made
    made.close()


def _release(session: Session, turn: int, chain: int = 1) -> int:
    return session.send("release", turn, chain, runs=[])


def test_a_request_begins_in_its_turn(session: Session, shared_daemon: Any) -> None:
    first, second = _release(session, 7), _release(session, 9)
    assert session.has_no_answer(first) and session.words[Words.DONE] == 0
    assert shared_daemon.ps()["sessions"][-1]["waiting"] == 2  # others are served meanwhile
    session.words[Words.READY] = 8
    assert session.answer(first)["ok"] and session.words[Words.DONE] == 7
    assert session.has_no_answer(second)
    session.words[Words.READY] = 9
    assert session.answer(second)["ok"] and session.words[Words.DONE] == 9


def test_what_follows_a_failure_is_not_done(session: Session) -> None:
    session.words[Words.READY] = 100
    bad = session.send("backward", 1, run=77, go=_NOTHING, g=_NOTHING, keep=False)
    after, other = _release(session, 2), _release(session, 3, chain=2)
    assert session.answer(bad)["code"] == "STALE"
    skipped = session.answer(after)
    assert skipped["code"] == "STALE" and "an earlier request has failed" in skipped["what"]
    assert session.answer(other)["ok"] and session.words[Words.DONE] == 3


def test_a_client_that_goes_takes_its_waiting_requests_along(shared_daemon: Any) -> None:
    before = shared_daemon.ps()["counters"]["requests"]
    gone = Session(shared_daemon.directory)
    for turn in range(1, 30):
        _release(gone, turn)
    assert gone.has_no_answer(gone.connection._q)
    gone.close()
    deadline = time.monotonic() + 20
    while shared_daemon.ps()["sessions"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert shared_daemon.ps()["sessions"] == []
    assert shared_daemon.ps()["counters"]["requests"] > before


def test_turns_need_a_timeline(shared_daemon: Any) -> None:
    connection = control.Connection(shared_daemon.directory)
    connection.attach()
    q = connection.send_later({"v": "release", "runs": [], "turn": 1})
    with pytest.raises(errors.SessionError, match="the session has no timeline"):
        protocol.checked(connection.collect(q, wait=True))
    connection.close()


def test_one_timeline_of_enough_bytes(session: Session) -> None:
    with pytest.raises(errors.SharedMemoryError, match="the session has one"):
        session.connection.timeline(session.segment)


_NOTHING: dict[str, list] = {"segments": [], "offsets": [], "dtypes": [], "dims": [], "at": []}

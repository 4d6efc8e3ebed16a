"""The journal of a step outlives a daemon, so its format is that of every version.

The heads below are written by hand as docs/protocol.md lays them out. The fingerprint is one that
gradd wrote for this request when it spoke protocol 1: a version that computes another one from the
same step would refuse to finish a step that an older daemon has begun.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import Daemon

from helpers.hostile.raw_client import GW, JOURNAL, TABLE, M, Raw, V, W, many, tensor

MAGIC = 0x4C4E524A44524731
FINGERPRINT = 0xDF3E589D587A17B0
HEAD_BYTES = 4096
CHUNK = 128 << 10  # elements of each of the three buffers behind the head
SECOND = 512  # bytes from the first parameter, moment or gradient to the second
COUNT = 3  # elements of the second one
SETTINGS = {
    "lr": [1e-2, 5e-3],
    "beta1": [0.9, 0.8],
    "beta2": [0.999, 0.99],
    "eps": [1e-8, 1e-6],
    "weight_decay": [0.01, 0.0],
    "mode": [1, 2],
    "bias_correction": [True, False],
    "t": [1, 4],
}
VALUES = (7.0, 8.0, 9.0)  # of parameter and moments, as a sealed chunk holds them


@pytest.fixture
def session(daemon: Daemon) -> Iterator[Raw]:
    """Two parameters with their moments, bound."""
    with Raw(daemon.directory).share().attach() as s:
        for bind, place in ((1, W), (3, M), (4, V)):
            assert s.call({"v": "bind", "bind": bind, "tensors": _two(place)})["ok"]
        s.at(GW, (TABLE, 4))[:] = 0.5
        s.at(GW + SECOND, (COUNT,))[:] = -0.25
        yield s


def _two(place: int) -> dict:
    return many(tensor(place, (TABLE, 4)), tensor(place + SECOND, (COUNT,)))


def _accepted(session: Raw) -> None:
    reply = _step(session)
    assert reply["ok"], f"the step was refused, with the journal {_words(session)}: {reply}"


def _step(s: Raw, **changes: object) -> dict:
    fields = {"groups": SETTINGS, "group": [0, 1], "g": _two(GW), "once": 77, **changes}
    return s.ask("step", **fields)


def _state(s: Raw) -> list[np.ndarray]:
    shapes = ((0, (TABLE, 4)), (SECOND, (COUNT,)))
    return [s.at(place + more, shape) for place in (W, M, V) for more, shape in shapes]


def _write(s: Raw, *words: int) -> None:
    head = struct.pack(f"<{len(words)}Q", *words)
    s.at(JOURNAL, (len(head),), np.uint8)[:] = np.frombuffer(head, np.uint8)


def _words(s: Raw) -> list[int]:
    return [int(word) for word in s.at(JOURNAL, (5,), np.uint64)]


def test_a_sealed_chunk_of_an_older_daemon_is_copied(session: Raw) -> None:
    """The first parameter was done, the second one's values lie in the journal."""
    before = [a.copy() for a in _state(session)]
    _write(session, MAGIC, 1, 1, FINGERPRINT, 0)
    for i, value in enumerate(VALUES):
        session.at(JOURNAL + HEAD_BYTES + 4 * CHUNK * i, (COUNT,))[:] = value
    _accepted(session)
    after = _state(session)
    for i, value in enumerate(VALUES):
        np.testing.assert_array_equal(after[2 * i], before[2 * i])
        np.testing.assert_array_equal(after[2 * i + 1], np.full(COUNT, value, np.float32))
    assert _words(session) == [MAGIC, 1 << 24, 1, FINGERPRINT, 0]


def test_a_begun_step_of_an_older_daemon_is_finished(session: Raw) -> None:
    """Nothing is sealed: the second parameter is computed as the whole step would have done."""
    start = [a.copy() for a in _state(session)]
    _accepted(session)
    assert _words(session) == [MAGIC, 1 << 24, 1, FINGERPRINT, 0], "what is written is the same"
    whole = [a.copy() for a in _state(session)]
    assert all((a != b).all() for a, b in zip(whole, start, strict=True))
    for array, value in zip(_state(session), start, strict=True):
        array[:] = value
    _write(session, MAGIC, 1, 0, FINGERPRINT, 0)
    _accepted(session)
    for i, array in enumerate(_state(session)):
        np.testing.assert_array_equal(array, whole[i] if i % 2 else start[i])


def test_another_request_does_not_finish_it(session: Raw) -> None:
    _write(session, MAGIC, 1, 1, FINGERPRINT, 0)
    for changes in ({"once": 78}, {"max_norm": 1.0}, {"groups": {**SETTINGS, "t": [1, 5]}}):
        reply = _step(session, **changes)
        assert (reply["ok"], reply["code"]) == (0, "STALE"), reply
        assert "step 0 was begun with other" in reply["what"]

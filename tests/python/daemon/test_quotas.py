"""Rules for sessions by name: their share, memory and number; kept in a file of the daemon's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

from gradd.memory.shm import Segment
from helpers.hostile.raw_client import Raw
from helpers.waiting import until

MIB = 1 << 20


def _quota(daemon: Any, *words: str) -> subprocess.CompletedProcess:
    command = [os.environ["GRADD_BIN"], "quota", *words, "--dir", str(daemon.directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _rules(daemon: Any, *words: str) -> dict[str, dict[str, Any]]:
    done = _quota(daemon, *words, "--json")
    assert done.returncode == 0, done.stderr
    return {rule["name"]: rule for rule in json.loads(done.stdout)["quotas"]}


def _named(daemon: Any, name: str) -> Raw:
    """A session that says that name."""
    s = Raw(daemon.directory, greet=False)
    s.nonce = s.control({"v": "hello", "proto": [2, 2], "client": name})["nonce"]
    return s


def _row(daemon: Any, name: str) -> dict[str, Any]:
    (found,) = (s for s in daemon.ps()["sessions"] if s["client"] == name)
    return found


def test_a_share_holds_for_the_sessions_that_are_there_and_those_that_come(daemon: Any) -> None:
    with _named(daemon, "train.py").open() as s:
        assert _row(daemon, "train.py")["share"] == 100
        rules = _rules(daemon, "train.py", "--share", "300")
        assert rules["train.py"] == {
            "name": "train.py", "share": 300, "bytes": 0, "sessions": 0, "connected": 1
        }  # fmt: skip
        assert _row(daemon, "train.py")["share"] == 300
        s.step()
        with _named(daemon, "a.ipynb").attach():
            assert _row(daemon, "a.ipynb")["share"] == 100
            assert set(_rules(daemon, "others", "--share", "50")) == {"train.py", "others"}
            assert _row(daemon, "a.ipynb")["share"] == 50
        assert _row(daemon, "train.py")["share"] == 300
        text = _quota(daemon).stdout.splitlines()
        assert text[0].split() == ["NAME", "SHARE", "MEMORY", "SESSIONS", "CONNECTED"]
        assert text[1].split() == ["train.py", "300", "-", "-", "1"]
        _rules(daemon, "train.py", "--remove")
        assert _row(daemon, "train.py")["share"] == 50  # that of the others


def test_memory_beyond_a_quota_is_refused_by_name(daemon: Any) -> None:
    with _named(daemon, "large.py").open() as s:
        before = s.step()
        _rules(daemon, "large.py", "--quota-mib", "4")
        segment = Segment(2, 3 * MIB)
        try:
            packet = {"v": "segment", "id": 2, "bytes": segment.size}
            reply = s.control(packet, [segment.fd])
            assert reply["code"] == "NOMEM", reply
            assert "needs 3.00 MiB; session" in reply["what"] and "large.py" in reply["what"]
            assert "of the 4 MiB of its quota (gradd quota)" in reply["what"]
            assert s.step() == before  # what it has is enough for this
            _rules(daemon, "large.py", "--quota-mib", "1")  # less than it has
            reply = s.ask("forward")
            assert reply["code"] == "NOMEM" and "of its quota" in reply["what"], reply
            with _named(daemon, "other.py").open() as other:
                assert other.step() == before
            _rules(daemon, "large.py", "--quota-mib", "0")
            assert s.control(packet, [segment.fd])["ok"]
            assert s.step() == before
        finally:
            segment.close()


def test_sessions_of_a_name_have_a_number(daemon: Any) -> None:
    _rules(daemon, "nb.ipynb", "--sessions", "1")
    with _named(daemon, "nb.ipynb").attach():
        second = Raw(daemon.directory, greet=False)
        with second:
            reply = second.control({"v": "hello", "proto": [2, 2], "client": "nb.ipynb"})
            assert reply["code"] == "LIMIT", reply
            assert "1 session of 'nb.ipynb' is connected" in reply["what"]
    until(lambda: not daemon.ps()["sessions"], "the sessions do not end")
    with _named(daemon, "nb.ipynb").attach():
        assert _rules(daemon)["nb.ipynb"]["connected"] == 1


def test_rules_outlive_a_worker_and_the_daemon(daemon: Any) -> None:
    expected = _rules(daemon, "train.py", "--share", "25", "--quota-mib", "512")
    worker = daemon.worker()
    os.kill(worker, signal.SIGKILL)
    until(lambda: daemon.worker() != worker, "there is no other worker")
    assert _rules(daemon) == expected
    with _named(daemon, "train.py").attach():
        row = _row(daemon, "train.py")
        assert (row["share"], row["quota_bytes"]) == (25, 512 * MIB)
    file = daemon.directory / "quotas"
    assert file.read_text() == f"train.py 25 0 {512 * MIB}\nend\n"
    assert file.stat().st_mode & 0o777 == 0o600


def test_wrong_words_change_nothing(daemon: Any) -> None:
    for words, text in (
        (("--share", "10"), "a quota needs the NAME of sessions"),
        (("a", "--share", "0"), "field 'share': 0, expected 1 to 10000"),
        (("a", "--share", "-5"), "expected a number from 0 to 10000"),
        (("a", "--remove"), "there is no rule for 'a'"),
        (("a", "b"), "one name at a time"),
    ):
        done = _quota(daemon, *words)
        assert done.returncode and text in done.stderr, (words, done)
    assert _rules(daemon) == {}
    assert _quota(daemon).stdout == "no quotas: sessions have equal shares\n"

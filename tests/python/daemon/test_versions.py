"""Clients and daemons of different versions refuse each other and name the command that helps."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from conftest import BINARY, Daemon

import gradd
from gradd import ORTModule, errors
from gradd.memory.shm import Segment
from gradd.optim import FusedAdam
from gradd.session import client, control, protocol
from helpers.hostile import raw_client
from helpers.hostile.raw_client import (
    DROP,
    F32,
    GO,
    GW,
    I64,
    IDS,
    JOURNAL,
    JOURNAL_BYTES,
    LOSS,
    ROWS,
    SEGMENT,
    TABLE,
    U8,
    M,
    Raw,
    V,
    W,
    X,
    Y,
)
from helpers.nets import Net, batch, loss_of
from helpers.other_versions import OLD_WORDS, Peer, new_daemon, old_daemon

GARBAGE = [
    b"\xc1",
    b"",
    b"\x93\x01\x02\x03",
    bytes(range(256)),
    b"HTTP/1.1 400 Bad Request",
    msgpack.packb({}),
    msgpack.packb({"ok": 1}),
    msgpack.packb({"ok": 1, "proto": 2, "nonce": "text", "pid": 1, "build": ""}),
    msgpack.packb({"ok": 1, "proto": "2"}),
    msgpack.packb({"ok": 0, "code": 7, "what": []}),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory in which no daemon runs and none is started."""
    path = tmp_path / "d"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("GRADD_DIR", str(path))
    monkeypatch.setenv("GRADD_BIN", str(BINARY))
    yield path
    client.get_client(path).close()


def _command(name: str, path: Path, *more: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(BINARY), name, "--dir", str(path), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


def _stop_in(what: str) -> list[str]:
    """The command that a message advises."""
    (found,) = re.findall(r"`(\S*gradd stop --dir [^`]+)`", what)
    name, *rest = shlex.split(found)
    return [str(BINARY) if name == "gradd" else name, *rest]


# ---- a daemon of this version ----


@pytest.mark.quick
def test_the_error_for_an_older_client_names_versions_and_command(daemon: Daemon) -> None:
    with Raw(daemon.directory, greet=False) as old:
        reply = old.control({"v": "hello", "proto": [1, 1], "client": "train.py"})
        assert (reply["ok"], reply["code"], reply["session"]) == (0, "VERSION", "alive")
        assert (reply["proto"], reply["version"]) == ([2, 2], gradd.__version__)
        what = reply["what"]
        assert "the client, gradd of an unknown version, speaks protocol 1" in what
        assert f"this daemon, gradd {gradd.__version__} (pid {daemon.pid()}), protocol 2" in what
        assert f"the client is the older one: `pip install gradd=={gradd.__version__}`" in what
        segment = old.control({"v": "segment", "id": 1, "bytes": 4096})
        assert segment["ok"] == 0, "a refused client gets no further"
    assert subprocess.run(_stop_in(what), timeout=60).returncode == 0
    assert daemon.process.wait(5) == 0, "the advised command ends the daemon"
    client.get_client().connect()
    assert daemon.ps()["version"] == gradd.__version__, "and the next call starts another one"


@pytest.mark.quick
def test_the_error_for_a_newer_client_says_that_the_daemon_is_older(daemon: Daemon) -> None:
    with Raw(daemon.directory, greet=False) as new:
        hello = {"v": "hello", "proto": [3, 4], "version": "9.0.0", "mood": "curious"}
        reply = new.control(hello)
        assert (reply["code"], reply["proto"]) == ("VERSION", [2, 2])
        assert "the client, gradd 9.0.0, speaks protocols 3 to 4" in reply["what"]
        assert "the daemon is the older one: " in reply["what"]
        assert _stop_in(reply["what"])[1:] == ["stop", "--dir", str(daemon.directory)]
        assert new.control({**hello, "proto": [1, 9]})["proto"] == 2, "one that speaks 2 as well"


def test_hello_ps_and_stop_are_for_all_versions(daemon: Daemon) -> None:
    """What they do not know they ignore; everything else is refused."""
    with Raw(daemon.directory, greet=False) as other:
        ps = other.call({"v": "ps", "t": DROP, "wide": 1})
        assert ps["ok"] and ps["proto"] == [2, 2] and ps["version"] == gradd.__version__
        lost = other.call({"v": "attach", "nonce": bytes(16), "t": DROP})
        assert (lost["code"], lost["session"]) == ("SESSION", "lost")
        for proto in ({}, {"proto": 1}, {"proto": 3}):
            reply = other.call({"v": "explain", "t": DROP, **proto})
            assert (reply["code"], reply["proto"]) == ("VERSION", [2, 2]), reply
            assert f"you read protocol {proto.get('proto', 1)}, this daemon" in reply["what"]
        assert other.call({"v": "explain", "t": DROP, "proto": 2})["proto"] == 2
        assert other.call({"v": "stop", "t": DROP, "gently": 1})["ok"]
    assert daemon.process.wait(5) == 0


# ---- a client of protocol 2, as it was before daemons had workers ----

# What replies had then, and clients may rely on.
REPLIES = {
    "hello": {"proto", "nonce", "version", "build", "pid", "header", "device"},
    "attach": {"t", "session", "threads", "bf16", "device", "missed", "version"},
    "segment": {"id"},
    "unsegment": {"id"},
    "graph.put": {"graph", "in", "out", "unsupported", "random", "half"},
    "graph.plan": {"out", "has", "peak", "saved", "constant", "ms", "launches", "cached"},
    "forward": {"us", "arena", "gen", "sum"},
    "backward": {"none", "rest", "us", "arena"},
    "step": {"norm", "skipped", "us", "arena"},
}


def _asked(s: Raw, verb: str, **fields: Any) -> dict[str, Any]:
    """A request that succeeds, by fields of then alone; its reply has all that it had."""
    fds = fields.pop("fds", None)
    frames = fields.pop("frames", ())
    if verb in ("hello", "segment", "unsegment"):
        reply = s.control({"v": verb, **fields}, fds or [])
    else:
        reply = s.call({"v": verb, **fields}, frames)
    assert reply["ok"] == 1, reply
    assert REPLIES.get(verb, set()) <= reply.keys(), f"{verb}: {reply.keys()}"
    return reply


def _trained(s: Raw) -> list[bytes]:
    """Two steps with AdamW by a session that ends or is left; what lies in its memory after."""
    s.nonce = _asked(s, "hello", proto=[2, 2])["nonce"]
    s.segment = Segment(1, SEGMENT)
    _asked(s, "segment", id=1, bytes=SEGMENT, fds=[s.segment.fd])
    s.fill()
    s.token = _asked(s, "attach", nonce=s.nonce, t=DROP)["t"]
    put = _asked(s, "graph.put", frames=[raw_client.model()])
    assert [one["name"] for one in put["in"]] == ["x", "ids", "w"], put
    assert {"name", "dtype", "sizes", "reach"} <= put["out"][0].keys(), put
    _asked(
        s, "graph.plan", graph=put["graph"], plan=1, bound=["w"], grad=["w"], out=[0, 1], gmask=[1],
        **{"in": {"dtypes": [F32, I64, F32], "dims": [[ROWS, 4], [ROWS], [TABLE, 4]]}},
    )  # fmt: skip
    table = {"segments": [1], "dtypes": [F32], "dims": [[TABLE, 4]]}
    for bind, offset in ((1, W), (2, GW), (3, M), (4, V)):
        _asked(s, "bind", bind=bind, tensors={**table, "offsets": [offset]})
    pair = {"segments": [1, 1]}
    for step in range(2):
        _asked(
            s, "forward", plan=1, run=step, seed=0, flags=0, b=1, look=2,
            **{"in": {**pair, "offsets": [X, IDS], "dtypes": [F32, I64],
                      "dims": [[ROWS, 4], [ROWS]]}},
            out={**pair, "offsets": [Y, LOSS], "dtypes": [F32, F32], "dims": [[ROWS, 4], []]},
        )  # fmt: skip
        go = {"segments": [1], "offsets": [GO], "dtypes": [F32], "dims": [[]], "at": [1]}
        _asked(s, "backward", run=step, go=go, b=2)
        groups = {
            "lr": [0.01], "beta1": [0.9], "beta2": [0.999], "eps": [1e-8], "weight_decay": [0.1],
            "mode": [2], "bias_correction": [True], "t": [step + 1],
        }  # fmt: skip
        journal = {"segment": 1, "offset": JOURNAL, "dtype": U8, "dims": [JOURNAL_BYTES]}
        _asked(
            s, "step", step=step, journal=journal, groups=groups, group=[0], bp=1, bm=3, bv=4,
            g={**table, "offsets": [GW]}, once=step,
        )  # fmt: skip
    return [s.at(at, (TABLE, 4)).tobytes() for at in (W, GW, M, V)]


def test_a_client_that_knows_of_no_workers_trains(daemon: Daemon) -> None:
    """It is hung up on when the worker dies, and gets the same bits from the next one."""
    with Raw(daemon.directory, greet=False) as old:
        found = _trained(old)
        random = np.random.default_rng(0)  # as fill() has it
        x = torch.tensor(random.standard_normal((ROWS, 4)), dtype=torch.float32)
        w = torch.tensor(random.standard_normal((TABLE, 4)), dtype=torch.float32)
        w.requires_grad_()
        optimizer = torch.optim.AdamW([w], lr=0.01, weight_decay=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (x * w[torch.tensor([1, TABLE - 1])]).sum().backward()
            optimizer.step()
        trained = torch.from_numpy(old.at(W, (TABLE, 4)).copy())
        torch.testing.assert_close(trained, w.detach())
        os.kill(old.call({"v": "ps", "t": DROP})["worker"], signal.SIGKILL)
        assert old.ctl.recv(65536) == b"", "not a packet that it does not know"
    with Raw(daemon.directory, greet=False) as again:
        assert _trained(again) == found
        for verb, field in (("unbind", "bind"), ("plan.drop", "plan")):
            _asked(again, verb, **{field: 1})
        _asked(again, "release", runs=[0, 1])
        for bind in (2, 3, 4):
            _asked(again, "unbind", bind=bind)
        _asked(again, "unsegment", id=1)
        _asked(again, "detach")
    assert daemon.process.poll() is None, "the owner"


# ---- a client of this version ----


@pytest.mark.quick
def test_an_older_daemon_is_named_with_the_command(folder: Path) -> None:
    with old_daemon(folder) as peer:
        with pytest.raises(errors.VersionError) as caught:
            client.get_client().connect()
        what = caught.value.what
        assert f"the daemon in {folder}, gradd 0.0.9, speaks an older protocol" in what
        assert f"this side, gradd {gradd.__version__}, protocol 2: the daemon is the older" in what
        assert f"`{BINARY} stop --dir {folder}` ends the daemon" in what
        assert OLD_WORDS in what
        assert peer.heard[0]["proto"] == [2, 2] and peer.heard[0]["version"] == gradd.__version__
        assert [p["v"] for p in peer.heard] == ["hello"], "nothing is asked after a refusal"


@pytest.mark.parametrize("chosen", [1, 3, 0, None])
def test_a_daemon_that_chooses_another_protocol(folder: Path, chosen: int | None) -> None:
    hello = {"ok": 1, "q": 0, "nonce": bytes(16), "pid": 1, "build": "", "version": "7.0.0"}
    with Peer(folder, {**hello, "proto": chosen}) as peer:
        with pytest.raises(errors.VersionError, match="gradd 7.0.0, speaks "):
            client.get_client().connect()
        assert len(peer.heard) == 1


@pytest.mark.quick
def test_a_newer_daemon_is_named_with_the_command(folder: Path) -> None:
    with new_daemon(folder), pytest.raises(errors.VersionError) as caught:
        client.get_client().connect()
    what = caught.value.what
    assert "gradd 9.0.0, speaks protocol 3, this side, gradd " in what
    assert "this side is the older one. `pip install gradd==9.0.0`" in what
    assert f"`{BINARY} stop --dir {folder}` ends the daemon" in what


@pytest.mark.parametrize("answer", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_on_the_control_socket(
    folder: Path, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_HELLO_SECONDS", 0.1)
    with Peer(folder, answer), pytest.raises(errors.GraddError) as caught:
        client.get_client().connect()
    assert str(folder) in str(caught.value)
    assert not isinstance(caught.value, errors.InternalError)


@pytest.mark.parametrize("answer", [*GARBAGE[:5], GARBAGE[6]])
def test_garbage_on_the_command_socket(folder: Path, answer: bytes) -> None:
    hello = {"ok": 1, "q": 0, "proto": 2, "nonce": bytes(16), "pid": 1, "build": ""}
    with Peer(folder, hello, lambda request: answer):
        with pytest.raises(errors.SessionError, match="not a gradd daemon"):
            client.get_client().connect()
        for name in ("ps", "stop", "explain"):
            code, said = _command(name, folder)
            assert code == 1, f"{name}: {said}"


@pytest.mark.quick
@pytest.mark.parametrize(
    "reply",
    [
        {"graph": bytes(32), "in": [["x", 1, [2]]], "out": ["y"], "types": []},  # as in protocol 1
        {"graph": bytes(32), "in": None, "out": []},
        {"graph": bytes(32), "in": [], "out": [{"name": "y", "dtype": 1}]},
        {},
    ],
)
def test_replies_of_another_form_have_a_name(reply: dict[str, Any]) -> None:
    """A daemon of another build may say in hello that it speaks this protocol."""
    with pytest.raises(errors.VersionError, match="reply to graph.put has not the form"):
        protocol.graph_info(reply, ({}, ()))
    with pytest.raises(errors.VersionError, match="reply to graph.plan has not the form"):
        protocol.plan_info(1, reply)


def test_commands_at_an_older_daemon(folder: Path) -> None:
    """ps and stop have the same form in all versions, an explanation has not."""
    with old_daemon(folder):
        code, said = _command("ps", folder)
        assert code == 0 and said.startswith("gradd 0.0.9, pid ")
        code, said = _command("explain", folder)
        assert code == 1 and "VERSION" in said, said
        assert "the daemon is gradd 0.0.9 and speaks an older protocol than this gradd" in said
        assert f"`gradd stop --dir {folder}`" in said


# ---- a daemon that is replaced while a trainer runs ----


class _Trainer:
    """A model with FusedAdam, step by step."""

    def __init__(self, strict: bool = True) -> None:
        torch.manual_seed(5)
        self.model = ORTModule(Net(), strict=strict)
        self.optimizer = FusedAdam(self.model.parameters(), lr=1e-2)
        self.done = 0

    def forward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        return loss_of(self.model(*batch(5, seed=self.done)))

    def step(self) -> None:
        self.forward().backward()
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.done += 1

    def state(self) -> list[torch.Tensor]:
        moments = [
            t for s in self.optimizer.state.values() for t in (s["exp_avg"], s["exp_avg_sq"])
        ]
        return [t.detach().clone() for t in (*self.model.parameters(), *moments)]


def _replaced(daemon: Daemon) -> Peer:
    """The daemon ends, and a newer one is there before any client has asked for another."""
    daemon.process.terminate()
    assert daemon.process.wait(60) == 0
    return new_daemon(daemon.directory)


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("moment", ["forward", "backward", "step"])
def test_a_trainer_loses_nothing_to_a_newer_daemon(daemon: Daemon, moment: str) -> None:
    other, trainer = _Trainer(), _Trainer()
    for _ in range(4):
        other.step()
    for _ in range(2):
        trainer.step()
    before = trainer.state()
    loss = trainer.forward() if moment != "forward" else None
    if moment == "step":
        loss.backward()
    action = {
        "forward": trainer.forward,
        "backward": lambda: loss.backward(retain_graph=True),
        "step": trainer.update,
    }[moment]
    with _replaced(daemon):
        for _ in range(2):
            with pytest.raises(errors.VersionError, match="pip install gradd==9.0.0"):
                action()
            assert _same(trainer.state(), before)
    if moment == "step":
        trainer.update()
    elif moment == "backward":
        loss.backward()
        trainer.update()
    while trainer.done < 4:
        trainer.step()
    assert _same(trainer.state(), other.state()), "with a daemon of its own it goes on"


def test_modules_fall_back_where_they_begin(
    daemon: Daemon, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is raised in the middle of training; a module wrapped then may fall back."""
    trainer = _Trainer(strict=False)
    trainer.step()
    with _replaced(daemon):
        with pytest.raises(errors.VersionError):
            trainer.forward()
        caplog.clear()
        with pytest.raises(errors.VersionError):
            ORTModule(Net())
        monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_BAD_INITIALIZATION")
        other = ORTModule(Net())
        loss = loss_of(other(*batch()))
        loss.backward()
        (said,) = [r.getMessage() for r in caplog.records if "not in the daemon" in r.getMessage()]
        assert "(version)" in said and "pip install gradd==9.0.0" in said
        with pytest.raises(errors.VersionError):
            ORTModule(Net(), strict=True)
    assert loss.item() == loss_of(Net()(*batch())).item()
    trainer.step()

"""`gradd serve --allow-group`: a daemon for each user, under the user's uid.

test_attacks.py has what one user tries against another.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gradd import errors
from gradd.memory import devices
from gradd.session import daemon as daemons
from gradd.session import shared_directory
from helpers import other_users
from helpers.other_users import GRADD, GROUP, A, B, Users, as_user
from helpers.processes import user_trainer
from helpers.waiting import SECONDS, until

pytestmark = pytest.mark.skipif(bool(other_users.why_not()), reason=other_users.why_not())


@pytest.fixture
def users() -> Iterator[Users]:
    made = Users()
    yield made
    made.close()


def _status(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/status").read_text()
    return {line.split(":")[0]: line.split(":")[1].strip() for line in text.splitlines()}


def test_each_user_has_a_daemon_of_the_own_uid(users: Users) -> None:
    pids = {uid: users.daemon(uid) for uid in (A, B)}
    assert pids[A] != pids[B]
    for uid, pid in pids.items():
        found = users.ps(uid)
        assert found["pid"] == pid and found["sessions"] == []
        assert users.daemon(uid) == pid, "it is the same the second time"
        code, said = users.gradd(uid, "restart")
        assert code == 0 and f"pid {pid}" in said, said
        found = users.ps(uid)
        for process in (pid, found["worker"]):
            told = _status(process)
            assert told["Uid"].split() == told["Gid"].split() == [str(uid)] * 4
            assert told["Groups"].split() == [str(GROUP)]
            assert told["NoNewPrivs"] == "1"
            assert {int(told[name], 16) for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")} == {0}
        info = users.folder(uid).stat()
        assert (info.st_uid, stat.S_IMODE(info.st_mode)) == (uid, 0o700)
        for file in users.folder(uid).iterdir():
            info = file.lstat()
            assert (info.st_uid, stat.S_IMODE(info.st_mode)) == (uid, 0o600), file
    assert users.stop() == 0
    for uid in pids:
        gone = lambda uid=uid: "ctl.sock" not in os.listdir(users.folder(uid))  # noqa: E731
        until(gone, f"the daemon of uid {uid} stays")


@pytest.mark.skipif(not shutil.which("setpriv"), reason="there is no setpriv")
def test_a_trainer_finds_the_daemon_of_its_user(users: Users) -> None:
    """With the losses of plain PyTorch; daemon and supervisor may die meanwhile."""
    plain = user_trainer.net()
    expected = [user_trainer.losses(*plain) for _ in range(4)]
    with users.trainer(A) as trainer:
        assert trainer.stdin and trainer.stdout
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        told = json.loads(trainer.stdout.readline())
        assert told["uid"] == A
        torch.testing.assert_close(told["losses"], expected[0])
        found = users.ps(A)
        assert [s["uid"] for s in found["sessions"]] == [A]
        os.kill(found["pid"], signal.SIGKILL)
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        told = json.loads(trainer.stdout.readline())
        torch.testing.assert_close(told["losses"], expected[1])
        found = users.ps(A)
        assert found["workers_lost"] == 0, "it is another daemon"
        users.process.kill()
        users.process.wait(SECONDS)
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        told = json.loads(trainer.stdout.readline())
        torch.testing.assert_close(told["losses"], expected[2])
        os.kill(found["pid"], signal.SIGKILL)
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        users.start()  # while the trainer looks for one
        told = json.loads(trainer.stdout.readline())
        torch.testing.assert_close(told["losses"], expected[3])
        found = users.ps(A)
        users.process.kill()
        users.process.wait(SECONDS)
        users.start()
        assert users.ps(A)["pid"] == found["pid"], "the next one leaves it alone"
        trainer.stdin.close()
        assert trainer.wait(SECONDS) == 0
    os.kill(found["pid"], signal.SIGTERM)


def test_strangers_get_no_daemon(users: Users) -> None:
    """The kernel keeps them out; the supervisor asks it again, should the directory be open."""
    with pytest.raises(PermissionError):
        as_user(A, users.ask, groups=())
    (users.directory / "users.sock").chmod(0o666)
    users.directory.chmod(0o755)
    answer = as_user(A, users.ask, groups=(GROUP + 1,))
    assert (answer["ok"], answer["code"]) == (0, "SESSION")
    assert answer["what"] == f"uid {A} is not in group {GROUP}, which may use this directory"
    unknown = 61234
    answer = as_user(unknown, users.ask)
    assert answer["what"] == f"uid {unknown} is not a user of this machine"
    assert sorted(os.listdir(users.directory)) == ["lock", "users.sock"]


def test_one_that_was_killed_is_started_again(users: Users) -> None:
    first = users.daemon(A)
    as_user(A, lambda: os.kill(first, signal.SIGKILL))
    until(lambda: f"uid={A} pid={first} status=137" in users.log(), "it is not buried")
    assert users.daemon(A) != first


def test_one_that_dies_again_and_again_is_told(users: Users) -> None:
    """And others are served meanwhile."""
    pid = users.daemon(A)
    as_user(A, lambda: os.kill(pid, signal.SIGTERM))
    until(lambda: f"uid={A} pid={pid} status=0" in users.log(), "it does not end")
    lock = users.folder(A) / "lock"
    lock.unlink()
    lock.mkdir()

    def is_told() -> bool:
        answer = as_user(A, users.ask)
        return not answer["ok"] and "has died 5 times in a row" in answer["what"]

    until(is_told, "it is not told")
    users.daemon(B)
    lock.rmdir()
    until(lambda: as_user(A, users.ask)["ok"] == 1, "it is not tried again")
    users.daemon(A)


def test_a_client_of_python_says_what_is_missing(
    users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADD_DIR", str(users.directory))
    folder = users.folder(A)
    assert as_user(A, daemons.directory) == folder
    assert as_user(A, lambda: daemons.connect(folder).close()) is None
    with pytest.raises(daemons.DirectoryError, match="out of reach of this process"):
        as_user(B, lambda: daemons.connect(users.folder(B)), groups=())
    monkeypatch.setenv("GRADD_AUTOSTART", "0")
    with pytest.raises(errors.SessionError, match="GRADD_AUTOSTART is 0"):
        as_user(B, lambda: daemons.connect(users.folder(B), wait=0.1))
    monkeypatch.delenv("GRADD_AUTOSTART")
    assert not users.folder(B).exists()
    assert users.stop() == 0
    shared_directory.Asks(users.folder(A))  # another one may come
    monkeypatch.setattr(shared_directory, "_ABSENT_SECONDS", 0.0)
    with pytest.raises(errors.SessionError, match="no `gradd serve --allow-group` listens at"):
        as_user(B, lambda: daemons.connect(users.folder(B)))


def test_a_daemon_of_a_gpu_is_started_in_the_users_folder(
    users: Users, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the trainer, when the supervisor has made that; here its device is missing."""
    gpu = types.SimpleNamespace(
        uuid="GPU-0",
        device="cuda:0",
        serve=("--device", "cuda", "--require-device"),
        environment={"GRADD_PLUGINS": str(tmp_path)},
    )

    def connect() -> str:
        try:
            daemons.connect(users.folder(A) / gpu.uuid, gpu)
        except devices.DeviceError as error:
            return str(error)
        return ""

    monkeypatch.setenv("GRADD_BIN", str(GRADD))
    assert "no daemon can compute on cuda:0" in as_user(A, connect)
    assert (users.folder(A) / gpu.uuid).stat().st_uid == A


def test_a_supervisor_without_its_socket_ends(users: Users) -> None:
    """Another one takes its place, and a daemon that runs stays."""
    pid = users.daemon(A)
    (users.directory / "users.sock").unlink()
    assert users.process.wait(SECONDS) == 1
    assert "or a file in it, is gone" in users.log()
    users.start()
    assert users.ps(A)["pid"] == pid
    os.kill(pid, signal.SIGTERM)


def test_roots_own_directory_is_no_shared_one(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    assert shared_directory.entered(tmp_path) == tmp_path
    with pytest.raises(daemons.DirectoryError, match="mode 0750"):
        daemons.check_directory(tmp_path, create=True)


def test_what_root_has_is_not_passed_on(tmp_path: Path) -> None:
    """Variables, and descriptors that were open when the supervisor started."""
    (tmp_path / "secret").write_text("of root")
    with open(tmp_path / "secret") as secret:
        users = Users({"SECRET": "of root", "GRADD_LOG": "debug"}, descriptors=(secret.fileno(),))
    try:
        pid = users.daemon(A)
        held = {os.readlink(fd) for fd in Path(f"/proc/{users.process.pid}/fd").iterdir()}
        assert str(tmp_path / "secret") in held
        for process in (pid, users.ps(A)["worker"]):
            files = {os.readlink(fd) for fd in Path(f"/proc/{process}/fd").iterdir()}
            assert not any("secret" in file or "users.sock" in file for file in files)
            own = str(users.folder(A))
            assert {file for file in files if file.startswith(str(users.directory))} <= {
                *(f"{own}{name}" for name in ("", "/lock", "/daemon.log")),
            }
        given = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        names = {entry.split(b"=")[0].decode() for entry in given if entry}
        assert "GRADD_LOG" in names and "SECRET" not in names
        own = ("GRADD_", "GOMP_", "OMP_", "DNNL_", "PATH", "LD_LIBRARY_PATH")
        assert all(name.startswith(own) for name in names), names
    finally:
        users.close()


def _serve(*words: str, uid: int = 0) -> tuple[int, str]:
    done = subprocess.run(
        [str(GRADD), "serve", *words],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        user=uid,
        env={name: text for name, text in os.environ.items() if name != "GRADD_DIR"},
    )
    return done.returncode, done.stderr


def test_what_it_needs_is_named(users: Users) -> None:
    group, place = ("--allow-group", str(GROUP)), ("--dir", str(users.directory))
    code, said = _serve(*group, *place, uid=A)
    assert code == 2 and "--allow-group needs root: the daemon of each user" in said
    assert _serve(*group) == (
        2,
        "gradd: UNSUPPORTED: --allow-group needs --dir, as --dir /run/gradd\n",
    )
    code, said = _serve("--allow-group", "no such group", *place)
    assert code == 2 and "there is no group 'no such group'" in said
    code, said = _serve(*group, "--dir", "run")
    assert code == 1 and "needs an absolute path" in said
    assert _serve(*group, *place) == (4, f"gradd: already running pid {users.process.pid}\n")

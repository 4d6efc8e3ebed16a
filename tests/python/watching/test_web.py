"""`gradd web`: metrics, health, and the page, in a real browser without a network."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import matplotlib.image
import pytest
from conftest import Daemon

import gradd
from gradd import ORTModule, about, optim
from gradd.session import control
from helpers import ROOT
from helpers.nets import Net, batch, loss_of
from helpers.waiting import until

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
SAMPLE = re.compile(r'^gradd_(\w+)\{device="\w+",daemon="([\w-]+)"(?:,\w+="(\w+)")?\} (\S+)$')


@contextlib.contextmanager
def _web(directory: Path, *words: str) -> Iterator[str]:
    """The address at which it serves."""
    command = [os.environ["GRADD_BIN"], "web", "--dir", str(directory), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server.stdout.readline().strip()
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def _samples(text: str) -> dict[tuple[str, str], float]:
    """By name and last label; every line is one, or about one that follows."""
    found: dict[tuple[str, str], float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP gradd_\w+ \S.*|TYPE gradd_\w+ (gauge|counter))", line)
            continue
        name, daemon, label, value = SAMPLE.fullmatch(line).groups()  # type: ignore[union-attr]
        if daemon == "main":
            assert (name, label or "") not in found
            found[name, label or ""] = float(value)
    return found


@contextlib.contextmanager
def _training(name: str) -> Iterator[None]:
    """A kept session that has trained."""
    model = ORTModule(Net())
    optimizer = optim.FusedAdam(model.parameters())
    kept = gradd.keep(name, model, optimizer, keep_alive=0)
    for step in range(3):
        loss_of(model(*batch(5, step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    yield
    assert kept.steps == 3
    gradd.forget(name)


def test_metrics_agree_with_ps(daemon: Daemon) -> None:
    about.note_fallback()
    with _training("net"), _web(daemon.directory) as url:
        assert _get(url + "healthz") == (200, "ok\n")
        code, text = _get(url + "metrics")
        status = json.loads(_get(url + "status.json")[1])
        (row,) = [row for row in status["daemons"] if row["name"] == "main"]
        (session,) = row["sessions"]
        found = _samples(text)
        assert code == 200 and found["up", ""] == 1 and found["sessions", "idle"] == 1
        for kind, size in session["segment_kinds"].items():
            assert found["memory_bytes", kind] == size
        assert found["memory_bytes", "parameters"] > 0
        verbs = {total["v"]: total for total in row["verbs"]}
        for phase, verb in (("forward", "forward"), ("optimizer", "step")):
            assert found["requests_total", phase] == verbs[verb]["n"] >= 3
            assert found["step_seconds_total", phase] == verbs[verb]["ran_us"] / 1e6 > 0
        assert found["fallbacks", ""] == session["fallbacks"]
        assert found["kept_sessions", "1"] == 1 and row["kept"][0]["name"] == "net"
        daemon.kill_worker()
        until(lambda: _samples(_get(url + "metrics")[1])["worker_restarts_total", ""] == 1,
              "the restart is not counted")  # fmt: skip


def test_without_a_daemon(tmp_path: Path) -> None:
    with _web(tmp_path / "new") as url:
        assert _get(url + "healthz") == (503, "no daemon runs\n")
        assert json.loads(_get(url + "status.json")[1]) == {"daemons": []}
        assert "gradd_up{" not in _get(url + "metrics")[1]


def test_labels_are_bounded(daemon: Daemon) -> None:
    """No name, process or number of a session: a scraper's memory would grow with each."""
    with _training("net"), _web(daemon.directory) as url:
        before = set(_samples(_get(url + "metrics")[1]))
        with contextlib.closing(control.Connection(daemon.directory)) as other:
            other.attach()
            assert set(_samples(_get(url + "metrics")[1])) == before


def test_the_token_and_the_headers(daemon: Daemon) -> None:
    with _web(daemon.directory) as url:
        port, token = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([0-9a-f]{32})/", url).groups()
        root = f"http://127.0.0.1:{port}/"
        wrong = token[:-1] + ("0" if token[-1] != "0" else "1")
        for path in ("", "metrics", f"{wrong}/", f"{wrong}/metrics", token, f"/{token}/metrics"):
            code, text = _get(root + path)
            assert code == 404 and "no token" in text
        assert _get(url + "nothing")[0] == 404 and _get(url + "page.html")[0] == 404
        assert _get(f"{url}../{token}/metrics")[0] == 404
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", f"/{token}/metrics", body="x" * 100)
            assert connection.getresponse().status == 405
        with urllib.request.urlopen(url, timeout=60) as reply:
            assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
            assert reply.headers["Referrer-Policy"] == "no-referrer"
            assert reply.headers["Cache-Control"] == "no-store"
        kept = daemon.directory / "web.token"
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600 and kept.read_text() == token
    with _web(daemon.directory, "--port", port) as again:
        assert again == url


def test_a_unix_socket(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "web.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with _web(daemon.directory, "--socket", str(path)) as address:
        assert address == f"unix:{path}" and stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            sock.sendall(b"GET /metrics HTTP/1.0\r\nHost: x\r\n\r\n")
            with sock.makefile("rb") as file:
                reply = file.read().decode()
        assert reply.startswith("HTTP/1.0 200") or reply.startswith("HTTP/1.1 200")
        assert 'gradd_up{device="' in reply
        second = subprocess.run(
            [os.environ["GRADD_BIN"], "web", "--socket", str(path)], capture_output=True, text=True
        )
        assert second.returncode == 1 and "Address already in use" in second.stderr
    assert not path.exists()
    path.write_text("kept")
    third = subprocess.run(
        [os.environ["GRADD_BIN"], "web", "--socket", str(path)], capture_output=True, text=True
    )
    assert third.returncode == 1 and path.read_text() == "kept"


def test_the_page_needs_no_other_host() -> None:
    for path in sorted((ROOT / "server" / "web").glob("page.*")):
        assert not re.search(r"//\w|@import|url\(", path.read_text()), path


@pytest.mark.nightly
@pytest.mark.skipif(not BROWSER, reason="there is no chromium")
def test_the_page_in_a_browser(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "<img_src=x_onerror=boom>.ipynb")
    with _training("<b>net</b>"), _web(daemon.directory) as url:
        until(lambda: daemon.ps()["sessions"][0]["model"] == "Net", "the model is not said")
        dom = _browse(url, tmp_path, "--dump-dom")
        assert "1 daemon, 1 session" in dom and "asking the daemons" not in dom
        assert "<td>&lt;img_src=x_onerror=boom&gt;.ipynb</td>" in dom and "<img" not in dom
        assert "<td>&lt;b&gt;net&lt;/b&gt;</td>" in dom
        assert "<td>Net</td>" in dom and "Memory by holder" in dom and "waits: nothing" in dom
        assert re.search(r'<span title="[^"]*MiB" style="width: [\d.]+%;', dom)
        subprocess.run([os.environ["GRADD_BIN"], "drain", "--why", "<i>paint</i>"], check=True)
        assert "drained: &lt;i&gt;paint&lt;/i&gt;" in _browse(url, tmp_path, "--dump-dom")
        subprocess.run([os.environ["GRADD_BIN"], "drain", "--end"], check=True)
        bright = _shot(url, tmp_path)
        dark = _shot(url, tmp_path, "--blink-settings=preferredColorScheme=0")
        assert bright[:, :, :3].mean() > 0.8 > 0.3 > dark[:, :, :3].mean()
        for picture in (bright, dark):
            assert picture[:, :, :3].std() > 0.02  # something is on it


def _browse(url: str, folder: Path, *words: str) -> str:
    command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", *words]
    command += [f"--user-data-dir={folder / 'browser'}", "--window-size=1100,900"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    command += ["--virtual-time-budget=3000", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _shot(url: str, folder: Path, *words: str) -> object:
    path = folder / "page.png"
    _browse(url, folder, f"--screenshot={path}", *words)
    return matplotlib.image.imread(path)

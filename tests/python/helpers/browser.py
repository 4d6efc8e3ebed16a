"""A headless Chromium, by its DevTools protocol over two pipes; and a server of files for it."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from helpers.waiting import until

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
TIMEOUT = 60  # seconds, of the browser's end; bounds a hang


class Page:
    """One tab."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, os.fdopen(read, "rb")
        self._last, self._session = 0, ""
        self.requests: list[str] = []  # addresses that the tab and its workers asked for
        self.problems: list[str] = []  # of its console, and exceptions
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        attached = self.do("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.do(f"{domain}.enable")
        # Workers are attached before they run, so that their requests are seen.
        self.do("Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=True, flatten=True)

    def do(self, method: str, *, session: str | None = None, **params: object) -> dict:
        """A command, and its result."""
        number = self._send(method, session, params)
        while True:
            message = self._receive()
            if message.get("id") == number:
                assert "error" not in message, (method, message)
                return message["result"]

    def run(self, script: str) -> object:
        """The value of an expression of JavaScript, awaited."""
        done = self.do("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, condition: str) -> None:
        """Waits for a condition in JavaScript, which may be of a page that is loading."""

        def holds() -> bool:
            done = self.do("Runtime.evaluate", expression=condition, returnByValue=True)
            return bool(done["result"].get("value"))

        until(holds, condition)

    def open(self, url: str) -> None:
        """Goes to an address, until it has loaded."""
        self.do("Page.navigate", url=url)
        self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def drag(self, points: list[tuple[float, float]]) -> None:
        """Moves the mouse over points of the window, with its button down."""
        for i, (x, y) in enumerate([points[0], *points, points[-1]]):
            last = i == len(points) + 1
            kind = "mousePressed" if i == 0 else "mouseReleased" if last else "mouseMoved"
            held = {"button": "left", "buttons": 0 if last else 1, "clickCount": 1}
            self.do("Input.dispatchMouseEvent", type=kind, x=x, y=y, **held)

    def _send(self, method: str, session: str | None, params: dict) -> int:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if session or self._session:
            message["sessionId"] = session or self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return self._last

    def _receive(self) -> dict:
        text = bytearray()
        while (byte := self._read.read(1)) != b"\0":
            assert byte, "the browser has ended"
            text += byte
        message = json.loads(text)
        params = message.get("params", {})
        method = message.get("method")
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(json.dumps(params["entry"]))
        elif method == "Target.attachedToTarget" and params["waitingForDebugger"]:
            self._send("Network.enable", params["sessionId"], {})
            self._send("Runtime.runIfWaitingForDebugger", params["sessionId"], {})
        return message


@contextlib.contextmanager
def browse(folder: Path, *words: str) -> Iterator[Page]:
    """A browser that keeps what pages keep in a folder, and finds no host but this one."""
    command_read, command_write = os.pipe()
    reply_read, reply_write = os.pipe()
    command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu"]
    command += ["--remote-debugging-pipe", "--no-first-run", "--disable-background-networking"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    command += [f"--user-data-dir={folder / 'browser'}", *words]
    # The protocol is on descriptors 3 and 4.
    script = f'exec "$@" 3<&{command_read} 4>&{reply_write}'
    with (
        (folder / "browser.log").open("ab") as log,
        subprocess.Popen(
            ["bash", "-c", script, "browser", *command],
            pass_fds=(command_read, reply_write),
            stdout=log,
            stderr=log,
        ) as process,
    ):
        os.close(command_read)
        os.close(reply_write)
        try:
            page = Page(command_write, reply_read)
            yield page
            page.do("Browser.close")
            process.wait(TIMEOUT)
        finally:
            process.kill()


class _Files(http.server.SimpleHTTPRequestHandler):
    def __init__(self, *arguments: object, posted: list[bytes], **more: object) -> None:
        self._posted = posted
        super().__init__(*arguments, **more)

    def do_POST(self) -> None:
        """Keeps what comes."""
        self._posted.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextlib.contextmanager
def serve(folder: Path, posted: list[bytes] | None = None) -> Iterator[str]:
    """The address at which the files of a folder are; what is posted anywhere goes to a list."""
    kept = [] if posted is None else posted
    handler = functools.partial(_Files, directory=str(folder), posted=kept)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()

"""Sessions that come and go by the thousand: the daemon must hold afterwards what it held before.

    .venv/bin/python benchmarks/soak.py [--only cycles,kills,garbage,sessions] [--scale 1]

A daemon of its own and four parts, one line each: *cycles* of a session (attach, share memory, load
a graph, plan, forward, backward, step of the optimizer, detach); *kills* of clients whose forked
worker lives on and has all their descriptors; *garbage*, connections to both sockets that say
something senseless or nothing; *sessions*, 64 of eight processes that train side by side for ten
minutes. `--scale` makes each shorter or longer. Each part is run a little first, so that caches are
full; then descriptors, mappings and memory (PSS) of the owner and of the worker are read before and
after it. Every step must have the bits of the first one. Ends with status 1 if descriptors or
mappings have grown, if memory has by more than 4 MiB, if a killed client's session was there for
more than a second, or if a bit differs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in ("tests/python", "adapters/python"):
    sys.path.insert(0, str(HERE.parent / folder))

import msgpack  # noqa: E402

from helpers.hostile.raw_client import DROP, Raw  # noqa: E402

CYCLES, KILLS, GARBAGE, SESSIONS = 20_000, 2_000, 50_000, 64
PROCESSES, SECONDS = 8, 600
WARM = 200  # of each kind, before the first reading
MEMORY_KIB = 4096
GONE_S = 1.0
SETTLE_S = 10.0


class Held:
    """What the two processes of the daemon hold, while it has one session."""

    def __init__(self, watch: Raw, pid: int) -> None:
        self.watch = watch
        self.pids = (pid, watch.call({"v": "ps", "t": DROP})["worker"])

    def sessions(self) -> list[dict[str, Any]]:
        """What `gradd ps` says."""
        return self.watch.call({"v": "ps", "t": DROP})["sessions"]

    def wait_alone(self, seconds: float) -> float:
        """Until the watching session is the only one; how many seconds that took."""
        start = time.monotonic()
        while len(self.sessions()) > 1:
            if time.monotonic() - start > seconds:
                raise RuntimeError(f"{len(self.sessions())} sessions after {seconds:.0f} s")
            time.sleep(0.001)
        return time.monotonic() - start

    def read(self) -> list[int]:
        """Descriptors, mappings and KiB of the owner, then of the worker."""
        numbers: list[int] = []
        for pid in self.pids:
            proc = Path(f"/proc/{pid}")
            pss = next(
                line for line in (proc / "smaps_rollup").read_text().splitlines()
                if line.startswith("Pss:")
            )  # fmt: skip
            maps = len((proc / "maps").read_text().splitlines())
            numbers += [len(list((proc / "fd").iterdir())), maps, int(pss.split()[1])]
        return numbers

    def settled(self, before: list[int]) -> list[int]:
        """A reading, once it is no larger than `before` or some seconds have passed."""
        deadline = time.monotonic() + SETTLE_S
        while grown(before, now := self.read()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return now


def grown(before: list[int], now: list[int]) -> bool:
    """Whether something has grown by more than it may."""
    may = (0, 0, MEMORY_KIB) * 2
    return any(b > a + m for a, b, m in zip(before, now, may, strict=True))


# ---- the parts ----


def train(s: Raw) -> bytes:
    """One step of a session whose values are new; the bytes of all results."""
    bits = s.step()
    reply = s.ask("step")
    assert reply["ok"], reply
    return bits


def cycles(path: Path, _held: Held, count: int) -> str:
    """Sessions one after the other."""
    expected = None
    for _ in range(count):
        with Raw(path).open() as s:
            bits = train(s)
            assert s.ask("detach")["ok"]
        if expected is not None and bits != expected:
            raise RuntimeError("other bits than in the first cycle")
        expected = bits
    return ""


def kills(path: Path, held: Held, count: int) -> str:
    """Clients that are killed, one after the other, beside a forked worker of theirs."""
    slowest = 0.0
    command = [sys.executable, __file__, "--clients", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as nursery:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        for _ in range(count):
            nursery.stdin.write(b"\n")
            nursery.stdin.flush()
            client, worker = map(int, nursery.stdout.readline().split())
            os.kill(client, signal.SIGKILL)
            slowest = max(slowest, held.wait_alone(SETTLE_S))
            os.kill(worker, signal.SIGKILL)
        nursery.stdin.close()
    if slowest > GONE_S:
        raise RuntimeError(f"a killed client's session was there for {slowest:.2f} s")
    return f"gone after {slowest * 1000:.0f} ms at most"


def be_clients(path: Path) -> None:
    """Forks a client for each line of the input, and says its pid and that of its own child."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for _ in sys.stdin:
        if os.fork() == 0:
            s = Raw(path).open()
            train(s)
            if (worker := os.fork()) == 0:
                signal.pause()  # with all descriptors of its parent
            print(os.getpid(), worker, flush=True)
            while True:
                s.step()


WORDS: tuple[Callable[[], bytes], ...] = (
    lambda: b"",
    lambda: b"GET / HTTP/1.1\r\n\r\n",
    lambda: b"\xff" + bytes(8) + b"\x7f\x03" + bytes(53),  # a greeting of ZMTP, and no more
    lambda: msgpack.packb({"v": "attach", "nonce": b"0" * 16}),
    lambda: random.randbytes(random.randrange(1, 4096)),
)


def garbage(path: Path, held: Held, count: int) -> str:
    """Connections that say something senseless; some hang up at once, some stay for a while."""
    kinds = {"ctl.sock": socket.SOCK_SEQPACKET, "cmd.sock": socket.SOCK_STREAM}
    waiting: list[socket.socket] = []
    refused = 0
    expected = held.watch.step()
    for i in range(count):
        name, kind = random.choice([*kinds.items()])
        sock = socket.socket(socket.AF_UNIX, kind)
        sock.setblocking(False)
        waiting.append(sock)
        try:
            sock.connect(str(path / name))
            sock.send(random.choice(WORDS)())
        except OSError:
            refused += 1
        while len(waiting) > 20:
            waiting.pop(random.randrange(len(waiting))).close()
        if i % 100 == 0 and held.watch.step() != expected:
            raise RuntimeError("other bits beside garbage")
    for sock in waiting:
        sock.close()
    return f"{refused} not taken, or hung up on"


def sessions(path: Path, _held: Held, seconds: int) -> str:
    """Processes with several sessions each, all at work until the time is over."""
    command = [sys.executable, __file__, "--train", str(path), str(seconds)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(PROCESSES)]
    said = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise RuntimeError("a process that trains has failed")
    return f"{sum(map(int, said))} steps"


def be_sessions(path: Path, seconds: int) -> None:
    """The sessions of one process."""
    with contextlib.ExitStack() as stack:
        mine = [stack.enter_context(Raw(path).open()) for _ in range(SESSIONS // PROCESSES)]
        expected = mine[0].step()
        deadline, steps = time.monotonic() + seconds, 0
        while time.monotonic() < deadline:
            for s in mine:
                if s.step() != expected:
                    raise SystemExit("other bits than alone")
                steps += 1
    print(steps)


PARTS: dict[str, tuple[Callable[[Path, Held, int], str], int, int]] = {
    "cycles": (cycles, CYCLES, WARM),
    "kills": (kills, KILLS, WARM // 4),
    "garbage": (garbage, GARBAGE, 10 * WARM),
    "sessions": (sessions, SECONDS, 5),
}


# ---- the run ----


def run(name: str, path: Path, held: Held, scale: float) -> bool:
    """One part, and its line; whether all was as before."""
    part, count, warm = PARTS[name]
    count = max(1, round(count * scale))
    part(path, held, warm)
    held.wait_alone(SETTLE_S)
    before, start = held.read(), time.monotonic()
    more = part(path, held, count)
    took = time.monotonic() - start
    held.wait_alone(SETTLE_S)
    now = held.settled(before)
    holds = not grown(before, now)
    labels = [
        f"{process} {what}" for process in ("owner", "worker") for what in ("fds", "maps", "KiB")
    ]
    changes = "  ".join(
        f"{label} {a} -> {b}" for label, a, b in zip(labels, before, now, strict=True)
    )
    print(f"{name:9} {count:6} in {took:4.0f} s  {changes}  {more}", flush=True)
    return holds


def main() -> int:
    """Runs the parts."""
    if sys.argv[1:2] == ["--clients"]:
        be_clients(Path(sys.argv[2]))
        return 0
    if sys.argv[1:2] == ["--train"]:
        be_sessions(Path(sys.argv[2]), int(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--scale", type=float, default=1)
    args = parser.parse_args()
    path = Path(tempfile.mkdtemp(prefix="gradd-soak-"))
    os.environ["GRADD_DIR"] = str(path)
    from gradd.session import daemon

    daemon.connect(path).close()
    owner = int((path / "lock").read_text())
    try:
        with Raw(path).open() as watch:
            held = Held(watch, owner)
            held.wait_alone(SETTLE_S)  # what started the daemon is gone
            failed = [n for n in args.only.split(",") if not run(n, path, held, args.scale)]
            return 1 if failed else 0
    finally:
        with contextlib.suppress(OSError):
            os.kill(owner, signal.SIGTERM)
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())

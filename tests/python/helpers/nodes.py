"""Two nodes on one machine: network namespaces with an address each, and a daemon for each.

Making them takes root and the command `ip` (Debian's iproute2).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from conftest import BINARY

_LINK = "link0"  # the name of the connection, within a node
_PREFIX = "10.213.7."
PORT = 29411  # free: nothing else is in the namespaces


@dataclass(frozen=True)
class Node:
    """One of them.

    Attributes:
        namespace: Its name.
        address: For the other.
        directory: Of its daemon.
    """

    namespace: str
    address: str
    directory: Path

    def command(self, *words: str) -> list[str]:
        """Runs a command there."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def environment(self) -> dict[str, str]:
        """Variables of processes there."""
        return {"GRADD_DIR": str(self.directory), "GLOO_SOCKET_IFNAME": _LINK}


def why_not() -> str:
    """Why there can be none; "" if there can be."""
    if shutil.which("ip") is None:
        return "needs the command ip (apt-get install iproute2)"
    probe = f"gradd-{os.getpid()}-probe"
    if os.geteuid() or _ip("netns", "add", probe, check=False):
        return "needs the right to make network namespaces (root)"
    _ip("netns", "del", probe)
    return ""


def _ip(*words: str, check: bool = True) -> int:
    return subprocess.run(["ip", *words], check=check, capture_output=True).returncode


@contextlib.contextmanager
def two(folder: Path) -> Iterator[list[Node]]:
    """Two nodes that reach each other; what runs there ends with the context.

    Args:
        folder: For the directories of their daemons.
    """
    nodes = [
        Node(f"gradd-{os.getpid()}-{i}", f"{_PREFIX}{i + 1}", folder / f"node{i}") for i in range(2)
    ]
    try:
        for node in nodes:
            _ip("netns", "add", node.namespace)
        first, second = (node.namespace for node in nodes)
        ends = ("netns", first, "type", "veth", "peer", "name", _LINK, "netns", second)
        _ip("link", "add", _LINK, *ends)
        for node in nodes:
            node.directory.mkdir(mode=0o700)
            inside = ("-n", node.namespace)
            _ip(*inside, "addr", "add", f"{node.address}/24", "dev", _LINK)
            for link in (_LINK, "lo"):
                _ip(*inside, "link", "set", link, "up")
        yield nodes
        for node in nodes:
            # Ray has ended it with the worker that had started it.
            subprocess.run([str(BINARY), "stop", "--dir", str(node.directory)], check=False)
    finally:
        for node in nodes:
            _end(node)


def _end(node: Node) -> None:
    listed = subprocess.run(
        ["ip", "netns", "pids", node.namespace], capture_output=True, text=True, check=False
    )
    for pid in map(int, listed.stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _ip("netns", "del", node.namespace, check=False)


def run(
    nodes: Sequence[Node], commands: Sequence[Sequence[str]], environment: dict[str, str]
) -> None:
    """Runs a command on each node at once; all must end with 0.

    Args:
        nodes: Where.
        commands: One for each.
        environment: Of all, beside that of the node.
    """
    started = [
        subprocess.Popen(
            node.command(*command),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment, **node.environment()},
        )
        for node, command in zip(nodes, commands, strict=True)
    ]
    errors = [process.communicate(timeout=240)[1] for process in started]
    for process, text in zip(started, errors, strict=True):
        assert process.returncode == 0, text[-3000:]

"""Explains a daemon of another version: the text of the error, and the command that helps.

`hello` settles the protocol. The side that refuses names its protocols and its version; a daemon of
protocol 1 does so in a sentence only. The verb `ps` has the same form in every version, so it
supplies the missing facts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradd import __version__, errors, options
from gradd.session import daemon, protocol


def mismatch(path: Path, reply: dict[str, Any], ask: Callable[[Path], str]) -> errors.VersionError:
    """The error for an answer to hello that refuses our protocol, or chooses another one.

    Args:
        path: Directory of the daemon.
        reply: Its answer.
        ask: The version of a daemon that does not say it there.
    """
    spoken = reply.get("proto")
    spoken = [spoken, spoken] if isinstance(spoken, int) else spoken
    known = isinstance(spoken, list) and len(spoken) == 2 and all(type(n) is int for n in spoken)
    version = reply.get("version") or ask(path) or "of an unknown version"
    theirs = f"gradd {version}, speaks {_range(*spoken) if known else 'an older protocol'}"
    newer = known and spoken[0] > protocol.PROTOCOL[1]
    what = (
        f"the daemon in {path}, {theirs}, this side, gradd {__version__}, "
        f"{_range(*protocol.PROTOCOL)}: {_help(path, str(version), newer)}"
    )
    if not known and reply.get("what"):
        what += f" (the daemon: {reply['what']})"
    return errors.VersionError(what)


def _range(low: int, high: int) -> str:
    return f"protocol {low}" if low == high else f"protocols {low} to {high}"


def _help(path: Path, version: str, newer: bool) -> str:
    """The command that brings both sides together."""
    try:
        binary = daemon.find_binary()
    except errors.SessionError:
        binary = "gradd"
    stop = f"`{binary} stop --dir {path}` ends the daemon when its requests are done"
    if options.get("GRADD_AUTOSTART"):
        stop += ", and the next call starts this version's"
    else:
        stop += f"; then run `{binary} serve --dir {path}`"
    if not newer:
        return f"the daemon is the older one. {stop}"
    return (
        f"this side is the older one. `pip install gradd=={version}` brings it up to date. Or "
        f"{stop}; another directory in GRADD_DIR is for both versions side by side"
    )

"""Warnings about a daemon that is not the one that this client would have started."""

from __future__ import annotations

import logging

from gradd import options
from gradd.session import daemon
from gradd.session.control import Connection

logger = logging.getLogger("gradd")


def warn_of_old_build(connection: Connection) -> None:
    """A daemon outlives a rebuild: repairs made since it started are not in effect in it."""
    ours = daemon.build_id()
    if ours and connection.build != ours:
        binary = daemon.find_binary()
        logger.warning(
            "daemon %d is another build than %s: changes since its start have no effect in it. "
            "`%s stop` ends it after the request in progress; trainers continue with a new daemon",
            connection.daemon_pid,
            binary,
            binary,
        )


def warn_of_other_device(connection: Connection) -> None:
    """Which device serves was settled when the daemon started, maybe by another trainer."""
    wanted = options.get("GRADD_DEVICE")
    if connection.missed:
        logger.warning(
            "the daemon computes on the CPU, because its device cannot be used: %s; see "
            "`gradd doctor`",
            connection.missed,
        )
    if not wanted or wanted == connection.device or connection.missed.startswith(f"{wanted}: "):
        return
    logger.warning(
        "GRADD_DEVICE=%s, but the daemon in %s computes on %s; `gradd stop` ends it",
        wanted,
        connection.path,
        connection.device,
    )

"""What the client does when its connection is lost: on to the next worker, or to the next daemon.

The owner of a daemon gives the next worker what it holds of the client: identity, segments, turns.
The connection stays then, and only `attach` and the ledger are repeated. Otherwise the client
connects once more, and passes everything itself.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from gradd import errors
from gradd.session.control import ConnectionLost, SessionLost

if TYPE_CHECKING:
    from gradd.session.client import Client
    from gradd.session.control import Connection

logger = logging.getLogger("gradd")

_RETRIES = 5
_TOLD_MS = 5000  # for the owner to say what has become of a session that its worker does not know


def lose(client: Client, lost: ConnectionLost, verb: str, failures: int) -> Connection | None:
    """Takes note of a lost connection: the same one if it leads to the next worker, else None.

    Raises:
        SessionError: It has happened again and again.
    """
    connection = client.release_connection()
    if connection is not None and (
        failures > _RETRIES or not connection.move(_TOLD_MS if isinstance(lost, SessionLost) else 0)
    ):
        connection.close()
        connection = None
    if failures > _RETRIES:
        raise errors.SessionError(
            f"the daemon was lost {failures} times in a request ({verb}): {lost}; see "
            f"{client.path}/daemon.log",
            "lost",
        ) from None
    client.recoveries += 1
    logger.warning(
        "connection to daemon %d lost (%s); parameters are safe in shared memory; try %d/%d",
        client.daemon_pid,
        str(lost),  # not the exception: a kept log record would keep all its frames
        failures,
        _RETRIES,
    )
    time.sleep(0.05 * (failures - 1))
    return connection

"""A file on a FUSE file system that stops answering: opening or closing it blocks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_LOOKUP, _FORGET, _GETATTR, _OPEN, _INIT, _RELEASE = 1, 2, 3, 14, 26, 18
_DIRECTORY, _FILE = 0o040755, 0o100666
_DETACH = 2


def _attributes(node: int) -> bytes:
    mode = _DIRECTORY if node == 1 else _FILE
    owner = (os.getuid(), os.getgid())
    return struct.pack("<6Q10I", node, 4096, 8, 0, 0, 0, 0, 0, 0, mode, 1, *owner, 0, 4096, 0)


class StuckFile:
    """Mounts a file system with one file on a folder and opens it; ends as a context manager.

    Raises:
        OSError: This process may not mount.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = os.fsencode(folder)
        self._device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        if _LIBC.mount(b"gradd-test", self._folder, b"fuse", 0, options.encode()) != 0:
            os.close(self._device)
            raise OSError(ctypes.get_errno(), "cannot mount a FUSE file system")
        self._answers = True
        threading.Thread(target=self._serve, daemon=True).start()
        self.fd = os.open(folder / "file", os.O_RDWR)
        self._answers = False

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, 1 << 18)
            except OSError:
                return
            _, operation, unique, node = struct.unpack_from("<IIQQ", request)
            reply = self._reply(operation, node) if self._answers else None
            if reply is not None:
                os.write(self._device, struct.pack("<IiQ", 16 + len(reply), 0, unique) + reply)

    @staticmethod
    def _reply(operation: int, node: int) -> bytes | None:
        if operation == _INIT:
            return struct.pack("<4I2H2I", 7, 31, 4096, 0, 8, 8, 4096, 1) + bytes(36)
        if operation == _LOOKUP:
            return struct.pack("<4Q2I", 2, 1, 0, 0, 0, 0) + _attributes(2)
        if operation == _GETATTR:
            return struct.pack("<Q2I", 0, 0, 0) + _attributes(node)
        if operation == _OPEN:
            return struct.pack("<Q2I", 1, 0, 0)
        return None if operation == _FORGET else b""

    def __enter__(self) -> StuckFile:
        return self

    def __exit__(self, *error: object) -> None:
        # Without its process the file system fails what waits for it.
        _LIBC.umount2(self._folder, _DETACH)
        os.close(self._device)
        with contextlib.suppress(OSError):
            os.close(self.fd)

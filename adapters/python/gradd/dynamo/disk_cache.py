"""Captures on disk: what was translated once need not be translated by the next process.

A file for each capture, and for each graph that has no translation, with the reason. It is named by
its key and by everything that translates: the sources of this
package, and the versions of torch, onnx, onnx-ir and onnxscript. It holds plain data (msgpack) and
a digest of that and of its own name; a file that is not exactly of this form, or has the name of
another one, is ignored. The folder is the user's alone, or nothing is read from it. GRADD_CACHE=0
turns it off; ORTMODULE_CACHE_DIR names another folder than `gradd/graphs` in $XDG_CACHE_HOME or
~/.cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import re
import stat
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import msgpack

from gradd import options
from gradd.spec import Capture, CaptureError, InputSpec, OutputSpec

logger = logging.getLogger("gradd")

_TRANSLATORS = ("torch", "onnx", "onnx-ir", "onnxscript")
_MOST_BYTES, _MOST_FILES = 512 << 20, 4096
# Names, which `gradd cache` knows as well (server/cli/cache.c); the latter is being written.
_NEW = "new-"
_OURS = re.compile(rf"[0-9a-f]{{64}}|{_NEW}.*")
_DIGEST = hashlib.sha256().digest_size


def folder() -> Path | None:
    """Where captures are kept; None = nowhere."""
    if not options.get("GRADD_CACHE"):
        return None
    named = options.get("ORTMODULE_CACHE_DIR")
    if named:
        return Path(str(named)).absolute()
    home = os.environ.get("XDG_CACHE_HOME") or ""
    if not home.startswith("/"):
        home = str(Path("~/.cache").expanduser())
    return Path(home) / "gradd" / "graphs" if home.startswith("/") else None


def load(key: bytes) -> Capture | CaptureError | None:
    """The capture under a key, or why there can be none; None = it has not been tried."""
    path = _path(key)
    if path is None:
        return None
    try:
        data = path.read_bytes()
        if _digest(path, data[_DIGEST:]) != data[:_DIGEST]:
            raise ValueError("its digest is wrong")
        made = _from_plain(msgpack.unpackb(data[_DIGEST:], strict_map_key=False))
        os.utime(path)  # the oldest go first
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.info("the cached graph %s is ignored: %s", path, error)
        return None
    return made


def store(key: bytes, capture: Capture | CaptureError) -> None:
    """Keeps a capture, or a refusal. Where that fails, a folder that the user has named is warned
    of, once.
    """
    path = _path(key, create=True)
    if path is None:
        if folder() is not None:
            _unused("it cannot be made, belongs to another user, or others may write there")
        return
    data = msgpack.packb(_as_plain(capture))
    try:
        handle, name = tempfile.mkstemp(prefix=_NEW, dir=path.parent)  # with mode 0600
        try:
            with open(handle, "wb") as file:
                file.write(_digest(path, data) + data)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        _drop_oldest(path.parent)
    except OSError as error:
        _unused(str(error))


@functools.cache
def _unused(why: str) -> None:
    named = options.get("ORTMODULE_CACHE_DIR")
    level = logging.WARNING if named else logging.INFO
    logger.log(level, "translated graphs are not kept in %s: %s", folder(), why)


def _digest(path: Path, data: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + data).digest()


def _path(key: bytes, create: bool = False) -> Path | None:
    parent = folder()
    if parent is None or not _is_ours(parent, create):
        return None
    return parent / hashlib.sha256(_translators() + key).hexdigest()


def _is_ours(parent: Path, create: bool) -> bool:
    """Whether no other user can write there."""
    with contextlib.suppress(OSError):
        if create:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = parent.stat()
        return info.st_uid == os.geteuid() and not stat.S_IMODE(info.st_mode) & 0o022
    return False


@functools.cache
def _translators() -> bytes:
    """A digest of all that decides how a graph is translated, but for the graph."""
    digest = hashlib.sha256(repr(sys.version_info[:2]).encode())
    package = Path(__file__).parents[1]
    for source in sorted(package.rglob("*.py")):
        digest.update(source.read_bytes())
    for name in _TRANSLATORS:
        digest.update(f"{name} {metadata.version(name)}\n".encode())
    return digest.digest()


def _drop_oldest(parent: Path) -> None:
    """Keeps the folder within its limits; files of other names are not ours."""
    with os.scandir(parent) as entries:
        own = [e for e in entries if _OURS.fullmatch(e.name)]
        found = sorted((e.stat().st_mtime, e.stat().st_size, e.path) for e in own)
    bytes_, files = sum(size for _, size, _ in found), len(found)
    for _, size, path in found:
        if bytes_ <= _MOST_BYTES and files <= _MOST_FILES:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)
        bytes_, files = bytes_ - size, files - 1


def _as_plain(capture: Capture | CaptureError) -> dict[str, Any]:
    if isinstance(capture, CaptureError):
        return {"refused": [capture.reason, capture.message]}
    depends = {leaf: sorted(leaves) for leaf, leaves in capture.depends.items()}
    return dataclasses.asdict(dataclasses.replace(capture, depends=depends))  # type: ignore


def _from_plain(plain: dict[str, Any]) -> Capture | CaptureError:
    if "refused" in plain:
        return CaptureError(*plain["refused"])
    lists = {name: tuple(plain[name]) for name in ("params", "buffers")}
    known = {
        "inputs": tuple(InputSpec(**fields) for fields in plain["inputs"]),
        "outputs": tuple(OutputSpec(**fields) for fields in plain["outputs"]),
        "depends": {leaf: frozenset(leaves) for leaf, leaves in plain["depends"].items()},
        "sources": tuple((name, place) for name, place in plain["sources"]),
    }
    return Capture(**plain | lists | known)

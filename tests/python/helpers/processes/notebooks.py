"""Runs the tutorial of two notebooks in real kernels; prints what each part shows, as JSON.

Usage: notebooks.py FOLDER. A process of its own: Jupyter's client keeps sockets and a loop.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
from jupyter_core.utils import run_sync

from helpers.waiting import until


def ps() -> dict:
    """What `gradd ps` says."""
    return json.loads(subprocess.check_output([os.environ["GRADD_BIN"], "ps", "--json"]))


class Kernel:
    """A notebook's kernel, with a process of its own."""

    def __init__(self, path: Path) -> None:
        self.cells = nbformat.read(path, as_version=4)
        self._client = nbclient.NotebookClient(
            self.cells, timeout=200, resources={"metadata": {"path": str(path.parent)}}
        )
        self._client.create_kernel_manager()
        env = os.environ | {"JPY_SESSION_NAME": str(path)}
        self._client.start_new_kernel(env=env)
        self._client.start_new_kernel_client()

    def run(self, first: int, last: int | None = None) -> str:
        """What some cells show as text; an error in one is raised."""
        shown = []
        for i, cell in list(enumerate(self.cells.cells))[first:last]:
            self._client.execute_cell(cell, i)
            for output in cell.get("outputs", ()):
                data = output.get("data", {})
                shown += [output.get("text", ""), data.get("text/plain", "")]
                shown.append(data.get("text/html", ""))
        return "\n".join(shown)

    def restart(self) -> None:
        """As a click on Restart does: SIGKILL, if it does not end at once."""
        run_sync(self._client.km.restart_kernel)(now=True)
        run_sync(self._client.kc.wait_for_ready)(timeout=60)

    def end(self) -> None:
        self._client._cleanup_kernel()


def main(folder: Path) -> None:
    """The tutorial, as its first cell says."""
    kernels = [first := Kernel(folder / "first.ipynb")]
    try:
        tags = [cell.metadata.get("tags", []) for cell in first.cells.cells]
        at = tags.index(["restart"])
        shown = [first.run(0, at)]
        first.restart()
        until(lambda: not ps()["kept"][0]["in_use"], "it stays in use")
        kernels.append(second := Kernel(folder / "second.ipynb"))
        shown += [second.run(0), first.run(at)]
        print(json.dumps({"shown": shown, "sessions": ps()["sessions"]}))
    finally:
        for kernel in kernels:
            kernel.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

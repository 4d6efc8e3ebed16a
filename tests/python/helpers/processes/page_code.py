"""Runs the steps of a page (pages.py) in the current folder, and prints a line of JSON for each.

Called with the page's path; the steps are in steps.json. The first that fails ends it, with 1.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def captured() -> Iterator[Callable[[], str]]:
    """Whatever this process and its children write meanwhile goes to a file; yields its reader."""
    with tempfile.TemporaryFile() as file:
        kept = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield lambda: os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace")
        finally:
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
                os.close(old)


def run(page: str, step: dict[str, Any], namespace: dict[str, Any]) -> None:
    """One step. Python lies in a file that TorchDynamo can read, with the page's line numbers."""
    if step["kind"] == "file":
        Path(step["name"]).write_text(step["text"])
    elif step["kind"] == "shell":
        subprocess.run(step["text"], shell=True, check=True)
    else:
        text = "\n" * (step["line"] - 1) + step["text"]
        file = Path(f"{Path(page).stem}-{step['line']}.py").absolute()
        file.write_text(text)
        exec(compile(text, str(file), "exec"), namespace)


def main() -> int:
    """Runs all steps."""
    page = sys.argv[1]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job of the background
    sys.path.insert(0, os.getcwd())
    # One of the page's own, so that classes have a module that can be imported.
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for step in json.loads(Path("steps.json").read_text()):
        failed = False
        with captured() as output:
            try:
                run(page, step, vars(module))
            except BaseException:
                traceback.print_exc()
                failed = True
            sys.stdout.flush()
            text = output()
        if failed:
            print(f"{page}:{step['line']} fails:\n{text}")
            return 1
        print(json.dumps(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())

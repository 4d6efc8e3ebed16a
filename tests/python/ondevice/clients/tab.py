"""A client's round, as client.c says it, by a tab of Chromium: tab.py WEB FILES DATA RATE."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from helpers.browser import browse, serve


def main(web: Path, files: Path, data: Path, rate: float) -> None:
    """Prints how many examples, and the mean loss, when the update is written."""
    posted: list[bytes] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        shutil.copytree(files, root)
        shutil.copytree(data, root, dirs_exist_ok=True)
        for file in (web / "gradd.js", web / "gradd.wasm", Path(__file__).parent / "client.mjs"):
            shutil.copy(file, root)
        (root / "index.html").write_text("<!doctype html><title>a client</title>")
        with serve(root, posted) as url, browse(Path(folder)) as page:
            page.open(url + "index.html")
            examples, loss = page.run(f"import('/client.mjs').then((c) => c.round({rate}))")
            agent = page.run("navigator.userAgent")
            assert "HeadlessChrome" in agent, agent
            strangers = [a for a in page.requests if not a.startswith((url, f"blob:{url}"))]
            assert not strangers, strangers  # data go nowhere else
    (update,) = posted
    (data / "update.f32").write_bytes(update)
    print(examples, loss)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), float(sys.argv[4]))

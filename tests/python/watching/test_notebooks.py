"""`%load_ext gradd`, and the tutorial of two notebooks, with a restart of a kernel in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import PYTHONPATH, TESTS, Daemon
from IPython.core.interactiveshell import InteractiveShell

import gradd
from gradd import ORTModule, errors, notebook, optim
from gradd.session import client
from helpers import ROOT
from helpers.nets import Net, batch, loss_of
from helpers.waiting import until


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    made = InteractiveShell.instance(history_manager=None)
    made.run_line_magic("load_ext", "gradd")
    yield made
    made.reset()
    InteractiveShell.clear_instance()


def _magic(shell: InteractiveShell, line: str) -> Any:
    return shell.run_line_magic("gradd", line)


def test_the_magic_shows_sessions_and_takes_one_over(
    daemon: Daemon, shell: InteractiveShell
) -> None:
    model = ORTModule(Net())
    optimizer = optim.FusedAdam(model.parameters())
    kept = gradd.keep("net<1>", model, optimizer)
    for step in range(3):
        loss_of(model(*batch(5, step))).backward()
        kept.note(step=step)
        optimizer.step()
        optimizer.zero_grad()
    until(lambda: _magic(shell, "show")["model"] == "Net", "the model is not said")
    shown = _magic(shell, "show")
    assert shown["pid"] == os.getpid() and shown["plan_list"]
    assert "<th" in shown._repr_html_() and "Net, " in repr(shown)
    listed = _magic(shell, "ps")
    assert [s["pid"] for s in listed] == [os.getpid()] and listed.kept[0]["name"] == "net<1>"
    assert "kept: net&lt;1&gt;" in listed._repr_html_() and "kept: net<1>" in repr(listed)
    assert "(this one)" in repr(listed).splitlines()[1]
    html = kept._repr_html_()
    assert "net&lt;1&gt;" in html and ">Net<" in html and ">600 s<" in html
    client.close_all()
    until(lambda: not daemon.ps()["kept"][0]["in_use"], "it stays in use")
    other = ORTModule(Net(seed=1))
    shell.user_ns |= {"other": other, "adam": optim.FusedAdam(other.parameters())}
    again = _magic(shell, "reattach net<1> other adam")
    assert (again.steps, again.notes) == (3, {"step": 2})
    gradd.forget("net<1>")


def test_what_the_magic_refuses(daemon: Daemon, shell: InteractiveShell) -> None:
    for line in ("", "pss", "ps more", "show a b", "reattach net", "reattach a b c d"):
        with pytest.raises(ValueError, match="usage: %gradd ps"):
            notebook.run(line, {})
    with pytest.raises(NameError, match="there is no variable 'model'"):
        notebook.run("reattach net model", {})
    with pytest.raises(errors.SessionError, match="there is no session 'other.py'"):
        notebook.run("show other.py", {})
    assert len(_magic(shell, "ps")) == 0
    with pytest.raises(errors.SessionError, match="there is no session 'net'"):
        notebook.run("reattach net model", {"model": Net()})
    client.close_all()
    daemon.stop()
    assert len(_magic(shell, "ps")) == 0 and repr(_magic(shell, "ps")).startswith("session")


@pytest.mark.nightly
def test_the_tutorial(daemon: Daemon) -> None:
    path = os.pathsep.join(filter(None, (PYTHONPATH, os.environ.get("PYTHONPATH"))))
    runner = TESTS / "helpers" / "processes" / "notebooks.py"
    done = subprocess.run(
        [sys.executable, str(runner), str(ROOT / "samples" / "notebooks")],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    before, other, after = found["shown"]
    assert "kept session" in before and "Sequential" in before
    assert "kept: first" in other and "is kept: take it over by gradd.reattach()" in other
    assert "second.ipynb" in other
    assert "20 {'step': 20, 'loss': " in after and "True 40" in after
    assert {s["client"] for s in found["sessions"]} == {"first.ipynb", "second.ipynb"}
    until(lambda: not daemon.ps()["sessions"], "a kernel's session stays")

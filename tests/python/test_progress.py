"""What a person sees of compiling, and at the end of a run."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios

import pytest

pytestmark = pytest.mark.usefixtures("daemon")

MODELS = """
import sys, torch
from torch import nn
from gradd import ORTModule, progress
progress._SOON = 0.0

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x):
        return self.layer(x).square().mean()

class Gated(Whole):
    def forward(self, x):
        return super().forward(torch.linalg.det(x[..., None, None]))
"""
TRAIN = """
from tqdm import tqdm
model = ORTModule(Whole())
for _ in tqdm(range(3)):
    model(torch.ones(2, 4)).backward()
"""
PLANS = """
import gradd
batch = (torch.ones(2, 4),)
found = gradd.estimate(Whole(), batch, batches=[2, 4, 8])
print("sizes", [e.batch for e in found])
gradd.estimate(Whole(), batch)
ORTModule(Whole()).gradd_explain(*batch)
"""
PARTS = """
models = [ORTModule(Gated()) for _ in range(2)]
for model in models:
    model(torch.ones(2, 4)).backward()
whole, unused = ORTModule(Whole()), ORTModule(nn.Sequential(nn.Linear(2, 2)))
whole(torch.ones(2, 4)).backward()
unused.module[0](torch.ones(2, 2))
"""
PAST = """
net = Whole()
model = ORTModule(net)
model(torch.ones(2, 4)).backward()
optimizer = torch.optim.SGD(model.parameters())
optimizer.step()
other = torch.optim.SGD(nn.Linear(2, 2).parameters())
for _ in range(3):
    net(torch.ones(2, 4)).backward()
    optimizer.step()
    other.step()
"""


def _environ(quiet: bool = False) -> dict[str, str]:
    return os.environ | {"GRADD_SELF_CHECK": "0", "GRADD_QUIET": str(int(quiet))}


def _on_a_terminal(program: str, quiet: bool = False) -> str:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=theirs, stderr=theirs, env=_environ(quiet)
    ) as process:
        os.close(theirs)
        text = b""
        try:
            while part := os.read(ours, 4096):
                text += part
        except OSError:  # the end of a terminal
            pass
    os.close(ours)
    assert process.returncode == 0, text.decode()
    return text.decode()


def _piped(program: str) -> str:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=_environ())
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_terminal_shows_what_compiles_and_what_is_planned() -> None:
    text = _on_a_terminal(MODELS + TRAIN + PLANS)
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[A-Z0-9]*", "", text))
    assert lines.count("gradd: compiling Whole, in its first call ...") == 1
    assert sum(bool(re.fullmatch(r"gradd: Whole: done after \d+\.\d s", x)) for x in lines) >= 1
    assert "100%" in text
    assert "sizes [2, 4, 8]" in text
    parts = re.findall(r"gradd: memory of Whole: [^\r\n]*?(\d)/3 \[[^\r\n]*(batch \d)\]", text)
    assert ("0", "batch 2") in parts
    assert set(parts) <= {("0", "batch 2"), ("1", "batch 4"), ("2", "batch 8")}
    assert "gradd: compiling Whole, to estimate its memory ..." in text
    assert "gradd: compiling Whole, to explain a call ..." in text


@pytest.mark.nightly
def test_a_user_may_want_no_word_of_it() -> None:
    text = _on_a_terminal(MODELS + TRAIN + PLANS + PARTS, quiet=True)
    assert not re.search("compiling|memory of|done after|never called|calls,", text)


def test_a_pipe_gets_only_what_ran_in_torch() -> None:
    """And the steps past a wrapper."""
    text = _piped(MODELS + TRAIN + PARTS + PAST)
    assert "compiling" not in text
    summary = [x for x in text.splitlines() if re.match(r"\w+(: \d+ calls?,| was wrapped)", x)]
    assert summary == [
        "Whole: 5 calls, 5 graphs run in the daemon; 3 steps of an optimizer without a call of it "
        "before: if they trained it, that ran in PyTorch",
        "Gated: 2 calls, 2 graphs run in the daemon; in PyTorch: unsupported 2 (docs/messages.md)",
        "Sequential was wrapped, but never called: what the script called of it ran in PyTorch",
    ]

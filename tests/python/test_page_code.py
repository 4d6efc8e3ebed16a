"""The code of README.md and of the tutorials runs, and prints what the pages show.

Every block of Python and every command runs, in the order of the page, in one process per page and
against the daemon that the page starts. What a block shows as text, or below a command with a
prompt, is compared with its output. The lists below are the exceptions; each entry must be in use.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers import ROOT
from helpers.pages import Step, blocks, check, run, steps
from helpers.selection import one_in

PAGES = ("README.md", "docs/tutorial-trainer.md", "docs/tutorial-notebooks.md")


class Left(NamedTuple):
    """A command that does not run here.

    Attributes:
        why: It does not.
        instead: A command in the root of the repository that shows that it could.
    """

    why: str
    instead: str


NOT_RUN = {
    "git clone <this repository> && cd gradd": Left("this is one", "test -f Makefile"),
    "make demo": Left("minutes; trainer/test_demo.py", "make -o .venv/gradd-setup.mk -n demo"),
    "pip install dist/*.whl": Left(
        "changes the environment; trainer/test_wheel.py", "make -o .venv/gradd-setup.mk -n wheel"
    ),
    "gradd demo": Left(
        "minutes; trainer/test_wheel.py", "grep -q demo adapters/python/gradd_command.py"
    ),
}
# Text that no block prints, by its first line.
PICTURES = (
    " your script (Python)                                gradd (C)",
    "  step   plain Trainer   ORTTrainer   difference",
)


class Around(NamedTuple):
    """What a fragment needs in front of it, and what shows behind it that it has worked."""

    before: str
    after: str


# By the first line of a block.
FRAGMENTS = {
    "self.net = ORTModule(net)                    # in a LightningModule": Around(
        """
import torch
from gradd import ORTModule
class Model(torch.nn.Sequential): "Has its part by number and by name."
self, net, model = torch.nn.Module(), torch.nn.Linear(2, 2), Model(torch.nn.Module())
model.model, model[0].model = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
""",
        """
for part in (self.net, model.model, model[0].model):
    part(torch.ones(1, 2)).sum().backward()
    assert part.gradd_stats()["forwards"] and not part.gradd_stats()["fallbacks"]
""",
    ),
    "trainer = optimum.gradd.accelerate(SFTTrainer(model, args, train_dataset=rows))": Around(
        """
import optimum.gradd, tempfile, torch
from transformers import Trainer as SFTTrainer, TrainingArguments
class Squares(torch.nn.Linear):
    def forward(self, x, labels): return {"loss": (super().forward(x) - labels).square().mean()}
model, rows = Squares(2, 1), [{"x": [1.0, 2.0], "labels": [1.0]}] * 8
args = TrainingArguments(tempfile.mkdtemp(), max_steps=1, use_cpu=True, save_strategy="no")
""",
        """
trainer.train()
assert trainer.gradd_stats()["forwards"] and not trainer.gradd_stats()["fallbacks"]
""",
    ),
    "print(gradd.estimate(model, batch))              "
    "# possible budgets, and the time each costs": Around(
        """
import gradd, torch
from gradd import ORTModule
from optimum.gradd import ORTTrainingArguments
model, batch = torch.nn.Linear(2, 2), (torch.ones(1, 2),)
""",
        """
model(*batch).sum().backward()
assert model.gradd_stats()["forwards"] and args.memory_budget == "2GiB"
""",
    ),
    "from torch_ort import ORTModule, DebugOptions, LogLevel, set_seed": Around(
        "", "import gradd\nassert ORTModule is gradd.ORTModule"
    ),
}


def _first(step: Step) -> str:
    return step.text.partition("\n")[0]


def _runs(step: Step) -> list[Step]:
    """What runs of a step here: nothing, the step, or the step with what is around it."""
    if step.kind == "shell" and step.text in NOT_RUN:
        return []
    around = FRAGMENTS.get(_first(step), Around("", ""))
    parts = (around.before, step.text, around.after)
    return [
        replace(step, text=text, shown=step.shown * (text is step.text)) for text in parts if text
    ]


@pytest.fixture
def folder() -> Iterator[Path]:
    """One whose path is short enough for sockets."""
    made = Path(tempfile.mkdtemp(prefix="gradd-page-"))
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize("name", one_in(2, PAGES, PAGES[:1]))
def test_the_code_of_a_page_runs_and_prints_what_it_shows(name: str, folder: Path) -> None:
    page = ROOT / name
    made = [part for step in steps(page, PICTURES) for part in _runs(step)]
    check(page, made, run(page, made, folder))


def test_no_exception_is_stale() -> None:
    found = [step for name in PAGES for step in steps(ROOT / name, PICTURES)]
    commands = {step.text for step in found if step.kind == "shell"}
    texts = {block.first for name in PAGES for block in blocks(ROOT / name, "text")}
    assert set(NOT_RUN) <= commands
    assert set(FRAGMENTS) <= {_first(step) for step in found if step.kind == "python"}
    assert set(PICTURES) <= texts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("```python\nprint(1, 2)\n```\n```text\n1 3\n```\n", "page.md:2 shows\n    1 3\n"),
        ("```\n$ echo 1; echo 2\n2\n1\n```\n", "page.md:2 shows\n    1\n"),
        ("```sh\nfalse\n```\n", "page.md:2 fails"),
        ("```python\n\nx = 1\nx.y\n```\n", 'page-2.py", line 4, in <module>'),
        ("```ruby\nputs 1\n```\n", "page.md:2: no way to run 'ruby'"),
        ("```text\n1\n```\n", "page.md:2: output of nothing"),
    ],
)
def test_a_wrong_page_is_found(text: str, says: str, folder: Path) -> None:
    page = folder / "page.md"
    page.write_text(text)
    with pytest.raises(AssertionError) as error:
        made = steps(page)
        check(page, made, run(page, made, folder))
    assert says in str(error.value)


@pytest.mark.parametrize("command", NOT_RUN)
def test_what_does_not_run_is_there(command: str) -> None:
    subprocess.run(NOT_RUN[command].instead, shell=True, check=True, cwd=ROOT)

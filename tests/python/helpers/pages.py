"""The code of a page: its fenced blocks, what runs of them, and what they print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from helpers import BUILD, ROOT

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w.]+\.\w+): ")  # a block that begins so is a file


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: As the page says; "" is a shell's.
        text: Without the fences.
        line: Where the text begins in the page, from 1.
    """

    language: str
    text: str
    line: int

    @property
    def first(self) -> str:
        """The first line."""
        return self.text.partition("\n")[0].rstrip()


@dataclass
class Step:
    """A part of a page that runs in one piece.

    Attributes:
        kind: "python", "shell" or "file".
        text: What runs, or the content of the file.
        line: Of the page.
        name: Of the file.
        shown: Lines of output as the page shows them; "..." stands for anything.
    """

    kind: str
    text: str
    line: int
    name: str
    shown: list[str]


def blocks(page: Path, *languages: str) -> list[Block]:
    """The fenced blocks of a page, of some languages or of all."""
    text = page.read_text(encoding="utf-8")
    found = FENCED.finditer(text)
    all_of_them = [Block(m[1], m[2], text.count("\n", 0, m.start(2)) + 1) for m in found]
    return [b for b in all_of_them if not languages or b.language in languages]


def steps(page: Path, pictures: Sequence[str] = ()) -> list[Step]:
    """What runs of a page, in order.

    Args:
        page: Its file.
        pictures: First lines of text blocks that are no output.
    """
    made: list[Step] = []
    for block in blocks(page):
        if block.language == "text":
            if block.first not in pictures:
                assert made, f"{page.name}:{block.line}: output of nothing"
                made[-1].shown += block.text.splitlines()
        else:
            made += _of_code(page, block)
    return made


def _of_code(page: Path, block: Block) -> Iterator[Step]:
    """The steps of a block: a shell's has one for each command."""
    if block.language in ("", "sh"):
        yield from _commands(block)
    elif named := FILE.match(block.text):
        yield Step("file", block.text, block.line, named[1], [])
    elif block.language == "python":
        yield Step("python", block.text, block.line, "", [])
    elif block.language == "diff":  # both sides can run
        yield Step("python", re.sub(r"^[-+ ]", "", block.text, flags=re.M), block.line, "", [])
    else:
        raise AssertionError(f"{page.name}:{block.line}: no way to run '{block.language}'")


def _commands(block: Block) -> Iterator[Step]:
    """Every line is a command; where some have a prompt, the others are output."""
    step = None
    prompts = re.search(r"^\$ ", block.text, re.MULTILINE)
    for number, line in enumerate(block.text.splitlines(), block.line):
        if prompts and not line.startswith("$ "):
            assert step, f"line {number}: output of nothing"
            step.shown.append(line)
            continue
        if step:
            yield step
        command = re.sub(r"\s+# .*", "", line.removeprefix("$ "))
        step = Step("shell", command, number, "", [])
    if step:
        yield step


def missing(shown: Sequence[str], output: str) -> str:
    """The first shown line that the output does not have behind those before it, or "".

    Spaces count as one; "..." stands for anything.
    """
    printed = iter([" ".join(line.split()) for line in output.splitlines()])
    for line in shown:
        parts = " ".join(line.split()).split("...")
        pattern = re.compile(".*".join(map(re.escape, parts)).replace(r"\ .*", "(?: .*)?"))
        if line.strip() != "..." and not any(pattern.fullmatch(text) for text in printed):
            return line
    return ""


def environment(folder: Path, build: Path = BUILD, tree: Path = ROOT) -> dict[str, str]:
    """A reader's: this tree's adapters, its build, a daemon in `folder`, and no other option."""
    ours = ("GRADD_", "ORTMODULE_")
    env = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
    paths = [str(tree / "adapters" / name) for name in ("python", "optimum")]
    env |= {"PYTHONPATH": os.pathsep.join(paths), "GRADD_BIN": str(build / "bin/gradd")}
    return env | {"GRADD_DIR": str(folder / "run")}


def run(page: Path, made: Sequence[Step], folder: Path) -> list[str]:
    """Runs steps in a folder that looks like a built clone; returns what each has printed.

    Python runs in one process with one namespace, which is alive while commands run.

    Args:
        page: Its file, for tracebacks.
        made: The steps.
        folder: Where they run; its path is short enough for sockets.

    Raises:
        AssertionError: A step fails, with the output of all.
    """
    for name, there in {"build": BUILD, ".venv": Path(sys.prefix)}.items():
        (folder / name).symlink_to(there)
    (folder / "steps.json").write_text(json.dumps([asdict(step) for step in made]))
    child = [sys.executable, str(Path(__file__).parent / "processes" / "page_code.py"), str(page)]
    env = environment(folder) | {"OMP_NUM_THREADS": "1"}  # there is a worker for each core
    try:
        done = subprocess.run(child, cwd=folder, env=env, capture_output=True, text=True)
    finally:
        subprocess.run([env["GRADD_BIN"], "stop"], env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(page: Path, made: Sequence[Step], outputs: Sequence[str]) -> None:
    """Fails where a page shows what was not printed."""
    for step, output in zip(made, outputs, strict=True):
        line = missing(step.shown, output)
        where = f"{page.name}:{step.line}"
        assert not line, f"{where} shows\n    {line}\nand this was printed:\n{output}"

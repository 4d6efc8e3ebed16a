"""Fails when a source file or a function has grown out of the house limits.

Files: at most 800 lines, opened by a comment that states the purpose; makefiles: at most 100
columns. Functions in C and Python: at most 100 lines and 6 parameters; in Python those behind a
bare `*` are named and not counted. An inner loop that a macro or template header makes for each
element type takes its addresses and strides one by one, up to 10. Folders: at most 40 files of
their own; a folder of operators at most 20, a new family then opens a folder of its kind. The C
side relies on the house format (a function starts in column 0 and ends with a brace in column 0),
which `make lint` enforces. Run by `make check` and `make test`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [
    "shm",
    "platform",
    "kernels",
    "server",
    "train",
    "adapters",
    "tests",
    "benchmarks",
    "tools",
]
SUFFIXES = {".c", ".h", ".cu", ".cuh", ".py", ".sh"}
MAX_FILE = 800
MAX_FUNCTION = 100
MAX_COLUMNS = 100  # of makefiles; formatters see to the others
MAX_FOLDER = 40
MAX_OPERATORS = 20  # families of one kind
MAX_PARAMETERS = 6
MAX_MADE_PARAMETERS = 10  # of functions that a macro or template makes for each element type
KEYWORDS = {"if", "for", "while", "switch"}
BODY = re.compile(r"\s*\{")
# Where others have said what the parameters are.
GIVEN = {
    "adapters/python/gradd/graph/translation/": "translations take what torch's operator takes",
    "adapters/python/gradd/legacy/": "classes of onnxruntime.training",
    "adapters/python/gradd/train/": "functions of onnxruntime.training",
    "adapters/python/gradd/optim.py:__init__": "FusedAdam of onnxruntime.training.optim",
    "train/java/": "functions that Java calls, after two parameters of its own",
    "tests/sim/nccl/library.c:ncclAllReduce": "a function of NCCL",
    "server/web/web.c:handle": "a callback of libmicrohttpd",
}


def source_files() -> list[Path]:
    """Every hand-written source file of the repository, sorted."""
    found = [p for d in FOLDERS for p in (ROOT / d).rglob("*") if p.suffix in SUFFIXES]
    return sorted(p for p in found if "__pycache__" not in p.parts)


def c_functions(lines: list[str]) -> list[tuple[str, int, int]]:
    """Name, first line and length of each function body in formatted C."""
    out: list[tuple[str, int, int]] = []
    start = None  # first line of the declaration at hand
    head = ""  # its text up to the opening brace
    for number, line in enumerate(lines, 1):
        if start is None:
            macro = re.fullmatch(r"[A-Z0-9_]+\(.*\)\s*(/\*.*\*/)?", line)  # needs no semicolon
            if re.match(r"[A-Za-z_]", line) and not macro:
                start, head = number, ""
            else:
                continue
        if "{" not in head:
            head += line
            if "{" not in head and line.rstrip().endswith(";"):
                start = None
                continue
        if line.startswith("}"):
            name = re.search(r"(\w+)\s*\(", head.split("{")[0])
            if name and "=" not in head.split("{")[0]:
                out.append((name.group(1), start, number - start + 1))
            start = None
    return out


def c_parameters(text: str) -> list[tuple[str, int, int]]:
    """Name, line and number of parameters of each function body, also of those in macros."""
    blank = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\\\n'
    text = re.sub(blank, lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.DOTALL)
    out: list[tuple[str, int, int]] = []
    for m in re.finditer(r"[\w*)]\s*[\s*](NAME\(\w+\)|[\w#]+)\(", text):
        depth, end, commas = 1, m.end(), 0
        while depth and end < len(text):
            depth += (text[end] == "(") - (text[end] == ")")
            commas += depth == 1 and text[end] == ","
            end += 1
        if m[1] not in KEYWORDS and BODY.match(text, end) and not is_call(text, m.start(1)):
            words = text[m.end() : end - 1].strip()
            count = 0 if words in {"", "void"} else commas + 1
            out.append((m[1], text.count("\n", 0, m.start(1)) + 1, count))
    return out


def is_call(text: str, start: int) -> bool:
    """Whether the name that starts there follows a word that no declaration has before it."""
    before = re.search(r"\w*$", text[max(0, start - 80) : start].rstrip(" *\n"))
    return before is not None and before[0] in {"return", "else", "do", "case", "sizeof"}


PyFunction = ast.FunctionDef | ast.AsyncFunctionDef


def py_nodes(text: str) -> list[PyFunction]:
    """Every function of a Python file."""
    return [n for n in ast.walk(ast.parse(text)) if isinstance(n, PyFunction)]


def py_parameters(functions: list[PyFunction]) -> list[tuple[str, int, int]]:
    """Name, line and number of parameters of each function: none of `self`, *args as one."""
    out = []
    for n in functions:
        a = n.args
        names = [x.arg for x in a.posonlyargs + a.args]
        count = len(names) - (names[:1] in (["self"], ["cls"]))
        count += (a.vararg is not None) + (a.kwarg is not None)
        if a.vararg:
            count += len(a.kwonlyargs)
        out.append((n.name, n.lineno, count))
    return out


def py_functions(functions: list[PyFunction]) -> list[tuple[str, int, int]]:
    """Name, first line and length of each function in a Python file."""
    return [(n.name, n.lineno, (n.end_lineno or n.lineno) - n.lineno + 1) for n in functions]


def problems(path: Path) -> list[str]:
    """What is wrong with one file, as lines to print."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    name = path.relative_to(ROOT)
    out = []
    if len(lines) > MAX_FILE:
        out.append(f"{name}: {len(lines)} lines, the limit is {MAX_FILE}")
    if lines and not re.match(r'/\*|//|#|r?"""', lines[0]):
        out.append(f"{name}: does not open with a comment that says what it is for")
    nodes = py_nodes(text) if path.suffix == ".py" else []
    functions, counted = py_functions(nodes), py_parameters(nodes)
    if path.suffix in {".c", ".h", ".cu", ".cuh"}:
        functions, counted = c_functions(lines), c_parameters(text)
    for function, line, length in functions:
        if length > MAX_FUNCTION:
            out.append(f"{name}:{line}: {function}() has {length} lines, limit {MAX_FUNCTION}")
    for function, line, count in counted:
        made = "#" in function or function.startswith("NAME(")
        limit = MAX_MADE_PARAMETERS if made else MAX_PARAMETERS
        if count > limit and not f"{name}:{function}".startswith(tuple(GIVEN)):
            out.append(f"{name}:{line}: {function}() has {count} parameters, limit {limit}")
    return out


def wide_makefiles(files: list[str]) -> list[str]:
    """Lines of makefiles that are too long, as lines to print."""
    return [
        f"{name}:{number}: {len(line)} columns, the limit is {MAX_COLUMNS}"
        for name in files
        if name == "Makefile" or name.endswith(".mk")
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > MAX_COLUMNS
    ]


def tracked_files() -> list[str]:
    """What git holds, from the root; nothing where this is no checkout."""
    command = ["git", "ls-files", "-z", "--cached"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


def crowded_folders(files: list[str]) -> list[str]:
    """Folders with more files of their own than one looks through, as lines to print."""
    counts = Counter(str(Path(name).parent) for name in files)
    return [
        f"{folder}: {count} files, the limit is {limit}: give those of a kind a folder"
        for folder, count in sorted(counts.items())
        if count > (limit := MAX_OPERATORS if folder.startswith("kernels/ops") else MAX_FOLDER)
    ]


def main() -> int:
    """Prints every problem; returns the exit status."""
    files = source_files()
    found = [line for path in files for line in problems(path)]
    found += crowded_folders(tracked_files()) + wide_makefiles(tracked_files())
    print("\n".join(found) if found else f"sizes: {len(files)} files within the limits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""Questions about a state of the process, of Python or of torch, that has no place to watch.

Each has a number or truth as its answer, and two changes: the second makes it another one, the
first makes it what it was.
"""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import contextvars
import ctypes
import decimal
import functools
import gc
import inspect
import io
import logging
import multiprocessing
import os
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

Ask = Callable[[], Any]
# name -> the question, a change back, a change
WATCHED: dict[str, tuple[Ask, Ask, Ask]] = {}
REFUSED: dict[str, tuple[Ask, Ask, Ask]] = {}


class Thing:
    """Something that can be held weakly."""


class Abstract(abc.ABC):  # noqa: B024
    """Thing is registered with it late: see below."""


LOGGER = logging.getLogger("gradd_test_process")
HANDLER = logging.NullHandler()
EVENT = threading.Event()
LOCK = threading.Lock()
COUNTED = threading.RLock()
COUNT = threading.Semaphore(2)
THREAD = threading.current_thread()
THING = Thing()
BY_NAME: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
BY_THING: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
THINGS: weakref.WeakSet = weakref.WeakSet()
HELD: dict[str, Any] = {"dies": Thing()}
DIES = weakref.ref(HELD["dies"])
NUMBERS: dict[int, float] = {}
VIEW = NUMBERS.values()
BYTES = bytearray(b"\0")
MEMORY = memoryview(BYTES)
NUMBER = ctypes.c_int(0)
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("gradd_test", default=0)
NORMAL = torch.distributions.Normal(0.0, 1.0)
POLYNOMIAL = np.poly1d([1.0, 2.0])
FILE = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"gradd_test_{os.getpid()}")
POOL = concurrent.futures.ThreadPoolExecutor(1)
START = random.getstate(), np.random.get_state()


@functools.lru_cache
def kept(x: int) -> int:
    return x


def _closure() -> tuple[Ask, Callable[[float], None]]:
    value = 0.0

    def read() -> float:
        return value

    def write(new: float) -> None:
        nonlocal value
        value = new

    return read, write


READ, WRITE = _closure()


def _set(owner: Any, name: str, before: Any, after: Any) -> tuple[Ask, Ask]:
    return lambda: setattr(owner, name, before), lambda: setattr(owner, name, after)


def _item(owner: Any, key: Any, before: Any, after: Any) -> tuple[Ask, Ask]:
    return lambda: owner.__setitem__(key, before), lambda: owner.__setitem__(key, after)


def _call(function: Callable, before: Any, after: Any) -> tuple[Ask, Ask]:
    return lambda: function(before), lambda: function(after)


def _no_file() -> None:
    if os.path.exists(FILE):
        os.remove(FILE)


def _file() -> None:
    with open(FILE, "w") as file:
        file.write("text")


def _unlocked() -> None:
    if LOCK.locked():
        LOCK.release()


def _context() -> decimal.Context:
    return decimal.getcontext()


def _around_a_region() -> bool:
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.get_autocast_dtype("cpu") is torch.bfloat16
    return inside and torch.get_autocast_dtype("cpu") is torch.float16


def _counted_no_more() -> None:
    if COUNTED._is_owned():
        COUNTED.release()


_TYPES = _call(functools.partial(torch.set_autocast_dtype, "cpu"), torch.bfloat16, torch.float16)
_LEVELS = _call(LOGGER.setLevel, logging.WARNING, logging.DEBUG)
_ON_DISK = (_no_file, _file)
_PRECISION = (lambda: setattr(_context(), "prec", 28), lambda: setattr(_context(), "prec", 1))
_EDGE = (lambda: setattr(_context(), "prec", 28), lambda: setattr(_context(), "prec", 27))

WATCHED.update(
    {
        "a level of logging": (lambda: LOGGER.isEnabledFor(logging.INFO), *_LEVELS),
        "by keyword": (lambda: LOGGER.isEnabledFor(level=logging.INFO), *_LEVELS),
        "an effective level": (lambda: LOGGER.getEffectiveLevel() < 20, *_LEVELS),
        "logging off": (lambda: LOGGER.isEnabledFor(50), *_call(logging.disable, 0, 50)),
        "a property of logging": (
            lambda: logging.root.manager.disable,
            *_call(logging.disable, 0, 1),
        ),
        "handlers": (
            lambda: sum(handler is HANDLER for handler in LOGGER.handlers),
            lambda: LOGGER.removeHandler(HANDLER),
            lambda: LOGGER.addHandler(HANDLER),
        ),
        "an event": (lambda: EVENT.is_set(), EVENT.clear, EVENT.set),
        "a lock": (lambda: LOCK.locked(), _unlocked, LOCK.acquire),
        "a lock that counts": (lambda: COUNTED._is_owned(), _counted_no_more, COUNTED.acquire),
        "autocast's type": (lambda: torch.get_autocast_dtype("cpu") is torch.float16, *_TYPES),
        "autocast's type by keyword": (
            lambda: torch.get_autocast_dtype(device_type="cpu") is torch.float16,
            *_TYPES,
        ),
        "autocast's type elsewhere": (
            lambda: torch.get_autocast_dtype("cuda") is torch.bfloat16,
            *_call(lambda t: torch.set_autocast_dtype("cuda", t), torch.float16, torch.bfloat16),
        ),
        "autocast's type around a region": (_around_a_region, *_TYPES),
        "a semaphore": (lambda: COUNT._value, COUNT.release, COUNT.acquire),
        "the thread's name": (
            lambda: threading.current_thread().name == "other",
            *_set(THREAD, "name", THREAD.name, "other"),
        ),
        "an outside thread's name": (
            lambda: THREAD.name == "other",
            *_set(THREAD, "name", THREAD.name, "other"),
        ),
        "weak values": (
            lambda: BY_NAME.get("a") is not None,
            lambda: BY_NAME.pop("a", None),
            lambda: BY_NAME.__setitem__("a", THING),
        ),
        "weak keys": (lambda: BY_THING[THING], *_item(BY_THING, THING, 0.0, 1.0)),
        "a weak set": (
            lambda: (THING in THINGS) + len(THINGS),
            lambda: THINGS.discard(THING),
            lambda: THINGS.add(THING),
        ),
        "the limit of recursion": (
            lambda: sys.getrecursionlimit() - 1000,
            *_call(sys.setrecursionlimit, sys.getrecursionlimit(), sys.getrecursionlimit() + 1),
        ),
        "precision of decimals": (lambda: decimal.getcontext().prec, *_EDGE),
        "arithmetic of decimals": (
            lambda: float(decimal.Decimal(2) / decimal.Decimal(3)),
            *_PRECISION,
        ),
        "a method of decimals": (lambda: float(decimal.Decimal(2).sqrt()), *_PRECISION),
        "deterministic": (
            lambda: torch.backends.cudnn.deterministic,
            *_set(torch.backends.cudnn, "deterministic", False, True),
        ),
        "in an attribute of torch": (
            lambda: torch.backends.cuda.matmul.allow_tf32,
            *_set(torch.backends.cuda.matmul, "allow_tf32", False, True),
        ),
        "a private function of torch": (
            lambda: torch._C._get_cudnn_deterministic(),
            *_set(torch.backends.cudnn, "deterministic", False, True),
        ),
        "memory that is filled": (
            lambda: torch.utils.deterministic.fill_uninitialized_memory,
            *_set(torch.utils.deterministic, "fill_uninitialized_memory", True, False),
        ),
        "a property of torch's objects": (
            lambda: NORMAL.mean,
            *_set(NORMAL, "loc", torch.tensor(0.0), torch.tensor(1.0)),
        ),
        "a method of torch's objects": (
            lambda: NORMAL.log_prob(torch.tensor(1.0)),
            *_set(NORMAL, "loc", torch.tensor(0.0), torch.tensor(1.0)),
        ),
        "an object of numpy": (lambda: float(POLYNOMIAL(1.0)), *_item(POLYNOMIAL, 0, 2.0, 3.0)),
        "a number of ctypes": (lambda: NUMBER.value, *_set(NUMBER, "value", 0, 1)),
        "a cell": (lambda: READ.__closure__[0].cell_contents, *_call(WRITE, 0.0, 1.0)),
        "a view of a dictionary": (lambda: sum(VIEW), *_item(NUMBERS, 0, 0.0, 1.0)),
        "a path in the environment": (
            lambda: os.path.expandvars("$GRADD_TEST_P") == "1",
            *_item(os.environ, "GRADD_TEST_P", "0", "1"),
        ),
        "words only": (
            lambda: len(os.path.normpath(os.path.join("a", "..", "b"))),
            lambda: None,
            lambda: None,
        ),
    }
)
REFUSED.update(
    {
        "exists": (lambda: os.path.exists(FILE), *_ON_DISK),
        "isfile": (lambda: os.path.isfile(FILE), *_ON_DISK),
        "isdir": (lambda: os.path.isdir(FILE), *_ON_DISK),
        "lexists": (lambda: os.path.lexists(FILE), *_ON_DISK),
        "islink": (lambda: os.path.islink(FILE), *_ON_DISK),
        "abspath": (lambda: len(os.path.abspath("a")), *_call(os.chdir, os.getcwd(), "/")),
        "realpath": (lambda: len(os.path.realpath("a")), *_call(os.chdir, os.getcwd(), "/")),
        "a file by its class": (lambda: len(io.FileIO("/proc/self/stat").read()) > 0, *_ON_DISK),
        "a lock that may not wait": (
            lambda: LOCK.acquire(blocking=False) and (LOCK.release() or 1),
            _unlocked,
            LOCK.acquire,
        ),
        "autocast's cache": (
            lambda: torch.is_autocast_cache_enabled(),
            *_call(torch.set_autocast_cache_enabled, False, True),
        ),
        "a cache's statistics": (
            lambda: kept.cache_info().currsize,
            kept.cache_clear,
            lambda: kept(1),
        ),
        "the collector": (lambda: gc.isenabled(), gc.enable, gc.disable),
        "counts of references": (
            lambda: sys.getrefcount(THING) > 100,
            lambda: HELD.pop("many", None),
            lambda: HELD.__setitem__("many", [THING] * 200),
        ),
        "a copy of the context": (
            lambda: contextvars.copy_context().get(VARIABLE, 0),
            *_call(VARIABLE.set, 0, 1),
        ),
        "a view of memory": (lambda: MEMORY.tolist()[0], *_item(BYTES, 0, 0, 1)),
        "another process": (
            lambda: multiprocessing.current_process().name == "other",
            *_set(multiprocessing.current_process(), "name", "MainProcess", "other"),
        ),
        "the stack": (lambda: len(inspect.stack()) > 1000, lambda: None, lambda: None),
        "a caller": (
            lambda: sys._getframe().f_back.f_lineno * 0,
            lambda: None,
            lambda: None,
        ),
        "a thread": (lambda: threading.Thread(target=print).daemon, lambda: None, lambda: None),
        "a pool": (lambda: POOL.submit(len, "ab").result(), lambda: None, lambda: None),
        "errors of numpy": (
            lambda: np.geterr()["over"] == "ignore",
            lambda: np.seterr(over="warn"),
            lambda: np.seterr(over="ignore"),
        ),
        "the state of numpy's numbers": (
            lambda: int(np.random.get_state()[1][5]) % 7,
            lambda: np.random.set_state(START[1]),
            lambda: np.random.seed(3),
        ),
        "the state of Python's numbers": (
            lambda: random.getstate()[1][5] % 7,
            lambda: random.setstate(START[0]),
            lambda: random.seed(3),
        ),
        "a generator without a seed": (
            lambda: random.Random().random() * 0,
            lambda: None,
            lambda: None,
        ),
    }
)


def modes() -> tuple:
    """What a forward() may leave behind."""
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.get_deterministic_debug_mode(),
        torch.is_anomaly_enabled(),
        torch.is_warn_always_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cuda.flash_sdp_enabled(),
        torch._C._len_torch_function_stack(),
        np.geterr()["over"],
        decimal.getcontext().prec,
        LOGGER.level,
    )


def _set_all(values: tuple) -> None:
    torch.set_grad_enabled(values[0])
    torch.set_default_dtype(values[1])
    torch.set_autocast_enabled("cpu", values[2])
    torch.set_autocast_dtype("cpu", values[3])
    torch.set_autocast_cache_enabled(values[4])
    torch.set_num_threads(values[5])
    torch.set_float32_matmul_precision(values[6])
    torch.set_deterministic_debug_mode(values[7])
    torch.set_anomaly_enabled(values[8])
    torch.set_warn_always(values[9])
    torch.backends.cudnn.deterministic = values[10]
    torch.backends.cuda.matmul.allow_tf32 = values[11]
    torch.backends.cuda.enable_flash_sdp(values[12])
    while torch._C._len_torch_function_stack() > values[13]:
        torch._C._pop_torch_function_stack()
    np.seterr(over=values[14])
    decimal.getcontext().prec = values[15]
    LOGGER.setLevel(values[16])


@contextlib.contextmanager
def kept_modes() -> Iterator[None]:
    """Puts back what a forward() has set."""
    before = modes()
    try:
        yield
    finally:
        _set_all(before)


def _makes_doubles() -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    made = torch.ones(4)
    torch.set_default_dtype(torch.float32)
    return made


def _in_contexts() -> Any:
    with torch.no_grad():
        asked = 1.0 if torch.is_grad_enabled() else 2.0
        with torch.set_grad_enabled(True):
            asked *= 3.0 if torch.is_grad_enabled() else 5.0
    with (
        torch.autocast("cpu", enabled=False),
        np.errstate(over="ignore"),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        return asked


def _in_turns() -> float:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    torch.set_grad_enabled(before)
    return 2.0


# What forward() sets, by name.
SET: dict[str, Ask] = {
    "a default dtype for a while": _makes_doubles,
    "a default dtype": lambda: torch.set_default_dtype(torch.float64),
    "no gradients": lambda: torch.set_grad_enabled(False),
    "no gradients in C": lambda: torch._C._set_grad_enabled(False),
    "a context that is never left": lambda: torch.no_grad().__enter__(),
    "a function mode": lambda: torch.overrides.BaseTorchFunctionMode().__enter__(),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "the type of autocast": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "autocast's cache": lambda: torch.set_autocast_cache_enabled(False),
    "threads": lambda: torch.set_num_threads(2),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "determinism": lambda: torch.use_deterministic_algorithms(True),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "warnings": lambda: torch.set_warn_always(True),
    "an attribute of a backend": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "one below": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "a kind of attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "errors of numpy": lambda: np.seterr(over="ignore"),
    "the precision of decimals": lambda: setattr(decimal.getcontext(), "prec", 5),
    "a context of decimals": lambda: decimal.setcontext(decimal.Context(prec=5)),
    "a level": lambda: LOGGER.setLevel(logging.DEBUG),
}
LEFT: dict[str, Ask] = {"contexts": _in_contexts, "in turns": _in_turns}

"""Whose code is recorded, and which code that cannot be recorded is known to be harmless.

Python code of users and libraries is recorded alike. Of torch only the modules are: its functions
compute from their arguments and from a few flags. Of the standard library what only serves messages
is left out. A call into C shows its arguments only, so what it may read besides has to be known:
modules that are not named here are refused with their name. What answers from a state that has no
place in Python (a level of logging, a limit of the interpreter) is asked again at every call.
"""

from __future__ import annotations

import contextvars
import functools
import operator
import os
import re
import sys
import sysconfig
import types
import weakref
from types import CodeType, ModuleType, SimpleNamespace

import numpy as np
import torch

from gradd.export.guards.images import CONTAINERS, PLAIN
from gradd.export.guards.spots import ABSENT, static

_TORCH = os.path.dirname(torch.__file__) + os.sep
_NUMPY = os.path.dirname(np.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = ("site-packages" + os.sep, "dist-packages" + os.sep)
_RECORDED = tuple(
    _TORCH + os.path.join("nn", part)
    for part in (
        os.path.join("modules", ""),
        *(os.path.join("utils", n) for n in ("parametri", "spectral_norm", "weight_norm")),
        # They assign to .data of parameters.
        *(os.path.join("utils", n) for n in ("convert_parameters", "memory_format", "prune")),
        "attention",
    )
)
MODULE_FILE = _TORCH + os.path.join("nn", "modules", "module.py")
# Parts of the standard library that serve messages, types and contexts, or only pass calls on.
_QUIET = frozenset(
    {
        *("logging", "warnings", "contextlib", "typing", "abc", "inspect", "re", "zipimport"),
        *("traceback", "linecache", "tokenize", "ast", "dis", "opcode", "importlib"),
        *("unittest", "multiprocessing", "concurrent"),
    }
)
# Those of them that answer from other processes, other threads or what was called before.
_ELSEWHERE = frozenset({"unittest", "multiprocessing", "concurrent"})
_CALLERS = {
    "inspect": frozenset({"stack", "trace", "getouterframes", "getinnerframes"}),
    "typing": frozenset({"get_type_hints"}),  # evaluates text
}
# What weak containers do when something dies, whoever runs then.
_DEATHS = frozenset({"remove", "_remove", "_commit_removals", "_scrub_removals"})
_WEAK = (_STDLIB + "weakref.py", _STDLIB + "_weakrefset.py")
_MESSAGES = tuple(_STDLIB + part for part in ("logging" + os.sep, "warnings.py", "traceback.py"))
_QUIET_FROZEN = tuple(f"<frozen {name}" for name in ("importlib", "zipimport", "abc", "runpy"))
# Packages that torch's tracers compute with, below what they call of a user: recorded where code
# of the user calls them.
_QUIET_PACKAGES = tuple(os.sep + n + os.sep for n in ("sympy", "mpmath", "networkx", "triton"))
# Modules whose C functions compute from their arguments alone.
_PURE = frozenset(
    {
        *("builtins", "math", "cmath", "_operator", "itertools", "_functools", "_collections"),
        *("_abc", "_struct", "_string", "_sre", "_bisect", "_heapq", "_json"),
        *("_typing", "_codecs", "_warnings", "_statistics", "marshal"),
        *("zlib", "binascii", "_md5", "_sha1", "_sha2", "_sha256", "_sha512", "_hashlib", "_imp"),
        *("unicodedata", "_decimal", "decimal", "errno", "_ast", "_symtable"),
    }
)
# Builtins, and modules in C, that look at none of the objects in what they get.
_SHALLOW = frozenset(
    {
        *("len", "iter", "next", "enumerate", "zip", "reversed", "map", "filter", "list", "tuple"),
        *("isinstance", "issubclass", "id", "range", "any", "all", "callable", "type", "dict"),
        *("getattr", "setattr", "hasattr", "delattr", "slice", "super", "property", "object"),
    }
)
_TENSOR_MAKERS = frozenset({"tensor", "as_tensor", "asarray", "new_tensor", "new"})
_SHALLOW_MODULES = frozenset({"torch", "numpy", "itertools", "_functools", "functools"})
# Functions of inspect beside the questions is...().
_LOOKS = frozenset(
    {
        *("signature", "unwrap", "cleandoc", "getdoc", "getmro", "getmodule", "getmodulename"),
        *("getfile", "getsourcefile", "currentframe", "getfullargspec", "indentsize"),
    }
)
_IMPURE_BUILTINS = frozenset({"open", "input", "breakpoint"})
_OF_PATHS = frozenset({"_path_normpath", "_path_splitroot", "_path_splitroot_ex"})
_PURE_ELSEWHERE = {
    "posix": {"fspath", "getpid", "cpu_count"} | _OF_PATHS,
    "nt": {"fspath", "getpid", "cpu_count"} | _OF_PATHS,
    "sys": {"intern", "getsizeof", "exc_info", "_getframe"},
    "_thread": {"allocate_lock", "RLock"},
    "_weakref": {"proxy", "_remove_dead_weakref"},
    "numpy.random": {"default_rng", "SeedSequence"},
}
_OPENERS = frozenset({"FileIO", "mmap", "socket", "Thread", "Timer"})  # what is no mere value
# Functions of torch and numpy that read files or clocks.
_READERS = frozenset(
    {"load", "fromfile", "from_file", "genfromtxt", "loadtxt", "memmap", "hub", "load_library"}
)
# Classes in C whose methods read nothing but the object and the arguments, and change neither.
_VALUES = frozenset(
    {
        *("str", "bytes", "int", "float", "complex", "bool", "tuple", "frozenset", "range"),
        *("slice", "mappingproxy", "Pattern", "Match", "method", "function", "getset_descriptor"),
        *("builtin_function_or_method", "code", "cell", "property", "super"),
        *("dict_keys", "dict_values", "dict_items", "odict_keys", "odict_values", "odict_items"),
        *("NoneType", "Decimal", "Fraction", "date", "datetime", "timedelta", "timezone"),
        *("lock", "RLock", "Token", "weakref", "ReferenceType", "type"),
        *("_lru_cache_wrapper", "partial", "module", "object", "itemgetter", "attrgetter"),
        *("_abc_data", "Struct", "GenericAlias", "UnionType", "traceback", "frame", "ndarray"),
    }
)
# Classes in C whose objects hold what is put into them: compared and printed as a whole.
HOLDERS = (SimpleNamespace, BaseException)
# Those whose state is looked at by other means.
_WATCHED = (
    *(*CONTAINERS, *HOLDERS, *PLAIN, float, complex, tuple, frozenset, type, ModuleType),
    *(staticmethod, classmethod, weakref.ref, contextvars.ContextVar, operator.methodcaller),
    *(types.WrapperDescriptorType, types.MethodWrapperType, types.MethodDescriptorType),
    *(types.ClassMethodDescriptorType, types.MemberDescriptorType),
)
_strange: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
# Their methods in C read what the object is made of, whatever class a user has made of them.
IMMUTABLE = (str, bytes, int, float, complex, tuple, frozenset)
_MAKERS = frozenset({"torch", "numpy", "collections", "itertools", "functools"})
_CLOCKS = frozenset({"now", "today", "utcnow", "fromtimestamp"})
_FLAG = re.compile(r"^_?(is|are|get)_|_enabled$|_is_available$")
# Constant outside of the compiler, or part of every key, or no flag at all.
_NO_FLAG = frozenset(
    {
        *("is_tracing", "is_scripting", "is_compiling", "is_exporting", "is_dynamo_compiling"),
        *("is_torchdynamo_compiling", "is_autocast_enabled", "is_in_onnx_export"),
        *("get_rng_state", "get_default_dtype", "is_autocast_cpu_enabled", "get_device_module"),
        *("_get_tracing_state", "_is_tracing"),
    }
)
# Those that tell to which type autocast casts: the device, or None where that is an argument.
TYPES_OF_AUTOCAST = {
    **{"get_autocast_dtype": None, "get_autocast_cpu_dtype": "cpu"},
    **{"get_autocast_gpu_dtype": "cuda", "get_autocast_xla_dtype": "xla"},
    "get_autocast_ipu_dtype": "ipu",
}
# Functions that answer from a state of the process, which can be asked at every call.
_ASKED = {
    "sys": {"getrecursionlimit"},
    "_thread": {"get_ident", "get_native_id"},
    "decimal": {"getcontext"},
    "_decimal": {"getcontext"},
    "logging": {
        *("isEnabledFor", "getEffectiveLevel", "hasHandlers", "getLogger", "getChild"),
        *("getLevelName", "getLoggerClass", "getLogRecordFactory"),
    },
}
# Functions that set such a state: those of torch by their form, others by name.
_SETS = re.compile(r"^_?set_|^use_deterministic_algorithms$|^enable_\w+_sdp$")
_SETTERS = {
    "numpy": {"seterr", "seterrcall", "seterrobj", "setbufsize", "set_printoptions"},
    "decimal": {"setcontext"},
    "_decimal": {"setcontext"},
    "logging": {
        *("setLevel", "disable", "addHandler", "removeHandler", "addFilter", "removeFilter"),
        *("basicConfig", "addLevelName", "setLoggerClass", "setLogRecordFactory"),
    },
}
_OF_NUMPY = frozenset({"geterr", "geterrcall", "geterrobj", "getbufsize", "get_printoptions"})
# Parts of torch whose objects are tools of its own, and change as they are used.
_TOOLS = ("torch._", "torch.library", "torch.jit", "torch.fx", "torch.export", "torch.ops")


def is_aside(code: CodeType) -> bool:
    """True where an import or a message begins: what runs below is not recorded either."""
    name = code.co_filename
    if name.startswith("<frozen importlib"):
        return code.co_name == "_find_and_load"
    return name.startswith(_MESSAGES)


def is_recorded(code: CodeType) -> bool:
    """True if the instructions of this code are looked at."""
    name = code.co_filename
    if name.startswith("<frozen"):
        return not name.startswith(_QUIET_FROZEN)
    if name.startswith(_TORCH):
        return name.startswith(_RECORDED)
    if name in _WEAK:
        return code.co_name not in _DEATHS
    if name.startswith((_NUMPY, _OURS)):
        return False
    if is_standard_file(name):
        return name[len(_STDLIB) :].split(os.sep)[0].removesuffix(".py") not in _QUIET
    return True


def is_generated(code: CodeType, names: dict) -> bool:
    """True for functions that torch and numpy make from text."""
    if not code.co_filename.startswith("<") or code.co_filename.startswith("<frozen"):
        return False
    return str(names.get("__name__", "")).partition(".")[0] in ("torch", "numpy")


def is_library(name: str) -> bool:
    """True for files that a user does not edit."""
    if name.startswith((_STDLIB, _TORCH, "<frozen")):
        return True
    return any(part in name for part in _PACKAGES)


def is_standard(module: str) -> bool:
    """True for modules of the standard library, whose own names nobody changes."""
    return module.partition(".")[0] in sys.stdlib_module_names and module != "__main__"


def is_library_module(module: str) -> bool:
    """True for modules of the standard library, of torch and of numpy."""
    return module.partition(".")[0] in ("torch", "numpy") or is_standard(module)


@functools.lru_cache(4096)  # asked for every comparison of sizes
def is_standard_file(name: str) -> bool:
    """True for its files."""
    if name.startswith("<frozen"):
        return True
    return name.startswith(_STDLIB) and not any(part in name for part in _PACKAGES)


def is_quiet_caller(name: str) -> bool:
    """True for files whose code is recorded only where recorded code calls it."""
    return is_standard_file(name) or any(part in name for part in _QUIET_PACKAGES)


def is_torch_file(name: str) -> bool:
    """True for torch's own files."""
    return name.startswith(_TORCH)


@functools.lru_cache(4096)  # asked for every comparison of sizes
def is_of_tracer(name: str) -> bool:
    """True for files of torch, of what it traces with, and of gradd."""
    if name.startswith((_TORCH, _OURS, "<eval_with_key>")):
        return True
    return any(part in name for part in _QUIET_PACKAGES)


def is_array_code(code: CodeType) -> bool:
    """True for functions of torch and numpy, which compute from their arguments."""
    return code.co_filename.startswith((_TORCH, _NUMPY))


def is_pure(module: str, name: str) -> bool:
    """True if a C function reads nothing but its arguments (and flags of torch)."""
    root = module.partition(".")[0]
    if root in ("torch", "numpy"):
        if module.startswith("numpy.random"):
            return name in _PURE_ELSEWHERE["numpy.random"]
        return name not in _READERS and not (root == "numpy" and name in _OF_NUMPY)
    if module == "builtins":
        return name not in _IMPURE_BUILTINS
    return module in _PURE or name in _PURE_ELSEWHERE.get(module, ())


def is_of_arrays(kind: type) -> bool:
    """True for classes of torch and numpy, not for those of packages with such a name."""
    return kind.__module__.partition(".")[0] in ("torch", "numpy")


def is_value(kind: type) -> bool:
    """True if methods in C of such objects read nothing else."""
    return is_of_arrays(kind) or kind.__name__ in _VALUES and is_standard(kind.__module__)


def is_strange(kind: type) -> bool:
    """True for classes in C of which nobody here knows what their objects hold."""
    known = _strange.get(kind)
    if known is None:
        watched = issubclass(kind, _WATCHED) or is_value(kind) or kind.__module__ == "typing"
        known = _strange[kind] = not watched and static(kind, "__next__") is ABSENT
    return known


def is_pure_of_class(cls: type, name: str) -> bool:
    """True for class methods in C that only make objects."""
    root = cls.__module__.partition(".")[0]
    if name in _CLOCKS:
        return False
    return name == "__new__" or root in _PURE or root in _MAKERS


def is_maker(function: object) -> bool:
    """True for what makes a tensor of numbers in lists."""
    if isinstance(function, type):
        return function.__module__ == "torch" and function.__name__.endswith("Tensor")
    return getattr(function, "__name__", "") in _TENSOR_MAKERS


def is_shallow(module: str, name: str) -> bool:
    """True for code in C that looks at none of the objects which its arguments hold."""
    root = module.partition(".")[0]
    return root in _SHALLOW_MODULES or module == "builtins" and name in _SHALLOW


def is_quiet_look(name: str) -> bool:
    """True for functions of inspect that tell what is fixed."""
    return name.startswith(("is", "_")) or name in _LOOKS


def is_flag(module: str, name: str) -> bool:
    """True for functions of torch without arguments that tell a setting."""
    return module.startswith("torch") and bool(_FLAG.search(name)) and name not in _NO_FLAG


def is_opener(cls: type) -> bool:
    """True for classes whose objects are files and the like."""
    return cls.__name__ in _OPENERS and is_standard(cls.__module__)


def is_asked(module: str, name: str) -> bool:
    """True for functions whose answer is a state of the process."""
    return name in _ASKED.get(module.partition(".")[0], ())


def is_setter(module: str, name: str) -> bool:
    """True for functions (not methods) that set a state of the process."""
    root = module.partition(".")[0]
    return root == "torch" and bool(_SETS.search(name)) or name in _SETTERS.get(root, ())


def is_setting(owner: object, name: str) -> bool:
    """True for attributes of torch's modules and their parts that stand for a state in C."""
    kind = type(owner)
    if kind.__module__.startswith("torch.backends"):
        return True
    if kind is ModuleType or not isinstance(owner, ModuleType):
        return False
    return name not in owner.__dict__ and hasattr(type(getattr(kind, name, None)), "__set__")


def is_elsewhere(module: str, name: str) -> bool:
    """True for functions of quiet modules that answer from what nobody can watch."""
    root = module.partition(".")[0]
    return root in _ELSEWHERE or name in _CALLERS.get(root, ())


def is_whole(kind: type) -> bool:
    """True if the methods of such objects are code of torch or numpy, which is not recorded."""
    if issubclass(kind, (torch.Tensor, torch.nn.Module, np.ndarray, ModuleType, type)):
        return False
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        if root in ("torch", "numpy"):
            return not base.__module__.startswith(_TOOLS)
    return False

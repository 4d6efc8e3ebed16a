"""`optimum.onnxruntime`, with the training names of `optimum.gradd`.

If no installed package provides it (optimum-onnx does, with the inference classes), gradd serves
it; otherwise the package's module keeps all its names and gets the training names in addition.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder

from gradd_aliases.modules import SameLoader

PACKAGE = "optimum.onnxruntime"
NAMES = (
    "ORTTrainer",
    "ORTTrainingArguments",
    "ORTSeq2SeqTrainer",
    "ORTSeq2SeqTrainingArguments",
)
# Submodules that old scripts import from, and where they live now.
SUBMODULES = {
    PACKAGE + ".trainer": "optimum.gradd.trainer",
    PACKAGE + ".trainer_seq2seq": "optimum.gradd.trainer_seq2seq",
    PACKAGE + ".training_args": "optimum.gradd.training_args",
    PACKAGE + ".training_args_seq2seq": "optimum.gradd.training_args",
    PACKAGE + ".utils": "optimum.gradd.utils",
}


def _get_training_name(name):
    return getattr(import_module("optimum.gradd"), name)


def missing(name):
    """The message about a name that the served package does not have."""
    return (
        f"{PACKAGE}.{name} is not there: gradd serves the training names ({', '.join(NAMES)}); "
        "the inference classes come with the package optimum-onnx"
    )


class _EmptyPackageLoader:
    """Loads `optimum.onnxruntime` where no other package provides it."""

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        def __getattr__(name):
            if name in NAMES:
                return _get_training_name(name)
            if name.startswith("__"):
                raise AttributeError(name)
            raise AttributeError(missing(name))

        module.__doc__ = "Training names of ONNX Runtime in Optimum, served by optimum.gradd."
        module.__all__ = list(NAMES)
        module.__getattr__ = __getattr__
        module.__dir__ = lambda: sorted([*vars(module), *NAMES])


class _ExtendingLoader:
    """Runs the loader of an installed `optimum.onnxruntime`, then adds the training names."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):  # get_source, get_data, is_package, ... stay those of the package
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        # A lazy module puts an instance of its own class in place of the one that was executed.
        _teach_names(sys.modules[module.__name__])


def _teach_names(module):
    base = type(module)

    def __getattr__(self, name):
        if name in NAMES:
            return _get_training_name(name)
        inherited = getattr(base, "__getattr__", None)
        if inherited is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return inherited(self, name)

    def __dir__(self):
        return sorted({*base.__dir__(self), *NAMES})

    for name in NAMES:  # releases that still carried their own trainer: ours takes its place
        vars(module).pop(name, None)
    module.__class__ = type(
        base.__name__, (base,), {"__getattr__": __getattr__, "__dir__": __dir__}
    )


def find_spec(fullname, path, target):
    """The spec of the package or of a submodule that training scripts use.

    Raises:
        ImportError: A name that the served package does not have; see missing().
    """
    found = PathFinder.find_spec(fullname, path, target)
    if fullname == PACKAGE:
        # A namespace (loader without code) is only a folder that happens to have the name.
        if found is None or found.origin is None:
            return ModuleSpec(fullname, _EmptyPackageLoader(), is_package=True)
        found.loader = _ExtendingLoader(found.loader)
        return found
    if found is not None or not fullname.startswith(PACKAGE + "."):
        return None
    if fullname in SUBMODULES:
        return ModuleSpec(fullname, SameLoader(SUBMODULES[fullname]))
    if isinstance(sys.modules[PACKAGE].__loader__, _EmptyPackageLoader):
        raise ImportError(missing(fullname.rpartition(".")[2]), name=fullname)
    return None

"""`torch_ort` and `onnxruntime.training`: which names there are, and what to use for the others."""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec as _spec_of

_MODULE = {"ORTModule": "gradd", "DebugOptions": "gradd", "LogLevel": "gradd"}
_OPTIM = {"FusedAdam": "gradd.optim", "AdamWMode": "gradd.optim"}
_SEED = {"set_seed": "gradd_aliases.seeds"}

# Module that is served -> name in it -> the module that has it.
MODULES = {
    "torch_ort": {**_MODULE, **_SEED},
    "torch_ort.optim": _OPTIM,
    "onnxruntime": _SEED,
    "onnxruntime.training": {},
    "onnxruntime.training.ortmodule": _MODULE,
    "onnxruntime.training.optim": _OPTIM,
    "onnxruntime.training.optim.fused_adam": _OPTIM,
}
# Modules that are another one.
_SAME = {"torch_ort.configure": "gradd_aliases.configure"}

_TRAINER = "gradd.ORTModule around the module in a loop of your own, or optimum.gradd.ORTTrainer"
_ON_DEVICE = "gradd has no counterpart yet; it trains from Python with gradd.ORTModule"
_INFERENCE = "inference comes with the package onnxruntime, which gradd leaves alone"
_INSTEAD = {
    "FP16_Optimizer": "torch.amp.GradScaler with FusedAdam; torch.autocast to bfloat16 needs no "
    "scaling of the loss",
    **dict.fromkeys(("ORTTrainer", "ORTTrainerOptions", "orttrainer", "TrainStepInfo"), _TRAINER),
    **dict.fromkeys(("AdamConfig", "LambConfig", "SGDConfig"), "an optimizer of torch.optim"),
    "lr_scheduler": "a scheduler of torch.optim.lr_scheduler",
    "amp": "torch.autocast and torch.amp.GradScaler",
    **dict.fromkeys(("api", "artifacts", "onnxblock", "experimental", "utils"), _ON_DEVICE),
    **dict.fromkeys(("InferenceSession", "SessionOptions", "capi"), _INFERENCE),
    **dict.fromkeys(("ORTInferenceModule", "ORTModelForCausalLM"), _INFERENCE),
}


def missing(module, name):
    """The message about a name that is not served."""
    instead = _INSTEAD.get(name)
    names = ", ".join(MODULES.get(module, ())) or "no names of its own"
    served = f"gradd serves {names} of {module!r}"
    return f"{module}.{name}: {instead}" if instead else f"{module}.{name} is not there: {served}"


class _ServedLoader:
    """A module that has the names of MODULES; each is looked up when it is asked for."""

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        own = module.__name__
        names = MODULES[own]

        def __getattr__(name):
            if name in names:
                return getattr(import_module(names[name]), name)
            raise AttributeError(name if name.startswith("__") else missing(own, name))

        module.__doc__ = "Names of ONNX Runtime Training, served by gradd."
        module.__all__ = list(names)
        module.__getattr__ = __getattr__
        module.__dir__ = lambda: sorted({*vars(module), *names})


class SameLoader:
    """Makes a module the very object of another one, or runs it as a program (`python -m`)."""

    def __init__(self, target):
        self._target = target

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        # The import system returns what sys.modules holds after this call, so one class has one
        # identity whichever of the two names it was imported by.
        sys.modules[module.__name__] = import_module(self._target)

    def get_code(self, fullname):
        return _spec_of(self._target).loader.get_code(self._target)


def find_spec(fullname, path, target):
    """The spec of a served module; None for a name that another package has, or none.

    Raises:
        ImportError: A name that old scripts take from a served module and that is not there.
            (`from a import b` asks for a module a.b where a has no b: that is how a sentence
            reaches the user.)
    """
    parent, _, name = fullname.rpartition(".")
    if parent and parent not in MODULES:
        return None
    if PathFinder.find_spec(fullname, path, target) is not None:
        return None
    if fullname == "onnxruntime" and not _is_for_training():
        return None
    if fullname in MODULES:
        return ModuleSpec(fullname, _ServedLoader(), is_package=True)
    if fullname in _SAME:
        return ModuleSpec(fullname, SameLoader(_SAME[fullname]))
    if isinstance(getattr(sys.modules.get(parent), "__loader__", None), _ServedLoader):
        raise ImportError(missing(parent, name), name=fullname)
    return None


def _is_for_training():
    """Whether `onnxruntime` is imported as the parent of onnxruntime.training.

    Otherwise it must not seem to be installed: others look for it before they use it.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load":
            if str(frame.f_locals.get("name")).startswith("onnxruntime.training"):
                return True
        frame = frame.f_back
    return False

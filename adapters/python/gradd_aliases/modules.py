"""Old names: which there are in which module, and what to use for the others.

An installed `optimum.onnxruntime` (optimum-onnx has it, with classes for inference) keeps all of
its names and gets those of trainers in addition.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec as _spec_of

_MODULE = dict.fromkeys(("ORTModule", "DebugOptions", "LogLevel"), "gradd")
_HIERARCHICAL = {"HierarchicalORTModule": "gradd:ORTModule"}  # which parts itself what it wraps
_GRADIENT = {"register_gradient": "gradd.legacy.custom_gradients"}
_REGISTRY = {**_GRADIENT, "CustomGradientRegistry": "gradd.legacy.custom_gradients"}
_JSON = {"load_from_json": "gradd.legacy.json_config"}
_GRAPH = {"export_gradient_graph": "gradd.legacy.gradient_graph"}
_SEED = {"set_seed": "gradd_aliases.seeds"}
_FUSED = dict.fromkeys(("FusedAdam", "AdamWMode"), "gradd.optim")
_CONFIGS = dict.fromkeys(("AdamConfig", "LambConfig", "SGDConfig"), "gradd.legacy.configs")
_CONFIGS["_OptimizerConfig"] = "gradd.legacy.configs:OptimizerConfig"
_FP16 = {"FP16_Optimizer": "gradd.legacy.fp16"}
_KINDS = ("ConstantWarmup", "CosineWarmup", "LinearWarmup", "PolyWarmup")
_SCHEDULES = {f"{kind}LRScheduler": "gradd.legacy.schedules" for kind in _KINDS}
_SCHEDULES["_LRScheduler"] = "gradd.legacy.schedules:LRScheduler"
_SCALERS = dict.fromkeys(("LossScaler", "DynamicLossScaler"), "gradd.legacy.scalers")
_OPTIONS = {"ORTTrainerOptions": "gradd.legacy.options"}
_TRAINER = dict.fromkeys(("ORTTrainer", "TrainStepInfo"), "gradd.legacy.trainer") | _OPTIONS
_SAMPLERS = dict.fromkeys(
    ("LoadBalancingDistributedSampler", "LoadBalancingDistributedBatchSampler"),
    "gradd.legacy.samplers",
)
_STATES = ("state_dict", "load_state_dict", "save_checkpoint", "load_checkpoint")
_CHECKPOINT = {f"experimental_{name}": "gradd.legacy.checkpoint" for name in _STATES}
_HOOKS = dict.fromkeys(
    ("GlobalSubscriberManager", "StatisticsSubscriber", "inspect_activation"), "gradd.legacy.hooks"
)

_STATE = dict.fromkeys(
    ("CheckpointState", "Parameter", "Parameters", "Properties"), "gradd.train.state"
)
_MODULES = {"Module": "gradd.train.module"}
_STEPS = {"Optimizer": "gradd.train.optimizer"}
_LINEAR = {"LinearLRScheduler": "gradd.train.optimizer"}
_API = {"CheckpointState": "gradd.train.state", **_MODULES, **_STEPS, **_LINEAR}

OPTIMUM = "optimum.onnxruntime"

# Module that is served -> name in it -> the module that has it, and after a colon its name there.
MODULES = {
    "torch_ort": {**_MODULE, **_SEED},
    "torch_ort.optim": _FUSED,
    "onnxruntime": _SEED,
    "onnxruntime.training": _TRAINER,
    "onnxruntime.training.ortmodule": {**_MODULE, **_GRADIENT},
    "onnxruntime.training.ortmodule._custom_gradient_registry": _REGISTRY,
    "onnxruntime.training.ortmodule.torch_cpp_extensions": {},
    "onnxruntime.training.ortmodule.experimental": {},
    "onnxruntime.training.ortmodule.experimental.hierarchical_ortmodule": _HIERARCHICAL,
    "onnxruntime.training.ortmodule.experimental.json_config": _JSON,
    "onnxruntime.training.experimental": _GRAPH,
    "onnxruntime.training.experimental.gradient_graph": _GRAPH,
    "onnxruntime.training.optim": {**_FUSED, **_FP16, **_CONFIGS},
    "onnxruntime.training.optim.fused_adam": _FUSED,
    "onnxruntime.training.optim.fp16_optimizer": _FP16,
    "onnxruntime.training.optim.config": _CONFIGS,
    "onnxruntime.training.optim.lr_scheduler": _SCHEDULES,
    "onnxruntime.training.amp": _SCALERS,
    "onnxruntime.training.amp.loss_scaler": _SCALERS,
    "onnxruntime.training.orttrainer": _TRAINER,
    "onnxruntime.training.orttrainer_options": _OPTIONS,
    "onnxruntime.training.checkpoint": _CHECKPOINT,
    "onnxruntime.training.utils": {},
    "onnxruntime.training.utils.data": _SAMPLERS,
    "onnxruntime.training.utils.data.sampler": _SAMPLERS,
    "onnxruntime.training.utils.hooks": _HOOKS,
    "onnxruntime.training.api": _API,
    "onnxruntime.training.api.checkpoint_state": _STATE,
    "onnxruntime.training.api.module": _MODULES,
    "onnxruntime.training.api.optimizer": _STEPS,
    "onnxruntime.training.api.lr_scheduler": _LINEAR,
    OPTIMUM: dict.fromkeys(
        ("ORTTrainer", "ORTTrainingArguments", "ORTSeq2SeqTrainer", "ORTSeq2SeqTrainingArguments"),
        "optimum.gradd",
    ),
}
# Modules that are another one.
_SAME = {
    "torch_ort.configure": "gradd_aliases.configure",
    "onnxruntime.training.ortmodule.torch_cpp_extensions.install": "gradd_aliases.configure",
    "onnxruntime.training.artifacts": "gradd.train.artifacts",
    "onnxruntime.training.onnxblock": "gradd.train.onnxblock",
    f"{OPTIMUM}.trainer": "optimum.gradd.trainer",
    f"{OPTIMUM}.trainer_seq2seq": "optimum.gradd.trainer_seq2seq",
    f"{OPTIMUM}.training_args": "optimum.gradd.training_args",
    f"{OPTIMUM}.training_args_seq2seq": "optimum.gradd.training_args",
    f"{OPTIMUM}.utils": "optimum.gradd.utils",
}
_BLOCKS = "onnxruntime.training.onnxblock"  # its own modules have other homes than their parent
_SAME |= {
    f"{_BLOCKS}.blocks": "gradd.train.onnxblock.blocks",
    f"{_BLOCKS}.loss": "gradd.train.onnxblock.loss",
    f"{_BLOCKS}.optim": "gradd.train.onnxblock.optim",
    f"{_BLOCKS}.onnxblock": "gradd.train.onnxblock.training",
    f"{_BLOCKS}.checkpoint_utils": "gradd.train.onnxblock.files",
    f"{_BLOCKS}.model_accessor": "gradd.train.onnxblock.graphs",
}

_INFERENCE = "inference comes with the package onnxruntime, which gradd leaves alone"
_OLDER = "use onnxruntime.training.ORTTrainer, which takes a dict as the model's description"
_SYMBOLIC = "leave it out: gradd captures a model without exporters' symbolic functions"
_PASSES = "graphs are optimized by the daemon's own passes (docs/patterns.md); Python adds none"
_INSTEAD = {
    **dict.fromkeys(("InferenceSession", "SessionOptions"), _INFERENCE),
    "ort_trainer": _OLDER,
    "capi": f"{_INFERENCE}; in place of capi.ort_trainer, {_OLDER}",
    **dict.fromkeys(("ORTInferenceModule", "ORTModelForCausalLM"), _INFERENCE),
    "pipe": "wrap each stage in a gradd.ORTModule",
    "_custom_op_symbolic_registry": _SYMBOLIC,
    **dict.fromkeys(("graph_optimizers", "graph_optimizer_registry", "register_graph_optimizer"),
                    _PASSES),
    "export_context": "use torch.compiler.is_compiling()",
    "enable_custom_autograd_support": "leave it out: a torch.autograd.Function runs as it is",
    "merge_activation_summary": "compare two folders of StatisticsSubscriber with diff",
    "ZeROOffloadSubscriber": "gradd offloads no parameters; use DeepSpeed's own hooks",
    "aggregate_checkpoints": "a checkpoint is one file here; use ORTTrainer.load_checkpoint()",
    **dict.fromkeys(("model_desc_validation", "_ORTTrainerModelDesc"),
                    "use ORTTrainer, which checks the description"),
    "torchdynamo": 'use torch.compile(backend="gradd")',
}  # fmt: skip


# Imports for which `onnxruntime` seems to be there even if no package provides it.
_TRAINING = ("onnxruntime.training", "onnxruntime.capi.ort_trainer")


def missing(module, name):
    """The message about a name that is not served."""
    if module != OPTIMUM and (instead := _INSTEAD.get(name)):
        return f"{module}.{name}: {instead}"
    names = [n for n in MODULES.get(module, ()) if not n.startswith("_")]
    inner = (m.rpartition(".") for m in (*MODULES, *_SAME))
    modules = [own for parent, _, own in inner if parent == module]
    served = f"gradd serves {', '.join(names) or 'no names of its own'} of {module!r}"
    served += f", and in it the modules {', '.join(modules)}" if modules else ""
    if module == OPTIMUM:
        served += "; the classes for inference come with the package optimum-onnx"
    return f"{module}.{name} is not there: {served}"


def _served(module, name):
    """The object of a name of MODULES, or the served module of that name; None for others."""
    place = MODULES[module].get(name)
    if place is None:
        inner = f"{module}.{name}"
        return import_module(inner) if inner in MODULES or inner in _SAME else None
    home, _, own = place.partition(":")
    return getattr(import_module(home), own or name)


class _ServedLoader:
    """A module that has the names of MODULES; each is looked up when it is asked for."""

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        own = module.__name__
        names = [n for n in MODULES[own] if not n.startswith("_")]

        def __getattr__(name):
            if (found := _served(own, name)) is None:
                raise AttributeError(name if name.startswith("__") else missing(own, name))
            return found

        module.__doc__ = "Names of ONNX Runtime Training, served by gradd."
        module.__all__ = names
        module.__getattr__ = __getattr__
        module.__dir__ = lambda: sorted({*vars(module), *names})


class _ExtendingLoader:
    """Runs the loader of an installed `optimum.onnxruntime`, then adds the names of trainers."""

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
    base, names = type(module), MODULES[OPTIMUM]

    def __getattr__(self, name):
        if name in names:
            return _served(OPTIMUM, name)
        inherited = getattr(base, "__getattr__", None)
        if inherited is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return inherited(self, name)

    def __dir__(self):
        return sorted({*base.__dir__(self), *names})

    for name in names:  # releases that still carried their own trainer: ours takes its place
        vars(module).pop(name, None)
    module.__class__ = type(
        base.__name__, (base,), {"__getattr__": __getattr__, "__dir__": __dir__}
    )


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
    if fullname in _SAME and _is_ours(parent):  # its files lie where its path says
        return ModuleSpec(fullname, SameLoader(_SAME[fullname]))
    if parent and parent not in MODULES and fullname not in (OPTIMUM, _TRAINING[1]):
        return None
    found = PathFinder.find_spec(fullname, path, target)
    # A namespace (without an origin) is only a folder that happens to have the name.
    if fullname == OPTIMUM and found is not None and found.origin is not None:
        found.loader = _ExtendingLoader(found.loader)
        return found
    if found is not None and fullname != OPTIMUM:
        return None
    if parent == OPTIMUM and fullname in _SAME:
        return ModuleSpec(fullname, SameLoader(_SAME[fullname]))
    if fullname == _TRAINING[1]:  # the rest of its package is there, for inference
        raise ImportError(missing(parent, name), name=fullname)
    if fullname == "onnxruntime" and not _is_for_training():
        return None
    if fullname in MODULES:
        return ModuleSpec(fullname, _ServedLoader(), is_package=True)
    if _is_ours(parent):
        raise ImportError(missing(parent, name), name=fullname)
    return None


def _is_ours(name):
    """Whether a module is served: an empty one with names, or a module of gradd."""
    module = sys.modules.get(name)
    loader = getattr(module, "__loader__", None)
    return isinstance(loader, _ServedLoader) or getattr(module, "__name__", "").startswith("gradd")


def _is_for_training():
    """Whether `onnxruntime` is imported as the parent of a module for training.

    Otherwise it must not seem to be installed: others look for it before they use it.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load":
            if str(frame.f_locals.get("name")).startswith(_TRAINING):
                return True
        frame = frame.f_back
    return False

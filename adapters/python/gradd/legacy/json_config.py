"""load_from_json(): settings of a wrapped module from a file, as ONNX Runtime Training had them."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from gradd import module, options
from gradd.debug import DebugOptions, LogLevel
from gradd.fallback import policy_of
from gradd.reasons import FallbackPolicy

logger = logging.getLogger("gradd")

_LIST = (list, "a list of texts")
_FLAG = (bool, "true or false")
_DEBUG = {
    "LogLevel": (str, "a text"),
    "SaveONNX": _FLAG,
    "ONNXPrefix": (str, "a text"),
    "SaveONNXPath": (str, "a text"),
}
# What the value of a key is, and why the key changes nothing ("" = it does).
_KEYS: dict[str, tuple[tuple[type, str], str]] = {
    "DebugOptions": ((dict, "an object"), ""),
    "FallbackPolicy": (_LIST, ""),
    "PropagateCastOps": ((dict, "an object"), "the daemon moves casts itself"),
    "UseExternalGPUAllocator": (_FLAG, "the daemon has memory of its own"),
    "EnableCustomAutogradFunction": (_FLAG, "autograd.Function runs in PyTorch"),
    "AllowLayerNormModPrecision": (_FLAG, "norms compute in f32"),
    "EnableGradAccOptimization": (_FLAG, "casts of parameters are made in each call"),
    "UseStaticShape": (_FLAG, "every plan has its sizes"),
    "RunSymbolicShapeInference": (_FLAG, "every plan has its sizes"),
    "SkipCheck": (_LIST, "checks are always on"),
    "UseMemoryEfficientGradient": (_FLAG, "the daemon chooses what a backward reads"),
    "OnnxOpsetVersion": ((int, "a whole number"), "graphs have opset 23"),
}


def load_from_json(ortmodule: module.ORTModule, path: str | os.PathLike[str] | None = None) -> None:
    """Takes the settings of a JSON file, from the next call of the module on.

    `DebugOptions` (`LogLevel`, `SaveONNX`, `ONNXPrefix`, `SaveONNXPath`) and `FallbackPolicy` (a
    list of names) take the place of what the module was made with. Other keys of ONNX Runtime have
    no effect, and a warning names those that are there.

    Args:
        ortmodule: The wrapped module.
        path: The file, unless ORTMODULE_JSON_CONFIG_PATH names one.

    Raises:
        ValueError: There is no path; the file is no JSON object; a key is unknown, or its value is
            not of its type. The module is as it was.
        TypeError: `ortmodule` is not an ORTModule.
        OSError: The file cannot be read, or the folder for graphs not be written to.
    """
    if not issubclass(type(ortmodule), module.ORTModule):
        raise TypeError(f"load_from_json takes an ORTModule, got {type(ortmodule).__name__}")
    path = options.get("ORTMODULE_JSON_CONFIG_PATH") or path  # type: ignore[assignment]
    if path is None:
        raise ValueError("load_from_json: no path: give one, or set ORTMODULE_JSON_CONFIG_PATH")
    given = _read(path)
    debug = ortmodule._gradd_options
    if "DebugOptions" in given:
        debug = _debug(given["DebugOptions"], debug.finite_check)
    policy = FallbackPolicy(0)
    if names := given.get("FallbackPolicy", []):
        policy = policy_of(names, f"{path}: FallbackPolicy {names}")
    module.configure(ortmodule, debug, policy or None)
    if idle := [f"{key} ({why})" for key, (_, why) in _KEYS.items() if why and key in given]:
        logger.warning("%s: without effect here: %s", path, ", ".join(idle))


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The checked settings of a file."""
    with open(path, encoding="utf-8") as file:
        try:
            given = json.load(file)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{path}: expected an object, got {type(given).__name__}")
    _check(path, "", given, {key: kind for key, (kind, _) in _KEYS.items()})
    _check(path, "DebugOptions.", given.get("DebugOptions", {}), _DEBUG)
    return given


def _check(
    path: Any, where: str, given: dict[str, Any], known: dict[str, tuple[type, str]]
) -> None:
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"{path}: unknown key {where}{key}: expected {', '.join(known)}")
        kind, text = known[key]
        good = isinstance(value, kind) and (kind is bool) == isinstance(value, bool)
        if kind is list and good:
            good = all(isinstance(one, str) for one in value)
        if not good:
            raise ValueError(f"{path}: {where}{key} is {value!r}, expected {text}")


def _debug(given: dict[str, Any], finite_check: bool) -> DebugOptions:
    level = given.get("LogLevel", "WARNING")
    if level not in LogLevel.__members__:
        known = ", ".join(LogLevel.__members__)
        raise ValueError(f"DebugOptions.LogLevel is {level!r}, expected one of {known}")
    return DebugOptions(
        LogLevel[level],
        given.get("SaveONNX", False),
        given.get("ONNXPrefix", ""),
        given.get("SaveONNXPath", ""),
        finite_check=finite_check,
    )

"""Devices of type `emu` in this process: tensors whose memory the stand-in for CUDA owns.

tests/sim/torch/device.cc has the tensors; this is torch's module for them, `torch.emu`, with what
`torch.cuda` offers users of a device: streams, random states, autocast's dtypes.
"""

from __future__ import annotations

import functools
import os
import types

import torch

from gradd.memory import devices
from helpers import BUILD

LIBRARY = BUILD / "lib" / "libsim.so"
DEVICE = BUILD / "lib" / "emu_torch.so"
_memories: list[devices.Gpu] = []


def why_not() -> str:
    """Why there are no such devices; "" if there are."""
    built_for = DEVICE.with_suffix(".txt")
    if not built_for.exists():
        return "there is no device for torch: the build had no g++"
    if (version := built_for.read_text().strip()) != torch.__version__:
        return f"the device for torch is one for torch {version}"
    return ""


@functools.cache
def load() -> types.ModuleType:
    """Makes `emu` a type of device, and gives the module `torch.emu`."""
    os.environ.setdefault("GRADD_SIM_DELAY_US", "50")
    torch.ops.load_library(str(DEVICE))
    torch.utils.rename_privateuse1_backend("emu")
    module = types.ModuleType("torch.emu")
    for part in (_devices, _random, _kept):
        vars(module).update(part())
    torch._register_device_module("emu", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    devices.register("emu", _memory)
    return module


def _memory(device: torch.device) -> devices.Gpu:
    def tensor(
        address: int, owner: object, count: int, dtype: torch.dtype, where: torch.device
    ) -> torch.Tensor:
        return torch.ops.emu.from_address(address, id(owner), [count], dtype, where.index)

    def stream() -> int:
        with _Device(device):  # the current stream of this device, whichever is the current one
            return torch.ops.emu.stream_address()

    _memories.append(devices.Gpu(device, str(LIBRARY), tensor, stream))
    return _memories[-1]


def forget_ways() -> None:
    """Makes the next segment try the ways again, as in a new process; no client is connected."""
    for memory in _memories:
        memory.way = None


class _Device:
    """Within `with`, the current device."""

    def __init__(self, device: torch.device | str | int) -> None:
        self._index = device if isinstance(device, int) else torch.device(device).index

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        if self._index is not None and self._index >= 0:
            torch.accelerator.set_device_index(self._index)

    def __exit__(self, *_error: object) -> None:
        torch.accelerator.set_device_index(self._before)


def _devices() -> dict[str, object]:
    return {
        "is_available": lambda: torch.ops.emu.device_count() > 0,
        "is_initialized": lambda: True,
        "device_count": torch.ops.emu.device_count,
        "current_device": torch.accelerator.current_device_index,
        "device": _Device,
        "set_device": torch.accelerator.set_device_index,
        "synchronize": torch.accelerator.synchronize,
        "current_stream": torch.accelerator.current_stream,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
    }


def _random() -> dict[str, object]:
    ops = torch.ops.emu

    def manual_seed_all(seed: int) -> None:
        for device in range(ops.device_count()):
            ops.seed(seed, device)

    def number(device: torch.device | str | int) -> int:
        return (device if isinstance(device, int) else torch.device(device).index) or 0

    return {
        "manual_seed": manual_seed_all,
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda device="emu": ops.random_state(number(device)),
        "set_rng_state": lambda state, device="emu": ops.set_random_state(state, number(device)),
    }


def _kept() -> dict[str, object]:
    none = {"memory_allocated": lambda device=None: 0, "memory_reserved": lambda device=None: 0}
    return {"empty_cache": lambda: None, **none}

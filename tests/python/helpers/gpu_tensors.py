"""Tests of the adapter that run with tensors of the emulated GPU, and those that cannot.

GRADD_TEST_DEVICE=emu GRADD_TEST_TENSORS=emu makes the GPU torch's default device, and the fixture
`daemon` is that of the GPU.
"""

from __future__ import annotations

import fnmatch
import os

# Files below tests/python; `make test` draws one of the first.
SHORT = (
    "calls/test_chunked_loss.py",
    "calls/test_finder.py",
    "calls/test_grad_scaler.py",
    "calls/test_holders.py",
    "calls/test_optim_half.py",
    "calls/test_memory_budget.py",
    "calls/test_transforms.py",
    "dynamo/test_dynamo_guards.py",
    "dynamo/test_dynamo_parts.py",
    "dynamo/test_dynamo_stale.py",
    "dynamo/test_dynamo_reads.py",
    "dynamo/test_dynamo_writes.py",
    "values/test_dropout.py",
)
FILES = (
    *SHORT,
    "calls/test_errors.py",
    "calls/test_fallback.py",
    "calls/test_fast_path.py",
    "calls/test_forward_replaced.py",
    "calls/test_half_selfcheck.py",
    "calls/test_lazy.py",
    "calls/test_live_calls.py",
    "calls/test_many_models.py",
    "calls/test_module.py",
    "calls/test_optim.py",
    "calls/test_parameters.py",
    "calls/test_selfcheck.py",
    "calls/test_selfcheck_later.py",
    "calls/test_selfcheck_noise.py",
    "calls/test_slots.py",
    "daemon/test_interrupted_steps.py",
    "dynamo/test_dynamo_around.py",
    "dynamo/test_dynamo_training_scripts.py",
    "dynamo/test_memory_aliases.py",
    "dynamo/test_refused.py",
    "dynamo/test_sizes.py",
    "trainer/test_trainer_arguments.py",
    "values/test_gradients.py",
    "values/test_index_range.py",
)
# In these files GRADD_WAIT=1: their tests expect an error where the request is made.
WAITING = (
    "calls/test_errors.py",
    "calls/test_many_models.py",
    "daemon/test_interrupted_steps.py",
    "values/test_index_range.py",
)
_HOST = "it is about memory of the host: arrays, buffers, other processes"
_ARRAYS = "it reads tensors as arrays of NumPy, or writes them so"
_MIXED = "it calls with a tensor of the CPU beside those of the GPU"
_RAW = "it speaks the protocol itself, over memory of the host"
_ENGINE = "it calls the engine's library with arrays of NumPy, without a client"
_SEGMENTS = "it is about sizes and headers of segments of the host"
# Patterns of tests, FILE::NAME.
CANNOT = {
    "calls/test_fallback.py::test_no_daemon_raises*": "a GPU's directory has too long a name there",
    "calls/test_holders.py::test_a*": _HOST,
    "calls/test_holders.py::test_memory*": _HOST,
    "calls/test_holders.py::test_writes_pass*": _HOST,
    "calls/test_lazy.py::test_every_way_of_reading*array*": _ARRAYS,
    "calls/test_module.py::test_inputs_in_every_form*copied*": _ARRAYS,
    "calls/test_parameters.py::test_buffers_that_cannot*nested*": "the GPU has no nested tensors",
    "calls/test_parameters.py::test_what_other_processes_share*": _HOST,
    "calls/test_slots.py::test_one_that_was_kept_goes": "memory of a GPU comes in pieces of 2 MiB",
    "calls/test_half_selfcheck.py::*autocast*": "its autocast is that of the CPU",
    "dynamo/test_dynamo_around.py::test_no_daemon*": "a GPU's directory has too long a name there",
    "dynamo/test_dynamo_around.py::test_threads*": (
        "torch.set_default_device() is for one thread, and the test makes models in others"
    ),
    "dynamo/test_dynamo_parts.py::test_running_statistics_of_instances*": (
        "torch lowers the norm of instances otherwise for a GPU"
    ),
    "dynamo/test_memory_aliases.py::test_an_array*": _ARRAYS,
    "dynamo/test_memory_aliases.py::test_memory_that_dlpack*": "DLPack does not know the device",
    "dynamo/test_memory_aliases.py::test_what_forward_writes*": "DLPack does not know the device",
    "dynamo/test_refused.py::test_attributes_that*options*": (
        "torch.compile fails, with every back end, at a float that changes under a default device"
    ),
    "dynamo/test_sizes.py::test_a_recurrent*": "the device has no fused cell",
    "dynamo/test_sizes.py::test_sizes_behind_a_pooling*": "the device has no convolutions",
    "dynamo/test_sizes.py::test_what_a_graph_writes*": "the device has no convolutions",
    "values/test_gradients.py::test_ddp*": "gloo has no tensors of this device",
    # Whole files.
    "daemon/test_hostile*.py::*": _RAW,
    "daemon/test_journal.py::*": _RAW,
    "daemon/test_limits_exceeded.py::*": _RAW,
    "daemon/test_timeline.py::*": _RAW,
    "dynamo/test_translated.py::*": "torch's gradients of powers are on the CPU there",
    "values/test_engine.py::*": _ENGINE,
    "values/test_random_graphs.py::*": _ENGINE,
    "values/test_recompute.py::*": _ENGINE,
    "calls/test_segments.py::*": _SEGMENTS,
    "calls/test_wrapping.py::*": _SEGMENTS,
    "values/test_autocast.py::*": "its autocast is that of the CPU; device/test_emu_autocast.py",
    "values/test_sparse_gradients.py::*": "the device has no sparse tensors",
    "calls/test_optim_rows.py::*": "its steps of three million elements take minutes there",
}


def is_on() -> bool:
    """Whether tests make their tensors there."""
    return os.environ.get("GRADD_TEST_TENSORS", "cpu") != "cpu"


def waits(file: str) -> bool:
    """Whether replies are waited for in a file, for its tests expect errors at the call itself."""
    return file in WAITING


def why_not(test: str) -> str:
    """Why a test cannot run there; "" if it can.

    Args:
        test: FILE::NAME, the file below tests/python.
    """
    found = (why for pattern, why in CANNOT.items() if fnmatch.fnmatchcase(test, pattern))
    return next(found, "")

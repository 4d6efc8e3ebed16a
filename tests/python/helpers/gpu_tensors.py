"""Tests of the adapter that run with tensors of the emulated GPU, and those that cannot.

All files of FOLDERS run there but those of which CANNOT holds every test, and two of daemon/. The
others of daemon/ stop, kill and inspect the daemon in the user's own directory, which is the CPU's;
device/ has such tests for those of GPUs.
GRADD_TEST_DEVICE=emu GRADD_TEST_TENSORS=emu makes the GPU torch's default device, and the fixture
`daemon` is that of the GPU.
"""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path

FOLDERS = ("calls", "dynamo", "values", "watching")
OTHERS = ("daemon/test_interrupted_steps.py", "daemon/test_traceless_writes.py")
# Files below tests/python; `make test` draws one.
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
# In these files GRADD_WAIT=1: their tests expect an error where the request is made.
WAITING = (
    "calls/test_errors.py",
    "calls/test_interrupts.py",
    "calls/test_many_models.py",
    *OTHERS,
    "values/test_index_range.py",
    "values/test_masked_scatter.py",
)
_HOST = "it is about memory of the host: arrays, buffers, other processes"
_ARRAYS = "it reads tensors as arrays of NumPy, or writes them so"
_MIXED = "it calls with a tensor of the CPU beside those of the GPU"
_ENGINE = "it calls the engine's library with arrays of NumPy, without a client"
_SEGMENTS = "it is about sizes and headers of segments of the host"
_PIECES = "memory of a GPU comes in pieces of 2 MiB"
_PROCESS = "its other process has tensors of the host"
_CELLS = "the device has no fused cell"
_SPARSE = "the device has no sparse tensors"
_AUTOCAST = "its autocast is that of the CPU; device/test_emu_autocast.py"
_FLOATS = "torch.compile fails, with every back end, at a float that changes under a default device"
_NOT_KEPT = "a session of a GPU does not outlive its process"
_UNHEARD = "a client of a GPU does not wait for most replies"
# Patterns of tests, FILE::NAME.
CANNOT = {
    "calls/test_explain.py::test_model_and_command*": "`gradd explain FILE` plans for the CPU",
    "calls/test_explain.py::test_plans_of_all_sessions*": _PROCESS,
    "calls/test_fallback.py::test_no_daemon_raises*": "a GPU's directory has too long a name there",
    "calls/test_holders.py::test_a*": _HOST,
    "calls/test_holders.py::test_memory*": _HOST,
    "calls/test_holders.py::test_writes_pass*": _HOST,
    "calls/test_interrupts.py::test_the_first_step_of_a_process*": _PROCESS,
    "calls/test_lazy.py::test_every_way_of_reading*array*": _ARRAYS,
    "calls/test_memory_back.py::test_a_module_that_leads_back*": _PIECES,
    "calls/test_module.py::test_inputs_in_every_form*copied*": _ARRAYS,
    "calls/test_parameters.py::test_buffers_that_cannot*nested*": "the GPU has no nested tensors",
    "calls/test_parameters.py::test_what_other_processes_share*": _HOST,
    "calls/test_slots.py::test_one_that_was_kept_goes": _PIECES,
    "calls/test_half_selfcheck.py::*autocast*": _AUTOCAST,
    "dynamo/test_disk_cache.py::test_the_next_process*": _PROCESS,
    "dynamo/test_dynamo_around.py::test_no_daemon*": "a GPU's directory has too long a name there",
    "dynamo/test_dynamo_around.py::test_threads*": (
        "torch.set_default_device() is for one thread, and the test makes models in others"
    ),
    "dynamo/test_dynamo_parts.py::test_running_statistics_of_instances*": (
        "torch lowers the norm of instances otherwise for a GPU"
    ),
    "dynamo/test_first_call.py::test_no_full_collection*": _PROCESS,
    "dynamo/test_memory_aliases.py::test_an_array*": _ARRAYS,
    "dynamo/test_memory_aliases.py::test_memory_that_dlpack*": "DLPack does not know the device",
    "dynamo/test_memory_aliases.py::test_what_forward_writes*": "DLPack does not know the device",
    "dynamo/test_refused.py::test_a_call_without_a_graph*": (
        "under a default device the reason comes without the line of the branch"
    ),
    "dynamo/test_refused.py::test_attributes_that*options*": _FLOATS,
    "dynamo/test_sizes.py::test_a_recurrent*": _CELLS,
    "dynamo/test_sizes_as_numbers.py::test_floats_that_change*a sum of both*": _FLOATS,
    "dynamo/test_tensor_properties.py::test_attributes_that_forward_writes*": _FLOATS,
    "dynamo/test_tensor_properties.py::test_sparse*": _SPARSE,
    "dynamo/test_work.py::test_cells*": _CELLS,
    "dynamo/test_work.py::test_*layer*with_a_memory*": _CELLS,
    "values/test_dropout.py::test_uniform*": _FLOATS,
    "values/test_dropout_models.py::test_the_same_seed*": _ENGINE,
    "values/test_half_numbers.py::test_*autocast*": _AUTOCAST,
    "values/test_half_numbers.py::test_patterns_with_numbers*gelu*": (
        "a GPU joins GELU with the product before it"
    ),
    "values/test_reduce.py::test_log_sum_exp*": _ENGINE,
    "values/test_reduce.py::test_products_of_zeros*": _ENGINE,
    "values/test_gradients.py::test_ddp*": "gloo has no tensors of this device",
    "daemon/test_traceless_writes.py::test_*numpy*": _ARRAYS,
    "daemon/test_traceless_writes.py::test_torchs_class*": _ARRAYS,
    "watching/test_trace.py::test_lanes*": _UNHEARD,
    "watching/test_trace.py::test_a_trace_is_bounded*": _UNHEARD,
    "watching/test_web.py::test_labels_are_bounded*": _NOT_KEPT,
    "watching/test_web.py::test_metrics_agree*": _NOT_KEPT,
    # Whole files.
    "watching/test_notebooks.py::*": _NOT_KEPT,
    "dynamo/test_translated.py::*": "torch's gradients of powers are on the CPU there",
    "values/test_bf16_engine.py::*": _ENGINE,
    "values/test_engine.py::*": _ENGINE,
    "values/test_expansion_edges.py::*": _ENGINE,
    "values/test_ties.py::*": _ENGINE,
    "values/test_random_graphs.py::*": _ENGINE,
    "values/test_recompute.py::*": _ENGINE,
    "calls/test_segments.py::*": _SEGMENTS,
    "calls/test_wrapping.py::*": _SEGMENTS,
    "values/test_autocast.py::*": _AUTOCAST,
    "values/test_sparse_gradients.py::*": _SPARSE,
    "calls/test_optim_rows.py::*": "its steps of three million elements take minutes there",
}


def files() -> list[str]:
    """All that run there, in part or as a whole."""
    root = Path(__file__).parents[1]
    paths = (
        f"{folder}/{file.name}" for folder in FOLDERS for file in root.glob(f"{folder}/test_*")
    )
    return [*sorted(path for path in paths if not why_not(f"{path}::*")), *OTHERS]


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

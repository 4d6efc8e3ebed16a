"""Plants bugs in GPU kernels and in waits for a queue, and says whether tests find them.

    python tests/emu/mutants.py [WORD ...]

Each is one change of text in a copy of the tree. Of a kernel: a barrier that is missing, one in a
branch, a thread that ends too early, an element too many; its operator is run on cases of its own,
in several orders of threads. Of the engine: a wait that is missing, before a reply, before the host
reads what the queue writes, before memory is freed or unmapped; the fake device (tests/fake) works
late. Of the CUDA device: a wait that is missing, an error that is reported twice, a check of lent
memory; the stand-in for CUDA (tests/sim) works late, too. Of the adapter: a wait that is missing on
either side, memory that is freed while a daemon has it open or used again too early, a daemon that
computes on another GPU; tests of tests/python/device find these. WORDs pick those whose name holds
one. Exit status 1: a bug was not found, or a change no longer applies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1800  # against a program that hangs; its tests have limits of their own
SLOWER = 10  # a machine that does much else


@dataclass(frozen=True)
class Mutant:
    """A change of `file`: the text `old`, which is there once, becomes `new`.

    Of what includes it `source` alone is compiled; None: it is the file itself. One of `tests`,
    programs or files of Python tests, must fail in the environment `env`; of a program those whose
    names hold `part`.
    """

    name: str
    file: str
    old: str
    new: str
    source: str | None = None
    tests: tuple[str, ...] = ("test_emu",)
    env: Mapping[str, str] = field(default_factory=dict)
    part: str = ""


# ---- kernels ----

JOIN = """        __syncthreads(); /* the previous call has read its parts */
        if (threadIdx.x % GPU_WARP == 0) part[threadIdx.x / GPU_WARP] = v;
        __syncthreads();
"""
TURNED = """            *(pack *)(row + x.t1) = high;
        }
        __syncthreads();
"""
BROUGHT = (
    "        __syncthreads(); /* this tile has arrived, and no warp reads the one before it */\n"
)
KEPT = (
    "        __syncthreads(); "
    "/* these tiles have arrived, and no warp reads the ones before them */\n"
)
MMA_GRAD = "kernels/cuda/attention/attention_mma_grad.cu"
SPANS = "    __syncthreads();\n    if (threadIdx.x == 0)\n        m.spans"


def in_queries(name: str, barrier: str) -> Mutant:
    """A barrier that is missing where tiles of queries go by."""
    return Mutant(name, MMA_GRAD, barrier, "", env={"GRADD_TEST_OP": "FusedAttentionGrad"})


def in_rows(name: str, old: str, new: str) -> Mutant:
    """A bug in what kernels of rows share, of which those of LayerNormalization are compiled."""
    env = {"GRADD_TEST_OP": "LayerNormalization"}
    file, source = "kernels/cuda/row/row_teams.h", "kernels/cuda/row/norm.cu"
    return Mutant(name, file, old, new, source, env=env, part="every_case")


def of(name: str, file: str, old: str, new: str, op: str) -> Mutant:
    """A bug that cases of one operator find."""
    return Mutant(name, file, old, new, env={"GRADD_TEST_OP": op}, part="every_case")


def in_convolution(name: str, old: str, new: str, op: str) -> Mutant:
    """The same in convolutions."""
    return of(name, "kernels/cuda/product/conv.cu", old, new, op)


JOINED = "/ GPU_WARP] = sum;\n        __syncthreads();\n"
SUMMED = "        __syncthreads();\n    }\n}\n"
KERNELS = [
    in_rows("no barrier behind the parts", JOIN, JOIN[: JOIN.rindex("        __")]),
    in_rows("no barrier before parts are written again", JOIN, JOIN[JOIN.index("        if") :]),
    in_rows(
        "a barrier in a branch",
        JOIN,
        "        if (threadIdx.x < 64) __syncthreads();\n" + JOIN,
    ),
    in_rows(
        "a thread that ends early",
        JOIN,
        "        if (threadIdx.x == blockDim.x - 1) return v;\n" + JOIN,
    ),
    in_rows(
        "half a warp in a shuffle",
        "        words[i] = __shfl_xor_sync(GPU_ALL, words[i], other);",
        "        if (threadIdx.x % 32 < 16) words[i] = __shfl_xor_sync(GPU_ALL, words[i], other);",
    ),
    in_rows(
        "one part too many",
        "        for (int i = 1; i < TEAM / GPU_WARP; i++)",
        "        for (int i = 1; i <= TEAM / GPU_WARP; i++)",
    ),
    Mutant(
        "no barrier before a tile is filled again",
        "kernels/cuda/copy.cu",
        TURNED,
        TURNED[: TURNED.index("        __")],
        env={"GRADD_TEST_OP": "Transpose"},
        part="every_case",
    ),
    in_queries("no barrier before a tile is multiplied", BROUGHT),
    in_queries("no barrier before kept gradients are multiplied", KEPT),
    Mutant(
        "no barrier before the span of queries is known",
        MMA_GRAD,
        SPANS,
        SPANS[SPANS.index("    if") :],
        tests=("test_emu_attention",),
    ),
    Mutant(
        "one element too far",
        "kernels/cuda/map.h",
        "threadIdx.x; i < n; i += all) {\n        int64_t at[sizeof...(T)];",
        "threadIdx.x; i <= n; i += all) {\n        int64_t at[sizeof...(T)];",
        "kernels/cuda/compare.cu",
        env={"GRADD_TEST_OP": "Less"},
        part="every_case",
    ),
    in_convolution(
        "no barrier before warps are summed",
        JOINED,
        JOINED.replace("        __syncthreads();\n", ""),
        "ConvWeightGrad",
    ),
    in_convolution(
        "no barrier before warps' sums are written again",
        SUMMED,
        SUMMED[SUMMED.index("    }") :],
        "ConvWeightGrad",
    ),
    in_convolution("a tap beyond the edge", "at >= v.x[a]) return", "at > v.x[a]) return", "Conv"),
    of(
        "a thread beyond the last channel that ends early",
        "kernels/cuda/row/batchnorm.cu",
        "            f(c, gpu_slice() == 0 &&",
        "            if (c >= p.s.channels) return;\n            f(c, gpu_slice() == 0 &&",
        "BatchNorm",
    ),
    of(
        "a weight too many in a window",
        "kernels/cuda/window/taps.cu",
        "t < size; t++",
        "t <= size; t++",
        "Taps",
    ),
    of(
        "a window that ends early",
        "kernels/cuda/window/windowmax.cu",
        "k < c.size; k++",
        "k + 1 < c.size; k++",
        "WindowMax",
    ),
    of(
        "a function of another name",
        "kernels/cuda/special.cu",
        "GPU_UNARY_FLOAT(acos, E_ACOS)",
        "GPU_UNARY_FLOAT(acos, E_ASIN)",
        "Acos",
    ),
]

# ---- waits ----


def no_wait_for(what: str, file: str, read: str) -> Mutant:
    """The host goes on when the copy of a result is in the stream."""
    assert "gpu_read" in read
    name = f"no wait for {what}"
    return Mutant(name, file, read, read.replace("gpu_read", "gpu_write"), tests=("test_emu_step",))


CUDA = "kernels/cuda/plugin/device.cu"


def late(name: str, file: str, old: str, new: str) -> Mutant:
    """A bug of the engine; the device begins so late that a missing wait shows."""
    env = {"GRADD_FAKE_DELAY_US": "10000", "GRADD_SIM_DELAY_US": "10000"}
    return Mutant(name, file, old, new, tests=("test_fake", "test_step"), env=env)


def lent(name: str, old: str, new: str) -> Mutant:
    """A bug in how the device takes memory of clients."""
    return Mutant(name, "kernels/cuda/plugin/memory.cu", old, new, tests=("test_lent",))


def in_turn(name: str, old: str, new: str) -> Mutant:
    """Work that the device does before what its queue was given earlier."""
    return Mutant(name, CUDA, old, new, tests=("test_cuda_queue",))


def comm(name: str, old: str, new: str) -> Mutant:
    """A bug in how the device averages over processes."""
    env = {"GRADD_SIM_DELAY_US": "10000"}
    return Mutant(name, "kernels/cuda/plugin/comm.cu", old, new, tests=("test_comm",), env=env)


STEP, PRINT = "kernels/cuda/step.cu", "kernels/cuda/fingerprint.cu"
EXEC, APPLY = "server/exec/exec.c", "server/exec/step.c"
READ_AGAIN = """    GRADD_TRY(s->b->wait(s->queue, NULL));
    GRADD_TRY(s->b->queue_enter(s->queue, 0));
    const uint64_t magic"""
ROWS_AGAIN = (
    "    GRADD_TRY(s->b->wait(s->queue, NULL));\n    return s->b->queue_enter(s->queue, 0);"
)
ENDS = "gradd_status_t waited = d->backend->wait(d->queue, &failed);"
STEPPED = "gradd_status_t waited = s->b->wait(s->queue, NULL);"
WAITS = [
    no_wait_for("a norm", STEP, "gpu_read(out, &there->all, sizeof *out)"),
    no_wait_for("the finite check", STEP, "gpu_read(&found, there, sizeof found)"),
    no_wait_for("a fingerprint", PRINT, "gpu_read(found, there->found, "),
    no_wait_for("touched rows", PRINT, "gpu_read(bits + from / 64, gpu_call.scratch, bytes)"),
    late(
        "no wait between a run and its reply or the optimizer's step",
        EXEC,
        ENDS,
        ENDS.replace("= d", "= !status ? GRADD_OK : d"),
    ),
    late(
        "no wait before memory of a failed run is unmapped",
        EXEC,
        ENDS,
        ENDS.replace("= d", "= status ? GRADD_OK : d"),
    ),
    late(
        "no wait before the host reads a client's memory",
        "server/device/device.c",
        "waited = d->backend->wait(d->queue, NULL);",
        "waited = GRADD_OK;",
    ),
    late("no wait before the journal is read", APPLY, READ_AGAIN, "    const uint64_t magic"),
    late("no wait before the journal's rows are read", APPLY, ROWS_AGAIN, "    return GRADD_OK;"),
    late(
        "no wait between a step and its reply",
        APPLY,
        STEPPED,
        STEPPED.replace("= s", "= !status ? GRADD_OK : s"),
    ),
    late(
        "no wait before memory of a refused step is unmapped",
        APPLY,
        STEPPED,
        STEPPED.replace("= s", "= status ? GRADD_OK : s"),
    ),
    late(
        "no wait before the constants of a plan are freed",
        "server/plan/plan.c",
        "    p->device->backend->wait(p->device->queue, NULL); /* its",
        "    /* its",
    ),
]
DEVICE = [
    late(
        "no wait before the host reads a fault",
        CUDA,
        '    CU(cudaStreamSynchronize((cudaStream_t)gpu_call.stream), "a wait");\n',
        "",
    ),
    late(
        "an error that is reported twice", CUDA, "    cudaGetLastError();\n    return", "    return"
    ),
    late(
        "an allocation's error that is reported twice",
        CUDA,
        "        cudaGetLastError(); /* the next call must not find it */\n",
        "",
    ),
    late(
        "memory that is freed before its turn",
        CUDA,
        "if (memory) cudaFreeAsync(memory, q->stream)",
        "if (memory) cudaFreeAsync(memory, nullptr)",
    ),
    lent("a handle of fewer bytes than claimed", "real >= lent->bytes", "true"),
    lent(
        "a handle that is opened twice",
        '    if (error) return refused("open a handle", lent, error);\n',
        '    if (error) return refused("open a handle", lent, error);\n'
        "    cudaIpcOpenMemHandle(&at, handle, cudaIpcMemLazyEnablePeerAccess);\n",
    ),
    lent(
        "a handle that stays open",
        "    close_handle(at);\n    if (asked)",
        "    if (asked)",
    ),
    Mutant(
        "a request that does not wait for its client's stream",
        "server/session/queue.c",
        "return !job->word ||",
        "return true ||",
        tests=("test_queue",),
    ),
    lent("memory that stays mapped", "        d->unmap((CUdeviceptr)at, bytes);\n", ""),
    in_turn(
        "a copy before its turn",
        "cudaMemcpyDefault, (cudaStream_t)gpu_call.stream",
        "cudaMemcpyDefault, nullptr",
    ),
    in_turn("zeros before their turn", "0, bytes, q->stream) :", "0, bytes, nullptr) :"),
    in_turn(
        "a word before its turn",
        "    return noted(q, gpu_store(word, value));",
        "    gpu_call.stream = nullptr;\n    return noted(q, gpu_store(word, value));",
    ),
    Mutant(
        "a segment of another device",
        "server/daemon/control.c",
        "if (!given || says(given, host->device)",
        "if (true || says(given, host->device)",
        tests=("test_daemon",),
    ),
    Mutant(
        "a step that is done behind a failure",
        "server/verbs/objects.c",
        "if (!request->chain || request->chain",
        "if (true || request->chain",
        tests=("tests/python/device/test_emu_timeline.py",),
        env={"GRADD_TEST_DEVICE": "emu"},
    ),
    comm(
        "an average that does not wait for its gradients",
        '    CU(cudaStreamWaitEvent(c->stream, item->event, 0), "an event");\n',
        "",
    ),
    comm(
        "a word before the average",
        "    if (busy) {\n        GRADD_TRY(may_wait(c, c->since_ms));",
        "    if (false) {\n        GRADD_TRY(may_wait(c, c->since_ms));",
    ),
    comm("votes that are not counted", "sums[i] * sums[i] != sums[i + 1] * c->ranks", "false"),
]


def in_adapter(name: str, file: str, old: str, new: str, test: str) -> Mutant:
    """A bug of the adapter; tests with tensors of the emulated GPU find it."""
    env = {"GRADD_TEST_DEVICE": "emu"}
    path = f"tests/python/device/{test}.py"
    return Mutant(name, f"adapters/python/gradd/{file}", old, new, tests=(path,), env=env)


ADAPTER = [
    in_adapter(
        "a request that says too early that its inputs are there",
        "session/timeline.py",
        "self.words.write_in_turn(Words.READY, pending.turn)",
        "self.words.write(Words.READY, pending.turn)",
        "test_emu_timeline",
    ),
    in_adapter(
        "a stream that does not wait for results",
        "session/timeline.py",
        "if not pending.groups:\n            self.words.wait_in_turn(Words.DONE",
        "if False:\n            self.words.wait_in_turn(Words.DONE",
        "test_emu_timeline",
    ),
    in_adapter(
        "a stream that does not wait for a group",
        "session/timeline.py",
        "            self.words.wait_in_turn(Words.GROUPS, value)\n",
        "            pass\n",
        "test_emu_groups",
    ),
    in_adapter(
        "memory that is freed while a daemon has it open",
        "session/control.py",
        "        while control.recv(65536):\n            pass\n",
        "        pass\n",
        "test_emu_sharing",
    ),
    in_adapter(
        "inputs whose memory is used again before their backward",
        "calls/run.py",
        '            self.counts["forwards"] += 1\n',
        '            self.counts["forwards"] += 1\n'
        "            held.inputs = held.inputs and held.inputs.drop()\n",
        "test_emu_calls",
    ),
    in_adapter(
        "a daemon that computes on another GPU",
        "memory/devices.py",
        'self.environment = {"CUDA_VISIBLE_DEVICES": self.uuid}',
        "self.environment = {}",
        "test_gpu_daemons",
    ),
    in_adapter(
        "results of a failed request that are no NaN",
        "session/timeline.py",
        "self._memory.fill_with_nan([place for part in rest for place in part])",
        "pass",
        "test_emu_timeline",
    ),
    in_adapter(
        "a stream that does not go on behind the one before",
        "memory/devices.py",
        "                self._gpu.go_on_behind(before)",
        "                pass",
        "test_emu_timeline",
    ),
    in_adapter(
        "memory of dropped results that a side stream still reads",
        "session/ring.py",
        "        self.client.memory.go_on_behind_all()\n",
        "",
        "test_emu_timeline",
    ),
    in_adapter(
        "memory that is given back while a request needs it",
        "session/client.py",
        "if self.timeline is not None and self.timeline.pending:\n            self._unneeded",
        "if False:\n            self._unneeded",
        "test_emu_calls",
    ),
    in_adapter(
        "a fingerprint that is not heard",
        "session/client.py",
        'hear = read.hear if read is not None and "look" in more else _ignore',
        "hear = _ignore",
        "test_emu_calls",
    ),
    in_adapter(
        "a daemon of another GPU that is taken",
        "session/client.py",
        "if self.memory is HOST or connection.uuid == self.memory.uuid:",
        "if True:",
        "test_gpu_daemons",
    ),
    in_adapter(
        "a backward that is repeated while its dead daemon may still write",
        "session/timeline.py",
        "            self._wait_for_end(self._daemon)\n",
        "",
        "test_emu_groups",
    ),
]
MUTANTS = KERNELS + WAITS + DEVICE + ADAPTER


def build(tree: Path, tests: tuple[str, ...]) -> bool:
    """Brings programs of tests in that tree up to date."""
    programs = [f"build/bin/{name}" for name in tests if not is_python(name)]
    if len(programs) < len(tests):
        programs += ["build/bin/gradd", "build/bin/gradd-fake", "build/lib/emu_torch.so"]
    command = ["make", "-s", *programs]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-2000:])
    return done.returncode == 0


def attempt(tree: Path, mutant: Mutant) -> str:
    """Plants the bug, runs its tests, and takes it out again; what was found."""
    path, source = tree / mutant.file, tree / (mutant.source or mutant.file)
    text, times = path.read_text(), path.stat()
    if text.count(mutant.old) != 1:
        print(f"{mutant.name}: no such place in {mutant.file}")
        return ""
    path.write_text(text.replace(mutant.old, mutant.new))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # others are not compiled again
    source.touch()
    said = ""
    if build(tree, mutant.tests):
        said = next(filter(None, (found(tree, mutant, test) for test in mutant.tests)), "")
    path.write_text(text)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    source.touch()
    return said


def fails_anyway(tree: Path, mutant: Mutant, passed: set[tuple[str, ...]]) -> str:
    """Which of its tests fails without the bug, and would find whatever is planted.

    `passed` gets those that pass, with their environment.
    """
    without = replace(mutant, old="", new="")
    for test in mutant.tests:
        key = (
            test,
            mutant.part,
            *(f"{name}={value}" for name, value in sorted(mutant.env.items())),
        )
        if key in passed:
            continue
        if said := found(tree, without, test):
            return f"{' '.join(filter(None, key))} fails as it is: {said}"
        passed.add(key)
    return ""


def is_python(test: str) -> bool:
    """Whether it is a file for pytest."""
    return test.endswith(".py")


def found(tree: Path, mutant: Mutant, test: str) -> str:
    """What the test says of the bug; "" if it passes."""
    command = [str(tree / "build/bin" / test), "--limit-scale", str(SLOWER)]
    if mutant.part:
        command += ["--filter", mutant.part]
    if is_python(test):
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    folders = ":".join(str(tree / name) for name in ("adapters/python", "adapters/optimum"))
    here = {"GRADD_BIN": str(tree / "build/bin/gradd"), "PYTHONPATH": folders}
    done = subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, **here, **mutant.env},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    if not done.returncode:
        return ""
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    words = [line for line in lines if "emulated GPU:" in line or '" in ' in line]
    return (words or [line for line in lines if line.startswith(("FAIL", "E  "))] or lines)[0]


def main() -> int:
    """Tries one after the other."""
    missed = 0
    words = sys.argv[1:] or [""]
    chosen = [m for m in MUTANTS if any(word in m.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="gradd-mutants-") as folder:
        tree = Path(folder) / "gradd"
        ignore = shutil.ignore_patterns(".git", "asan", "gpu", "cuda-*", ".venv", "pytest-*.xml")
        shutil.copytree(ROOT, tree, ignore=ignore, symlinks=True)
        (tree / ".venv").symlink_to((ROOT / ".venv").resolve())
        programs = tuple(sorted({test for m in chosen for test in m.tests}))
        if not build(tree, programs):
            return 2
        passed: set[tuple[str, ...]] = set()
        for mutant in chosen:
            if said := fails_anyway(tree, mutant, passed):
                print(said)
                return 2
        for mutant in chosen:
            said = attempt(tree, mutant)
            print(f"{mutant.name}: {'found: ' + said[:140] if said else 'MISSED'}", flush=True)
            missed += not said
    print(f"{len(chosen) - missed} of {len(chosen)} found")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())

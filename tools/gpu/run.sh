#!/bin/sh
# Runs on a machine with a GPU, without a network and without a build, what `make gpu-bundle` has
# collected in build/gpu; OUT names the folder for the log and the results (default: build/gpu-out).
#
#     tools/gpu/run.sh first      libraries, every kernel against the CPU, halves by the GPU's
#                                 conversions, shared memory and events of two processes, ceilings,
#                                 some kernels under memcheck: 6 minutes at most
#     tools/gpu/run.sh models     Llamas of real shapes in bf16: the engine's forward, backward and
#                                 AdamW step, operator by operator, beside transformers by PyTorch;
#                                 small models train through the daemon: 6 minutes at most
#
# Each part has a limit of time and the next one starts whatever became of it; what there is no time
# left for is a failure. The last line is "N passed, N failed"; results.json holds every part's
# status, seconds and lines of JSON, products/ what was measured. Variables GRADD_TEST_... of the
# caller do not count.
case ${1:-} in
first | models) ;;
*)
    sed -n '2,16s/^# \{0,1\}//p' "$0"
    case ${1:-} in -h | --help) exit 0 ;; esac
    exit 2
    ;;
esac

root=$(cd "$(dirname "$0")/../.." && pwd) || exit 2
bundle=$root/build/gpu
OUT=${OUT:-$root/build/gpu-out}
case $OUT in /*) ;; *) OUT=$PWD/$OUT ;; esac # where the caller is
mkdir -p "$OUT" && cd "$root" || exit 2
log=$OUT/log.txt
results=$OUT/results.json
ends=$(($(date +%s) + ${GRADD_GPU_SECONDS:-345}))
passed=0
failed=0
all=
newline='
'
: > "$log"

for name in $(env | sed -n 's/^\(GRADD_TEST_[A-Za-z0-9_]*\)=.*/\1/p'); do unset "$name"; done

# The folder of libcublasLt.so.13: where it is told, a Python package, or a toolkit.
find_cublas() {
    packages=$(python3 -c 'import importlib.util as u
s = u.find_spec("nvidia")
print(*(s.submodule_search_locations if s else []))' 2>/dev/null)
    for folder in ${GRADD_CUDA_LIBS:-} $(for p in $packages; do echo "$p/cu13/lib" "$p/cublas/lib"; done) \
        /usr/local/cuda/lib64 /usr/lib/x86_64-linux-gnu; do
        [ -e "$folder/libcublasLt.so.13" ] && echo "$folder:" && return
    done
}
export LD_LIBRARY_PATH="$(find_cublas)$bundle/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export GRADD_PLUGINS=$bundle/lib
export XDG_CACHE_HOME=$(mktemp -d) # empty: what is measured is measured here
trap 'rm -rf "$XDG_CACHE_HOME"' EXIT
trap 'exit 1' INT TERM HUP

# part NAME SECONDS COMMAND...: runs it, keeps what it says. What it has measured is a result.
part() {
    name=$1 seconds=$2
    shift 2
    printf '== %s\n' "$name" | tee -a "$log"
    began=$(date +%s)
    [ "$seconds" -le $((ends - began)) ] || seconds=$((ends - began))
    if [ "$seconds" -gt 0 ]; then
        timeout -k 5 "$seconds" "$@" > "$OUT/part.txt" 2>&1
        status=$?
    else
        echo "not started: no time is left" > "$OUT/part.txt"
        status=124
    fi
    took=$(($(date +%s) - began))
    [ $status -eq 0 ] || echo "-- failed: status $status after $took of $seconds s" >> "$OUT/part.txt"
    cat "$OUT/part.txt" >> "$log"
    tail -n "${GRADD_GPU_LINES:-12}" "$OUT/part.txt"
    lines=$(grep '^{.*}$' "$OUT/part.txt" | paste -sd, -)
    all=$all${all:+,$newline}$(printf '{"part": "%s", "status": %d, "seconds": %d, "lines": [%s]}' \
        "$name" "$status" "$took" "$lines")
    printf '[%s]\n' "$all" > "$results"
    if [ $status -eq 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
    for file in "$XDG_CACHE_HOME"/gradd/products/*.txt; do
        [ ! -e "$file" ] || { mkdir -p "$OUT/products" && cp "$file" "$OUT/products"; }
    done
}

# What is known at once comes first; importing torch may take a minute, and nothing needs it.
# The limits here are of the same group of processes, so that the part's own reaches all.
machine='ldd --version | head -n 1
cat /proc/driver/nvidia/version 2>/dev/null
timeout --foreground 15 nvidia-smi
gpu=$?
nvcc --version 2>/dev/null | tail -n 2
timeout --foreground 20 python3 -c "import torch; print(\"torch\", torch.__version__)" || echo "no torch"
exit $gpu'

libraries='ldd "$0" 2>&1 && ! ldd "$0" 2>&1 | grep -q "not found"'

doctor='"$0" doctor; "$0" doctor | grep -q "^device cuda: .*products by"'

measured='"$0" --filter emu.every_case --limit 25 &&
    for f in "$XDG_CACHE_HOME"/gradd/products/*.txt; do sed 1d "$f"; done | grep -q . && exit
echo "nothing was measured, or a test failed"
exit 1'

trained='site=$XDG_CACHE_HOME/site
python3 -c "import zmq" 2>/dev/null ||
    python3 -m pip install -q --no-index --no-deps --target "$site" "$2"/wheels/*.whl || exit
export PYTHONPATH=$site:$1/adapters/python:$1/tests/python GRADD_BIN=$2/bin/gradd GRADD_SELF_CHECK=0
child=helpers.processes.device_trainer
python3 -m "$child" "$3" "$4" "$(mktemp -d)" cpu cuda > "$XDG_CACHE_HOME/losses" 2> "$XDG_CACHE_HOME/said"
status=$?
cat "$XDG_CACHE_HOME/said" "$XDG_CACHE_HOME/losses"
[ $status -eq 0 ] && ! grep -q "computes on the CPU" "$XDG_CACHE_HOME/said" || exit 1
python3 - "$XDG_CACHE_HOME/losses" "$4" <<END
import json, sys
cpu, gpu = (json.loads(line)["losses"] for line in open(sys.argv[1]))
off = 1e-4 if sys.argv[2] == "float32" else 2e-2
sys.exit(not all(abs(a - b) <= off * abs(a) for a, b in zip(cpu, gpu, strict=True)))
END'

# In the order in which it would be missed most. No test gets as much as its part has.
tests=$bundle/bin/tests
gpu='env GRADD_TEST_GPU=cuda'
first() {
    part machine 40 sh -c "$machine"
    part libraries 10 sh -c "$libraries" "$bundle/lib/libgradd_cuda.so"
    part doctor 30 sh -c "$doctor" "$bundle/bin/gradd"
    part operators 80 $gpu "$tests" --limit 75 --filter emu.every_case_runs
    part "operators in halves" 80 $gpu "$tests" --limit 75 --filter emu.every_case_in_halves
    for probe in half ipc vmm host copy; do
        part "probe $probe" 30 "$bundle/bin/probe" "$probe"
    done
    part "probe product" 60 "$bundle/bin/probe" product
    part "measured products" 60 $gpu GRADD_TEST_OP=MatMul GRADD_CUDA_TUNE=all sh -c "$measured" "$tests"
    part memcheck 90 $gpu GRADD_TEST_EVERY=40 compute-sanitizer --tool memcheck \
        --target-processes all --error-exitcode 1 "$tests" --limit 40 --filter emu.every_case
}
models() {
    llama=$root/tools/gpu/llama.py
    for shape in 1b 8b; do
        for rows in 1 4; do
            part "engine $shape ${rows}x2048" 60 "$bundle/bin/bench_engine" \
                "$bundle/models/$shape.onnx" --device cuda --ids 128256 --repeat 5 \
                --step $((rows == 1)) input_ids=${rows}x2048 labels=${rows}x2048
        done
        part "attention $shape" 60 python3 "$llama" attention $shape
        part "eager $shape" 60 python3 "$llama" eager $shape
    done
    for model in mlp_ce llama gpt2 bert_mlm; do
        part "trainer $model" 45 sh -c "$trained" "" "$root" "$bundle" $model float32
    done
    part "trainer llama bf16" 45 sh -c "$trained" "" "$root" "$bundle" llama bfloat16
    part compile 120 python3 "$llama" compile 1b # four sequences take it more than two minutes
}
"$1"

printf '%d passed, %d failed\n' "$passed" "$failed" | tee -a "$log"
[ "$failed" -eq 0 ]

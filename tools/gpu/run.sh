#!/bin/sh
# Runs on a machine with a GPU, without a network and without a build, what `make gpu-bundle` has
# collected in build/gpu; OUT names the folder for the log and the results (default: build/gpu-out).
#
#     tools/gpu/run.sh first    libraries; memory, events and words of several processes; every
#                               kernel against the CPU; graphs against PyTorch's losses and
#                               gradients; the engine alone at the sizes of Llamas, and its
#                               attention beside PyTorch's: 330 s at most
#     tools/gpu/run.sh models   trainers with their tensors on the GPU: right losses, a daemon that
#                               is killed, two at once; Llamas beside transformers, torch.compile
#                               and Liger; kernels under memcheck and racecheck: 300 s at most
#     tools/gpu/run.sh parts    the names of all parts, and the seconds that each may take
#     tools/gpu/run.sh PART     one of them alone
#
# Each part has a limit of time and the next one starts whatever became of it; what there is no time
# left for is a failure. The last line is "N passed, N failed", and the names of the failed parts
# are in front of it; results.json (PART.json) holds every part's status, seconds and lines of JSON,
# products/ what was measured. Variables GRADD_TEST_... of the caller do not count.
# tools/gpu/table.py makes a page of results.

usage() {
    sed -n '2,20s/^# \{0,1\}//p' "$0"
    exit "$1"
}

root=$(cd "$(dirname "$0")/../.." && pwd) || exit 2
bundle=$root/build/gpu
only= listing= stem=log results=results seconds=330
passed=0 failed=0 names= all=
newline='
'

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

# part NAME SECONDS COMMAND...: runs it, keeps what it says. What it has measured is a result.
part() {
    name=$1 seconds=$2
    shift 2
    [ -z "$listing" ] || { printf '%-24s %s\n' "$name" "$seconds"; return; }
    [ -z "$only" ] || [ "$only" = "$name" ] || return
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
    if [ $status -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        names="$names $name"
    fi
    for file in "$XDG_CACHE_HOME"/gradd/products/*.txt; do
        [ ! -e "$file" ] || { mkdir -p "$OUT/products" && cp "$file" "$OUT/products"; }
    done
}

# The limits here are of the same group of processes, so that the part's own reaches all.
machine='ldd --version | head -n 1
cat /proc/driver/nvidia/version 2>/dev/null
timeout --foreground 15 nvidia-smi
gpu=$?
nvcc --version 2>/dev/null | tail -n 2
name=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
[ -z "$name" ] || printf "{\"gpu\": \"%s\"}\n" "$name"
timeout --foreground 25 python3 -c "import json, torch, transformers
print(json.dumps({\"torch\": torch.__version__, \"transformers\": transformers.__version__}))" ||
    echo "no torch, or no transformers"
exit $gpu'

libraries='ldd "$0" 2>&1 && ! ldd "$0" 2>&1 | grep -q "not found"'

doctor='"$0" doctor; "$0" doctor | grep -q "^device cuda: .*products by"'

measured='"$0" --filter emu.every_case --limit 25 &&
    for f in "$XDG_CACHE_HOME"/gradd/products/*.txt; do sed 1d "$f"; done | grep -q . && exit
echo "nothing was measured, or a test failed"
exit 1'

# Python with what the machine lacks of zmq and liger_kernel: `sh -c "$python" ROOT BUNDLE ...`.
python='site=$XDG_CACHE_HOME/site root=$0 bundle=$1
shift
for pair in zmq=pyzmq liger_kernel=liger_kernel; do
    python3 -c "import importlib.util as u; exit(not u.find_spec(\"${pair%=*}\"))" && continue
    [ -e "$site/${pair%=*}" ] || python3 -m pip install -q --no-index --no-deps --target "$site" \
        "$bundle/wheels/${pair#*=}"*.whl || echo "there is no ${pair%=*}"
done
export PYTHONPATH=$site:$root/adapters/python:$root/adapters/optimum:$root/tests/python
export GRADD_BIN=$bundle/bin/gradd
exec python3 "$@"'

tests=$bundle/bin/tests
gpu='env GRADD_TEST_GPU=cuda'
bench=$bundle/bin/bench_engine
trainers="$root/tools/gpu/trainers.py"

# In the order in which it would be missed most. No test gets as much as its part has.
first() {
    part machine 60 sh -c "$machine"
    part libraries 10 sh -c "$libraries" "$bundle/lib/libgradd_cuda.so"
    part doctor 20 sh -c "$doctor" "$bundle/bin/gradd"
    for probe in ipc vmm words streams; do
        part "probe-$probe" 20 "$bundle/bin/probe" "$probe"
    done
    part operators 60 $gpu "$tests" --limit 55 --filter emu.every_case_runs
    part operators-in-halves 60 $gpu "$tests" --limit 55 --filter emu.every_case_in_halves
    part bundles 40 python3 "$root/tools/gpu/bundles.py" compare "$bundle/bundles" "$bench" cuda
    for rows in 1 4; do
        part "engine-1b-${rows}x2048" 50 "$bench" "$bundle/models/1b.onnx" --device cuda --json 1 \
            --ids 128256 --repeat 5 --step $((rows == 1)) input_ids=${rows}x2048 labels=${rows}x2048
    done
    for shape in 8b 1b; do
        for rows in 1 4; do
            part "attention-$shape-${rows}x2048" 15 "$bench" \
                "$bundle/models/attention-$shape-${rows}x2048.onnx" --device cuda --json 1
        done
        part "sdpa-$shape" 40 python3 "$root/tools/gpu/llama.py" attention $shape
    done
    for probe in half host copy; do
        part "probe-$probe" 20 "$bundle/bin/probe" "$probe"
    done
    part measured-products 45 $gpu GRADD_TEST_OP=MatMul GRADD_CUDA_TUNE=all sh -c "$measured" "$tests"
    part probe-product 45 "$bundle/bin/probe" product
}
models() {
    for task in mlp killed two averages; do
        part $task 60 sh -c "$python" "$root" "$bundle" "$trainers" $task cuda
    done
    part peers-1b 150 env GRADD_SELF_CHECK=0 sh -c "$python" "$root" "$bundle" "$trainers" peers cuda \
        1b 4x2048 gradd eager compile liger
    part lora-8b 100 env GRADD_SELF_CHECK=0 sh -c "$python" "$root" "$bundle" "$trainers" lora cuda \
        8b-full 1x4096 gradd eager
    part memcheck 60 $gpu GRADD_TEST_EVERY=40 compute-sanitizer --tool memcheck \
        --target-processes all --error-exitcode 1 "$tests" --limit 50 --filter emu.every_case
    part racecheck 60 $gpu GRADD_TEST_OP=FusedAttentionGrad GRADD_TEST_EVERY=9 compute-sanitizer \
        --tool racecheck --target-processes all --error-exitcode 1 "$tests" --limit 50 \
        --filter emu.every_case_in_halves
}
list() {
    listing=1
    first
    models
    listing=
}

what=${1:-}
case $what in
first) ;;
models) seconds=300 ;;
parts)
    list
    exit 0
    ;;
-h | --help) usage 0 ;;
*)
    [ -n "$what" ] && list | grep -q "^$what  *[0-9]*\$" || usage 2
    only=$what stem=$what results=$what
    ;;
esac

OUT=${OUT:-$root/build/gpu-out}
case $OUT in /*) ;; *) OUT=$PWD/$OUT ;; esac # where the caller is
mkdir -p "$OUT" && cd "$root" || exit 2
log=$OUT/$stem.txt
results=$OUT/$results.json
ends=$(($(date +%s) + ${GRADD_GPU_SECONDS:-$seconds}))
: > "$log"
for name in $(env | sed -n 's/^\(GRADD_TEST_[A-Za-z0-9_]*\)=.*/\1/p'); do unset "$name"; done
export LD_LIBRARY_PATH="$(find_cublas)$bundle/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export GRADD_PLUGINS=$bundle/lib
export XDG_CACHE_HOME=$(mktemp -d) # empty: what is measured is measured here
trap 'rm -rf "$XDG_CACHE_HOME"' EXIT
trap 'exit 1' INT TERM HUP

if [ -z "$only" ]; then
    "$what"
else
    first
    models
fi
[ -z "$names" ] || printf 'failed:%s\n' "$names" | tee -a "$log"
printf '%d passed, %d failed\n' "$passed" "$failed" | tee -a "$log"
[ "$failed" -eq 0 ]

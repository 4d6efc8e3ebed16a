#!/bin/sh
# Runs on a machine with a GPU, without a network and without a build, what `make gpu-bundle` has
# collected in build/gpu; OUT names the folder for the log and the results (default: build/gpu-out).
#
#     tools/gpu/run.sh first      libraries, shared memory and events of two processes, ceilings,
#                                 halves by the GPU's conversions, every kernel against the CPU,
#                                 some of it under memcheck: 6 minutes
#
# Each part has a limit of time and the next one starts whatever became of it. The last line is
# "N passed, N failed"; results.json holds every part's status, seconds and lines of JSON.
cd "$(dirname "$0")/../.." || exit 2
bundle=$PWD/build/gpu
OUT=${OUT:-$PWD/build/gpu-out}
mkdir -p "$OUT"
log=$OUT/log.txt
results=$OUT/results.json
passed=0
failed=0
: > "$log"
printf '[' > "$results"

# The folder of libcublasLt.so.13: where it is told, a Python package, or a toolkit.
find_cublas() {
    packages=$(python3 -c 'import importlib.util as u
s = u.find_spec("nvidia")
print(*(s.submodule_search_locations if s else []))' 2>/dev/null)
    for folder in ${GRADD_CUDA_LIBS:-} $(for p in $packages; do echo "$p/cu13/lib" "$p/cublas/lib"; done) \
        /usr/local/cuda/lib64 /usr/lib/x86_64-linux-gnu; do
        [ -e "$folder/libcublasLt.so.13" ] && echo "$folder" && return
    done
}
export LD_LIBRARY_PATH="$(find_cublas):$bundle/lib:${LD_LIBRARY_PATH:-}"
export GRADD_PLUGINS=$bundle/lib
export XDG_CACHE_HOME="$(cd "$OUT" && pwd)/cache" # what is measured is a result

# part NAME SECONDS COMMAND...: runs it, keeps what it says.
part() {
    name=$1 seconds=$2
    shift 2
    printf '== %s\n' "$name" | tee -a "$log"
    began=$(date +%s)
    timeout "$seconds" "$@" > "$OUT/part.txt" 2>&1
    status=$?
    took=$(($(date +%s) - began))
    cat "$OUT/part.txt" >> "$log"
    tail -n 12 "$OUT/part.txt"
    lines=$(grep '^{' "$OUT/part.txt" | paste -sd, -)
    [ $((passed + failed)) -gt 0 ] && printf ',\n' >> "$results"
    printf '{"part": "%s", "status": %d, "seconds": %d, "lines": [%s]}' \
        "$name" "$status" "$took" "$lines" >> "$results"
    if [ $status -eq 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
}


first() {
    part machine 20 sh -c 'nvidia-smi; nvcc --version | tail -n 2; python3 -c "import torch; print(torch.__version__)"; ldd --version | head -n 1'
    part libraries 20 ldd "$bundle/lib/libgradd_cuda.so"
    part doctor 30 sh -c "'$bundle/bin/gradd' doctor; '$bundle/bin/gradd' doctor | grep -q '^device cuda: .*products by'"
    for probe in ipc vmm host copy half; do part "probe $probe" 40 "$bundle/bin/probe" "$probe"; done
    part "probe product" 60 "$bundle/bin/probe" product
    part operators 120 env GRADD_TEST_GPU=cuda "$bundle/bin/tests" --filter emu.every
    part "measured products" 60 env GRADD_TEST_GPU=cuda GRADD_TEST_OP=MatMul GRADD_CUDA_TUNE=all \
        "$bundle/bin/tests" --filter emu.every
    part memcheck 90 env GRADD_TEST_GPU=cuda GRADD_TEST_EVERY=40 compute-sanitizer --tool memcheck \
        --target-processes all --error-exitcode 1 "$bundle/bin/tests" --limit-scale 10 --filter emu.every
}

case ${1:-} in
first) first ;;
*)
    sed -n '2,13s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
printf ']\n' >> "$results"
printf '%d passed, %d failed\n' "$passed" "$failed" | tee -a "$log"
[ "$failed" -eq 0 ]

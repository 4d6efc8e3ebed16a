#!/bin/sh
# Fails when a tier includes upwards. Directions: shm -> libc, kernels -> shm, server -> kernels and
# shm; adapters/optimum -> adapters/python, never back. It works on text because includes are
# written from the repository root. Shared memory knows no transport and no engine library, and only
# kernels/cpu and kernels/ops may name the matrix library. Within the server the engine knows no
# transport and none of the folders that serve it to others, and the wire's messages know nobody who
# sends them. What the server wants of a device it asks the device's table, so it includes nothing
# of a device's folder and names no device's table.
cd "$(dirname "$0")/.." || exit 1
inc='^[[:space:]]*#[[:space:]]*include[[:space:]]*'
engine='server/graph server/plan server/exec server/api'
scan() { grep -RnE --include='*.[ch]' --include='*.cu' --include='*.cuh' "$@" 2>/dev/null; }
bad=$(
    scan "$inc\"(kernels|server|adapters|tests|benchmarks)/" shm
    scan "$inc\"(server|adapters|tests|benchmarks)/" kernels
    scan "$inc\"(adapters|tests|benchmarks)/" server
    scan "$inc\"\.\.?/" shm kernels server
    scan "$inc<(zmq|msgpack|cuda|dnnl|protobuf-c)" shm
    scan "$inc[<\"](zmq|msgpack)" kernels $engine server/explain
    scan "$inc\"server/(cli|daemon|explain|verbs|wire)/" $engine
    scan "$inc\"server/(api|cli|daemon|exec|explain|graph|plan|verbs)/" server/wire
    scan "$inc[<\"]dnnl" server
    scan "$inc\"kernels/[a-z]*/" server | grep -v '"kernels/math/' # formulas of no device
    for device in kernels/*/backend.c; do
        scan "gradd_backend_$(basename "$(dirname "$device")")\\>" server
    done
    grep -RnE --include='*.py' '(from|import) +optimum\.gradd' adapters/python 2>/dev/null
)
[ -z "$bad" ] && exit 0
echo "include against the direction of the tiers:"
echo "$bad"
exit 1

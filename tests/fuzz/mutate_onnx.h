/* Structure-aware mutation of ONNX models, and the seeds it starts from. Part of fuzz_import. */
#ifndef GRADD_TESTS_FUZZ_MUTATE_ONNX_H
#define GRADD_TESTS_FUZZ_MUTATE_ONNX_H

#include <stddef.h>
#include <stdint.h>

#include "server/graph/onnx.pb-c.h"

enum { MUTATE_SEEDS = 4 };

/* Models that between them use every message of the schema; 0 to 2 are valid, 3 has a subgraph. */
Onnx__ModelProto *mutate_seed(int index);

/* libFuzzer calls this one in place of its own; half of the time it passes on to that. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t n, size_t max_n, unsigned seed);

#endif

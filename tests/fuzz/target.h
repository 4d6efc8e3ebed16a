/* What every fuzz target has: libFuzzer's entry points, and a check that ends the process. */
#ifndef GRADD_TESTS_FUZZ_TARGET_H
#define GRADD_TESTS_FUZZ_TARGET_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "shm/status.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
int LLVMFuzzerInitialize(int *argc, char ***argv);

#define REQUIRE(cond)                                                                              \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #cond, gradd_error_message());  \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

#endif

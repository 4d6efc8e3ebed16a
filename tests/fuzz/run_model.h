/* Plans a loaded model for small shapes and, if it is small, runs it forward and backward.
 *
 * Invariants for every model: a refusal has a message, is not INTERNAL, and nothing is read or
 * written out of bounds (the sanitizers see to that). Part of fuzz_import.
 */
#ifndef GRADD_TESTS_FUZZ_RUN_MODEL_H
#define GRADD_TESTS_FUZZ_RUN_MODEL_H

#include "server/api/gradd.h"

/* seed: of the values that inputs get. plain: without recognised patterns. */
void fuzz_run_model(gradd_model_t *model, uint64_t seed, bool plain);

/* Aborts with the place and the last error message. */
#define FUZZ_REQUIRE(cond)                                                                         \
    do {                                                                                           \
        if (!(cond)) fuzz_abort(__FILE__, __LINE__, #cond);                                        \
    } while (0)
_Noreturn void fuzz_abort(const char *file, int line, const char *what);

#endif

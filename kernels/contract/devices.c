/* The devices of this build: one per folder of kernels/ that has a backend.c, which defines
 * gradd_backend_<folder>. The list is generated; the first is the default. See backend.h. */
#include "kernels/contract/backend.h"

#define X(folder) extern const gradd_backend_t gradd_backend_##folder;
#include "backend_list.inc"
#undef X

const gradd_backend_t *const gradd_backends[] = {
#define X(folder) &gradd_backend_##folder,
#include "backend_list.inc"
#undef X
};
const size_t gradd_backend_count = sizeof gradd_backends / sizeof gradd_backends[0];

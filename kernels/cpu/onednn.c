/* See onednn.h. */
#include "kernels/cpu/onednn.h"

#ifndef GRADD_NO_ONEDNN

#include <pthread.h>
#include <stdio.h>

/* Primitives that the library keeps after the last plan that has them: constants that are folded,
 * and the next plan of the same shapes, find theirs. Their memory is not accounted for. */
#define KEPT_PRIMITIVES 64

static pthread_once_t once = PTHREAD_ONCE_INIT;
static dnnl_engine_t engine;
static char name[32];

static void start(void) {
    const dnnl_version_t *v = dnnl_version();
    snprintf(name, sizeof name, "oneDNN %d.%d.%d", v->major, v->minor, v->patch);
    dnnl_set_primitive_cache_capacity(KEPT_PRIMITIVES);
    if (dnnl_engine_create(&engine, dnnl_cpu, 0) != dnnl_success) engine = NULL;
}

gradd_status_t gradd_dnnl_engine(dnnl_engine_t *out) {
    pthread_once(&once, start);
    if (!engine) return GRADD_FAIL(INTERNAL, "oneDNN: there is no engine for the processor");
    *out = engine;
    return GRADD_OK;
}

const char *gradd_dnnl_name(void) {
    pthread_once(&once, start);
    return name;
}

gradd_status_t gradd_dnnl_failed(dnnl_status_t status, const char *what) {
    if (status == dnnl_out_of_memory) return GRADD_FAIL(NOMEM, "oneDNN: %s", what);
    return GRADD_FAIL(INTERNAL, "oneDNN: %s failed with status %d", what, (int)status);
}

#endif

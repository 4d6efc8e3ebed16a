/* What users of oneDNN share: its engine, its failures, and what it can do on this processor. Only
 * in builds with the library; any thread.
 */
#ifndef GRADD_KERNELS_CPU_ONEDNN_H
#define GRADD_KERNELS_CPU_ONEDNN_H

#ifndef GRADD_NO_ONEDNN

#include <dnnl.h>
#include <stdbool.h>

#include "shm/dtype.h"
#include "shm/status.h"

/* *out: the engine of the processor, one for all. The library keeps the most recent primitives and
 * uses them for equal descriptions; how many is set here. */
gradd_status_t gradd_dnnl_engine(dnnl_engine_t *out);
/* "oneDNN 3.2.0" */
const char *gradd_dnnl_name(void);

/* NOMEM, or INTERNAL with what failed. */
gradd_status_t gradd_dnnl_failed(dnnl_status_t status, const char *what);
#define GRADD_TRY_DNNL(expr)                                                                       \
    do {                                                                                           \
        dnnl_status_t dnnl_status_ = (expr);                                                       \
        if (dnnl_status_ != dnnl_success) return gradd_dnnl_failed(dnnl_status_, #expr);           \
    } while (0)

/* f32, or bf16. */
static inline dnnl_data_type_t gradd_dnnl_type(gradd_dtype_t dtype) {
    return dtype == GRADD_DT_BF16 ? dnnl_bf16 : dnnl_f32;
}

#endif
#endif

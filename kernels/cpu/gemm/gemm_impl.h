/* Internals of the matrix product, shared by its files. Not for other modules. */
#ifndef GRADD_KERNELS_CPU_GEMM_GEMM_IMPL_H
#define GRADD_KERNELS_CPU_GEMM_GEMM_IMPL_H

#include "kernels/cpu/gemm/gemm.h"

/* A product of oneDNN, in f32 or bf16. */
typedef struct gradd_primitive_s gradd_primitive_t;

/* Bytes that one holds, nearly all of them generated code: measured, the library does not say. */
#define GRADD_PRIMITIVE_BYTES ((size_t)88 << 10)

/* *out = NULL: this build or this shape has no fast implementation there, and the caller must take
 * another way. g is simplified and not empty. */
gradd_status_t gradd_primitive_create(const gradd_gemm_t *g, gradd_primitive_t **out);
void gradd_primitive_destroy(gradd_primitive_t *p);
size_t gradd_primitive_workspace(const gradd_primitive_t *p);
gradd_status_t gradd_primitive_compute(const gradd_primitive_t *p, const void *a, const void *b,
                                       const void *bias, void *c, void *workspace);

/* Products of f32 that need no primitive: C = alpha * A B, added to what C holds where `adds`, over
 * these steps of the sums alone. g is simplified; its bias is not added. */
typedef struct gradd_k_range_s {
    int64_t from, to;
} gradd_k_range_t;

bool gradd_sgemm_fits(const gradd_gemm_t *g);
gradd_status_t gradd_sgemm(const gradd_gemm_t *g, const gradd_gemm_operands_t *o,
                           gradd_k_range_t range, bool adds);

/* A product of oneDNN whose k is cut into pieces, one after the other. */
typedef struct gradd_split_s gradd_split_t;

/* Whether that can be done, and whether it is faster. g is simplified. */
bool gradd_split_fits(const gradd_gemm_t *g);
bool gradd_split_pays(const gradd_gemm_t *g);
int gradd_split_pieces(const gradd_gemm_t *g);
/* *out = NULL as of gradd_primitive_create. */
gradd_status_t gradd_split_create(const gradd_gemm_t *g, gradd_split_t **out);
void gradd_split_destroy(gradd_split_t *s);
size_t gradd_split_workspace(const gradd_split_t *s, const gradd_gemm_t *g);
size_t gradd_split_bytes(const gradd_split_t *s); /* that it holds */
/* The step-th of so many rows of pieces, at most as many as there are. The sum waits in C, or in
 * the workspace, for the next step. */
gradd_status_t gradd_split_compute(const gradd_split_t *s, const gradd_gemm_t *g,
                                   const gradd_gemm_operands_t *o, int step, int steps);

#endif

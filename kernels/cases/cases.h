/* The little language of operator test cases, and its parser.
 *
 *     "f32[2,3,4] f32[3,1] i64[2]={0,2} f32[4]:(0.5,2) - | axis=-1 mode="linear" perm=[1,0] -> 2"
 *
 * Left of the bar, inputs separated by blanks: dtype[dims] (`f32[]` has rank 0), then optionally
 * `={literals}` (known at compile time, as a constant of a model; one literal fills the tensor) or
 * `:(lo,hi)`, the range of random elements; `-` is an absent input. Random floats lie in (-2,2),
 * integers in [0,4], booleans are 0 or 1, unless a range says otherwise. Right of the bar,
 * attributes: integer, float (has '.' or 'e'), "string", [integers], [floats], and at the end
 * `-> n`, the number of outputs (default: the row's min_out). Literals: 3, -0.5, 1e-3, inf, nan.
 *
 * The same text and seed give the same numbers everywhere. `float_as` replaces every f32 by another
 * float type, with the same values rounded to f32. In a row, a negative grad_tol skips the gradient
 * check of a case, and a negative tol the comparison with the reference (random numbers).
 */
#ifndef GRADD_KERNELS_CASES_CASES_H
#define GRADD_KERNELS_CASES_CASES_H

#include "kernels/contract/op.h"

#define GRADD_CASE_MAX_ATTRS 16

typedef struct gradd_case_data_s {
    gradd_view_t in[GRADD_OP_MAX_IN]; /* data is NULL for absent inputs only */
    bool known[GRADD_OP_MAX_IN];      /* given by literals: visible to the shape rule */
    int n_in;
    gradd_attr_t attrs[GRADD_CASE_MAX_ATTRS];
    int n_attrs;
    int n_out;    /* 0 = the row's default */
    void *blocks; /* list of owned allocations */
} gradd_case_data_t;

/* Parses text; on failure (GRAPH, with position) nothing is left to free. */
gradd_status_t gradd_case_parse(const char *text, gradd_dtype_t float_as, uint64_t seed,
                                gradd_case_data_t *out);
void gradd_case_free(gradd_case_data_t *data);
/* 64-byte aligned memory that lives until gradd_case_free; zeroed. NULL if there is none. */
void *gradd_case_alloc(gradd_case_data_t *data, size_t bytes);

#endif

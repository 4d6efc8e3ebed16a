/* Runs one test case of the operator table and hands over everything about it, for checks that are
 * written in other languages (tests/python/values/test_vs_onnx.py calls it through ctypes).
 *
 * The answer is a JSON text, a NUL byte, and the elements of all present inputs and outputs in
 * order, contiguous, without padding: {"op", "domain", "opset", "flags", "expands", "text",
 * "tol", "in": [{"dtype", "shape"} | null...], "attrs": [{"name", "kind", "value"}...],
 * "out": [...]}. Outputs of composites are null: they run as their expansion, in a graph. */
#ifndef GRADD_KERNELS_CASES_CASE_EXPORT_H
#define GRADD_KERNELS_CASES_CASE_EXPORT_H

#include <stdint.h>

#include "kernels/cases/cases.h"

/* Case number `index` counted over all families. Returns the size of the answer, which is written
 * only if it fits into `bytes`; 0 past the last case; minus the status code on failure. */
int64_t gradd_case_export(int64_t index, void *buffer, int64_t bytes);

/* Infers and runs a parsed case: data->n_out outputs, which live in data's memory. Composites, and
 * operators with kernels on other devices only, have no kernel here: their outputs are left out,
 * and a caller that can expand them runs them itself. `out` has GRADD_OP_MAX_OUT entries, zeroed.
 */
gradd_status_t gradd_case_compute(const gradd_op_t *op, gradd_case_data_t *data, gradd_view_t *out);

#endif

/* Table of all operator rows, made from the generated list of families. Constant, thread-safe. */
#ifndef GRADD_KERNELS_CONTRACT_REGISTRY_H
#define GRADD_KERNELS_CONTRACT_REGISTRY_H

#include "kernels/contract/op.h"

extern const gradd_ops_t *const gradd_op_families[];
extern const size_t gradd_op_family_count;

/* Row for an operator of a model: domain "" or "ai.onnx" or "com.gradd", opset of that domain.
 * NULL if there is none. */
const gradd_op_t *gradd_op_find(const char *domain, const char *name, int opset);
/* Row by name alone, newest opset first; what gradient rules and passes emit. NULL if none. */
const gradd_op_t *gradd_op_by_name(const char *name);
/* Whether the operator is defined for that dtype as input i. */
bool gradd_op_accepts(const gradd_op_t *op, int input, gradd_dtype_t dtype);
/* Whether a gradient of the row's results can go on to input i, whatever the shapes are. */
bool gradd_op_carries(const gradd_op_t *op, int input);
/* The engine and the test driver call this instead of the row's function: it checks arity, dtypes
 * and attribute names first, and the result types afterwards. */
gradd_status_t gradd_op_infer(gradd_infer_t *c);

#endif

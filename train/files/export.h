/* A model for inference: the part of a model that some outputs need, with the values of a state
 * inside. */
#ifndef GRADD_TRAIN_FILES_EXPORT_H
#define GRADD_TRAIN_FILES_EXPORT_H

#include "train/gradd_train.h"

typedef struct export_source_s {
    const void *model; /* Borrowed: bytes of an ONNX model */
    size_t n;
    const gradd_train_state_t *state; /* Borrowed */
    /* Borrowed: compiles the model to find the type of an output that the model does not declare;
     * NULL = such an output fails. */
    struct device_s *device;
} export_source_t;

/* Writes to `path` the nodes of a model that the outputs need. Inputs that are parameters of the
 * state become initializers; BatchNormalization and Dropout are in evaluation mode whatever the
 * model says. What is left is copied as it is.
 *
 * Errors: MODEL (the bytes are no ONNX model), TENSOR (an output that the model does not have, or
 * whose type is not known; a parameter without values), UNSUPPORTED (a node with a subgraph), LIMIT
 * (2 GiB or more), IO, NOMEM. */
gradd_status_t export_model(const export_source_t *source, const char *const *outputs,
                            int n_outputs, const char *path);

/* output_type.c: type of a value of the model, whatever the sizes of its inputs; dims that follow
 * them are -1. Errors: those of loading and planning. */
gradd_status_t export_output_type(const export_source_t *source, const char *name,
                                  gradd_type_t *out_type);

#endif

/* A model for inference: the part of a model that some outputs need, with the values of a state
 * inside. */
#ifndef GRADD_TRAIN_FILES_EXPORT_H
#define GRADD_TRAIN_FILES_EXPORT_H

#include "train/gradd_train.h"

/* Writes to `path` the nodes of a model's bytes that the outputs need. Inputs that are parameters
 * of the state become initializers; BatchNormalization and Dropout are in evaluation mode whatever
 * the model says. What is left is copied as it is.
 *
 * Errors: MODEL (the bytes are no ONNX model), TENSOR (an output that the model does not have, or
 * whose type it does not say; a parameter without values), UNSUPPORTED (a node with a subgraph),
 * LIMIT (2 GiB or more), IO, NOMEM. */
gradd_status_t export_model(const void *model, size_t n, const gradd_train_state_t *state,
                            const char *const *outputs, int n_outputs, const char *path);

#endif

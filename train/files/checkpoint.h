/* A checkpoint file of ONNX Runtime's training on the device: parameters, optimizer, properties.
 *
 * The file is a FlatBuffer with the identifier ODTC; its tables are those of ONNX Runtime's
 * ort_training_checkpoint.fbs (release 1.19.2). A nominal checkpoint has the parameters' names and
 * element types, no shapes and no values.
 *
 * checkpoint_t is a view: what was read names places in the file's bytes, what is written names
 * places of the caller. Reading takes memory for the lists alone, at most some 30 times the file's
 * size for hostile bytes, and less than the file's size for a model's.
 */
#ifndef GRADD_TRAIN_FILES_CHECKPOINT_H
#define GRADD_TRAIN_FILES_CHECKPOINT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "platform/platform.h"
#include "shm/status.h"
#include "shm/tensor.h"

#define CHECKPOINT_MOMENTS 4 /* of one parameter, at most */

typedef struct checkpoint_tensor_s {
    const char *name;  /* Borrowed */
    gradd_type_t type; /* rank 0 where there are no values */
    /* Borrowed: gradd_type_bytes(&type) bytes, row-major. Of any alignment if read, of 64 bytes in
     * the files that checkpoint_write() makes. NULL in a nominal checkpoint. */
    const void *values;
} checkpoint_tensor_t;

typedef struct checkpoint_parameter_s {
    checkpoint_tensor_t tensor;
    bool requires_grad;
} checkpoint_parameter_t;

typedef struct checkpoint_moments_s {
    const char *parameter; /* Borrowed */
    checkpoint_tensor_t moments[CHECKPOINT_MOMENTS];
    int n_moments;
} checkpoint_moments_t;

typedef struct checkpoint_group_s {
    const char *name; /* Borrowed; "group0" */
    int64_t step;     /* steps that the optimizer has made */
    float initial_learning_rate;
    checkpoint_moments_t *states; /* Owned if read */
    int n_states;
} checkpoint_group_t;

typedef enum checkpoint_kind_e {
    CHECKPOINT_INT,
    CHECKPOINT_FLOAT,
    CHECKPOINT_STRING,
} checkpoint_kind_t;

typedef struct checkpoint_property_s {
    const char *name; /* Borrowed */
    checkpoint_kind_t kind;
    int64_t integer;
    float real;
    const char *text; /* Borrowed; NULL unless a string */
} checkpoint_property_t;

typedef struct checkpoint_s {
    bool is_nominal;
    checkpoint_parameter_t *parameters; /* Owned if read; trained ones first */
    int n_parameters;
    checkpoint_group_t *groups; /* Owned if read */
    int n_groups;
    checkpoint_property_t *properties; /* Owned if read; integers, floats, strings */
    int n_properties;
} checkpoint_t;

/* Reads a file's bytes, which must outlive the checkpoint. Names of parameters, of one group's
 * states and of properties are each there once.
 *
 * Errors: MODEL (the bytes are not such a file), VERSION (a later version of the format), EXTDATA
 * (the values are in another file), UNSUPPORTED (an element type that the engine lacks, more
 * moments than CHECKPOINT_MOMENTS), LIMIT (a shape), NOMEM. */
gradd_status_t checkpoint_read(const void *bytes, size_t n, checkpoint_t *out_checkpoint);
/* Frees the lists of a checkpoint that was read. */
void checkpoint_finish(checkpoint_t *checkpoint);

/* A file as it lies in memory: tables of its own, and values where the caller has them. */
typedef struct checkpoint_file_s {
    gradd_file_part_t *parts; /* Owned; one after the other they are the file */
    int n_parts;
    void *tables, *between; /* Owned: what the parts name beside the caller's values */
} checkpoint_file_t;

/* Lays out the file; values are not copied and must outlive it. Errors: LIMIT (FlatBuffers end at
 * 2 GiB), NOMEM. */
gradd_status_t checkpoint_write(const checkpoint_t *checkpoint, checkpoint_file_t *out_file);
void checkpoint_file_finish(checkpoint_file_t *file);

#endif

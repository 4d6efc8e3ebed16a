/* Arguments of `gradd explain` and `gradd estimate`, which take files and shapes and are therefore
 * parsed apart from the options of options.inc.
 *
 *     gradd explain model.onnx input_ids=4x256 --train all --json
 */
#ifndef GRADD_SERVER_EXPLAIN_EXPLAIN_ARGS_H
#define GRADD_SERVER_EXPLAIN_EXPLAIN_ARGS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "shm/status.h"
#include "shm/tensor.h"

#define EXPLAIN_MAX_SHAPES  256
#define EXPLAIN_MAX_BATCHES 32

/* "input_ids=4x256" or, after --dim, "batch=4". */
typedef struct explain_shape_s {
    const char *name; /* Borrowed from argv; n_name bytes */
    size_t n_name;
    int rank;
    int64_t dims[GRADD_MAX_RANK];
} explain_shape_t;

/* All texts are borrowed from argv or the environment; NULL = not given. */
typedef struct explain_args_s {
    const char *model; /* NULL: a plan of the running daemon */
    explain_shape_t shapes[EXPLAIN_MAX_SHAPES];
    explain_shape_t symbols[EXPLAIN_MAX_SHAPES];
    int n_shapes, n_symbols;
    const char *train, *out, *grad; /* lists with commas; train may be "all" */
    const char *onnx, *gradient;    /* files to write */
    const char *dir, *optimizer;
    int64_t threads, session, plan; /* session and plan: -1 = not given */
    int64_t batches[EXPLAIN_MAX_BATCHES];
    int n_batches;
    double fits_gib;       /* 0 = not asked for */
    double labelled, real; /* shares of rows, 0 to 1; -1 = not given */
    unsigned given;        /* which options were, a bit per row of the table */
    int64_t memory_budget; /* 0 = none */
    const char *recompute;
    bool json, plain, list, help, accumulate, curve;
    bool dense_loss; /* as a daemon started here would have it */
} explain_args_t;

/* The uses of the arguments; one bit each. */
typedef enum explain_use_e {
    EXPLAIN_LIVE = 1, /* explain without a file */
    EXPLAIN_FILE = 2,
    EXPLAIN_ESTIMATE = 4,
} explain_use_t;

/* argv without program and command. Fails with UNSUPPORTED or LIMIT and a sentence for the user. */
gradd_status_t explain_args_parse(int argc, char **argv, explain_args_t *out_args);
/* Fails with UNSUPPORTED where an option was given that this use has none for. */
gradd_status_t explain_args_check(const explain_args_t *args, explain_use_t use);
void explain_args_usage(FILE *out);
void estimate_args_usage(FILE *out);

/* The next name of a list with commas: moves *list on; false at the end. */
bool explain_next_name(const char **list, const char **out_name, size_t *out_bytes);

#endif

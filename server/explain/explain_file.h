/* An ONNX file for explain and estimate: the loaded model, and the unpacked message with the parts
 * that the engine does not use: names of symbolic dimensions, sources of nodes, annotations. */
#ifndef GRADD_SERVER_EXPLAIN_EXPLAIN_FILE_H
#define GRADD_SERVER_EXPLAIN_EXPLAIN_FILE_H

#include "server/api/gradd.h"
#include "server/explain/explain_args.h"
#include "server/explain/explain_report.h"
#include "server/graph/arena.h"
#include "server/graph/onnx.pb-c.h"

typedef struct explain_file_s {
    const char *path; /* Borrowed */
    arena_t *arena;   /* Owned: bytes and message */
    void *bytes;      /* in the arena */
    size_t n_bytes;
    Onnx__ModelProto *proto; /* in the arena */
    gradd_model_t *model;    /* Owned */
} explain_file_t;

/* Fails with IO and with all codes of gradd_model_load. */
gradd_status_t explain_file_open(const char *path, explain_file_t *out_file);
void explain_file_finish(explain_file_t *file); /* accepts a zeroed one */

/* "model.layers.0.mlp @ /path/file.py:12" from the metadata of a node; "" if the file has none. */
const char *explain_file_source(const explain_file_t *file, int node);
/* Name of a symbolic dimension of an input, NULL if it has none. */
const char *explain_file_symbol(const explain_file_t *file, const char *input, int dim);

/* Writes the model with doc_string and metadata_props of every node telling what became of it
 * (explain_report_notes). Everything that the file held stays. Fails with IO, NOMEM. */
gradd_status_t explain_file_annotate(const explain_file_t *file, const explain_report_t *report,
                                     const char *path);

/* Packs and writes a model; the arena holds the bytes. Fails with IO, NOMEM, LIMIT (2 GiB). */
gradd_status_t explain_write(arena_t *arena, const Onnx__ModelProto *proto, const char *path);

/* Writes forward and backward as a model in ONNX's own operators, for the sizes of the options
 * (gradient_model.c): outputs are those of the options, then the gradient of each trained input
 * that the outputs depend on, called <input>_grad. What arrives at an output whose gradient may
 * arrive, of one element, is 1. Fails with UNSUPPORTED (names the node that has no ONNX), GRAPH
 * (names that clash), TENSOR (more elements), IO, NOMEM, LIMIT, and as gradd_plan_create. */
gradd_status_t explain_file_gradient(const explain_file_t *file,
                                     const gradd_plan_options_t *options, const char *path);

/* ---- which plan (explain_ask.c) ---- */

typedef struct explain_ask_s {
    arena_t *arena;               /* Owned: the arrays of options */
    gradd_plan_options_t options; /* the device is Owned */
} explain_ask_t;

/* Turns names and sizes into options. batch > 0 replaces the first size of the shapes that were
 * given, and the symbol "batch". Fails with TENSOR: names every input that lacks a size. */
gradd_status_t explain_ask(const explain_file_t *file, const explain_args_t *args, int64_t batch,
                           explain_ask_t *out_ask);
void explain_ask_finish(explain_ask_t *ask);

#endif

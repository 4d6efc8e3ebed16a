/* An explanation ready to be printed, wherever it came from: a plan made in this process, or the
 * daemon's reply. Printing is in explain_text.c (a table) and explain_json.c.
 */
#ifndef GRADD_SERVER_EXPLAIN_REPORT_H
#define GRADD_SERVER_EXPLAIN_REPORT_H

#include <stdio.h>

#include "server/api/gradd.h"
#include "server/graph/arena.h"

/* One row; texts belong to the report's arena or to the plan. */
typedef struct explain_line_s {
    int row, step, node; /* step -1 = not run, node -1 = a copy */
    const char *kind;    /* run, copy, view, none */
    bool backward, leftover;
    const char *op, *domain, *kernel, *node_name, *node_op;
    const char *fused;  /* "Pow ReduceMean Mul×2", "" = as the model wrote it */
    const char *source; /* "model.layers.0 @ /path/file.py:12", "" = not known */
    gradd_type_t type;
    int64_t bytes_read, bytes_written, work_bytes, saved_bytes;
    double flops;
} explain_line_t;

#define EXPLAIN_FATES 6

/* Nodes of one operator that met one fate. */
typedef struct explain_fate_s {
    gradd_fate_t fate;
    const char *op;
    int count;
} explain_fate_t;

typedef struct explain_report_s {
    arena_t *arena; /* Owned */
    const char *title, *library;
    int threads;
    int64_t arena_bytes, saved_bytes, constant_bytes, input_bytes, output_bytes, grad_bytes;
    double compile_ms;
    explain_line_t *lines; /* Owned */
    int n_lines, cap_lines;
    explain_fate_t *fates; /* Owned; sorted by fate, then count */
    int n_fates, cap_fates;
    int32_t *nodes; /* in the arena; per node of the model its fate and its row; NULL = not known */
    int n_nodes;
} explain_report_t;

typedef struct explain_source_s {
    const char *(*of_node)(const void *context, int node); /* "" = not known */
    const void *context;
} explain_source_t;

/* From a plan; plan, model and the explanation may go afterwards. Fails with NOMEM. */
gradd_status_t explain_report_make(const gradd_plan_t *plan, const gradd_explain_t *explain,
                                   const explain_source_t *source, explain_report_t *out_report);
void explain_report_finish(explain_report_t *report); /* accepts a zeroed one */

/* Room for one more; NULL without memory. */
explain_line_t *explain_report_line(explain_report_t *report);
explain_fate_t *explain_report_fate(explain_report_t *report);

/* What a recognised operator stands for: the operators of its nodes in the model's order, with
 * counts. In the arena; NULL without memory. */
const char *explain_fused_text(arena_t *arena, const gradd_explain_t *explain,
                               const gradd_explain_row_t *row);
const char *explain_kind_name(gradd_explain_kind_t kind);

void explain_print_text(FILE *out, const explain_report_t *report);
void explain_print_json(FILE *out, const explain_report_t *report);

/* "3.2 MiB" and "3.2 M" into a buffer of 24 bytes. */
const char *explain_amount(int64_t bytes, char buffer[24]);
const char *explain_number(double value, char buffer[24]);
/* A JSON string with its quotes. */
void explain_json_text(FILE *out, const char *text);

#endif

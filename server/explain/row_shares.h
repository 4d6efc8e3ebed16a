/* Rows that a step leaves out, for explain and estimate of a model file: there is no batch whose
 * labels and mask could be counted, so shares of rows are given in their place. The choice is the
 * one that trainers make (adapters/python/gradd/calls/liverows.py).
 */
#ifndef GRADD_SERVER_EXPLAIN_ROW_SHARES_H
#define GRADD_SERVER_EXPLAIN_ROW_SHARES_H

#include "server/api/gradd.h"
#include "server/explain/explain_args.h"
#include "server/explain/explain_file.h"

typedef struct explain_rows_s {
    int64_t rows;        /* of the batch; 0 = not asked for */
    int64_t labelled;    /* that are computed behind the last attention; 0 = no such list */
    int64_t real;        /* that are computed in front of it; 0 = no such list */
    double percent;      /* fewer operations of the forward */
    int64_t whole_bytes; /* activations over all rows, with everything kept */
} explain_rows_t;

/* Sizes of the lists for these shares of rows, from 0 to 1; below 0: there is no such list. Fails
 * with UNSUPPORTED where the graph has no such rows, or more are labelled than real. */
gradd_status_t explain_rows_choose(const gradd_live_t *live, double labelled, double real,
                                   explain_rows_t *out);

/* The plan that the arguments ask for, with its rows left out. *out_ask must be finished after the
 * plan is destroyed, whatever comes of it. Fails as explain_ask, gradd_plan_create and
 * explain_rows_choose. */
gradd_status_t explain_file_plan(const explain_file_t *file, const explain_args_t *args,
                                 int64_t batch, explain_ask_t *out_ask, explain_rows_t *out_rows,
                                 gradd_plan_t **out_plan);

#endif

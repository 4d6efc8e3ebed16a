/* `gradd explain` and `gradd estimate` of a model file: compiled in this process, and printed.
 * Nothing is run.
 */
#ifndef GRADD_SERVER_EXPLAIN_EXPLAIN_H
#define GRADD_SERVER_EXPLAIN_EXPLAIN_H

#include "server/explain/explain_file.h"
#include "server/explain/explain_report.h"

/* Prints the explanation of a plan of args->model. Errors as gradd_plan_create, IO. */
gradd_status_t explain_model(const explain_args_t *args);
/* Prints planned memory per batch size. */
gradd_status_t estimate_model(const explain_args_t *args);

#endif

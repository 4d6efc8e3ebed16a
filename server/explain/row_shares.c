/* Sizes of lists of live rows from shares of rows. See row_shares.h. */
#include "server/explain/row_shares.h"

#include <math.h>

#define LEAST_SHARE 0.02 /* of the forward's operations that a list has to save */
#define LEAST_SIZE  8
#define DIGITS      4 /* significant bits of a size */

/* The next size of a list: at most eight to an octave. */
static int64_t rounded(int64_t n) {
    int shift = 0;
    if (n < LEAST_SIZE) n = LEAST_SIZE;
    while (n >> shift >= 1 << DIGITS)
        shift++;
    return (n + ((int64_t)1 << shift) - 1) >> shift << shift;
}

/* Size of the list for a share of the rows, 0 where it saves too little; `part` of the operations
 * are made in these rows. */
static int64_t size_of(int64_t rows, double share, double part) {
    const int64_t size = rounded((int64_t)ceil(share * (double)rows));
    return part * (1 - (double)size / (double)rows) >= LEAST_SHARE ? size : 0;
}

gradd_status_t explain_rows_choose(const gradd_live_t *live, double labelled, double real,
                                   explain_rows_t *out) {
    *out = (explain_rows_t){0};
    if (labelled < 0 && real < 0) return GRADD_OK;
    if (live->label_input < 0)
        return GRADD_FAIL(
            UNSUPPORTED, "--labelled, --real: the graph has no rows to leave out: no wanted output "
                         "is a cross-entropy with an ignore_index whose labels are an input");
    if (real >= 0 && live->mask_input < 0)
        return GRADD_FAIL(UNSUPPORTED, "--real: the graph depends on padding, or has no mask that "
                                       "hides it");
    if (real >= 0 && labelled > real)
        return GRADD_FAIL(UNSUPPORTED, "--labelled %g is more than --real %g: padding has no label",
                          labelled, real);
    const int64_t n = live->batch * live->positions;
    const double behind = live->label_share, front = live->real_share;
    out->rows = n;
    if (labelled >= 0) out->labelled = size_of(n, labelled, behind);
    if (real >= 0) out->real = size_of(n, real, out->labelled ? front : front + behind);
    const int64_t padding = out->real ? n - out->real : 0;
    const int64_t unlabelled = out->labelled ? n - out->labelled : padding;
    out->percent = 100 * (behind * (double)unlabelled + front * (double)padding) / (double)n;
    return GRADD_OK;
}

/* Over all rows: what could be left out does not depend on a budget, nor does it have to be met. */
static gradd_status_t look(const explain_file_t *file, const explain_args_t *args,
                           const gradd_plan_options_t *options, explain_rows_t *out) {
    gradd_plan_options_t whole = *options;
    gradd_plan_t *plan = NULL;
    if (args->labelled < 0 && args->real < 0) return GRADD_OK;
    whole.memory_budget = 0;
    whole.recompute = GRADD_RECOMPUTE_NONE;
    GRADD_TRY(gradd_plan_create(file->model, &whole, &plan));
    const gradd_plan_info_t *info = gradd_plan_info(plan);
    gradd_status_t status = explain_rows_choose(&info->live, args->labelled, args->real, out);
    out->whole_bytes = info->arena_bytes;
    gradd_plan_destroy(plan);
    return status;
}

gradd_status_t explain_file_plan(const explain_file_t *file, const explain_args_t *args,
                                 int64_t batch, explain_ask_t *out_ask, explain_rows_t *out_rows,
                                 gradd_plan_t **out_plan) {
    *out_rows = (explain_rows_t){0};
    GRADD_TRY(explain_ask(file, args, batch, out_ask));
    gradd_plan_options_t *options = &out_ask->options;
    GRADD_TRY(look(file, args, options, out_rows));
    options->label_rows = out_rows->labelled;
    options->real_rows = out_rows->real;
    return gradd_plan_create(file->model, options, out_plan);
}

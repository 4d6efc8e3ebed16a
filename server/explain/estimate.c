/* `gradd estimate`: the planned memory of training, per batch size, before anything is run.
 *
 * Everything is read off plans: a plan is made for each batch size, which takes milliseconds, and
 * its sizes are exact. The largest batch that fits is found by doubling and bisection over plans.
 * See explain.h. */
#include <string.h>

#include "server/explain/estimate.h"
#include "server/explain/explain.h"
#include "server/explain/row_shares.h"

#define MAX_BATCH ((int64_t)1 << 20)

static bool is_trained(const gradd_plan_options_t *o, int input, const gradd_plan_info_t *info) {
    for (int i = 0; i < o->n_grads; i++)
        if (o->grads[i] == input) return info->has_grad[i];
    return false;
}

/* An input that the call gives: one with a size that the graph leaves open, or an integer. */
static bool is_data(const gradd_model_t *m, int input) {
    gradd_type_t type = gradd_model_input_type(m, input);
    bool open = type.rank < 0 || !gradd_dtype_is_float(type.dtype);
    for (int d = 0; d < type.rank; d++)
        open |= type.dims[d] < 0;
    return open;
}

static estimate_role_t role_of(const gradd_model_t *m, const gradd_plan_options_t *o, int input,
                               const gradd_plan_info_t *info) {
    if (is_trained(o, input, info)) return ESTIMATE_TRAINED;
    return is_data(m, input) ? ESTIMATE_DATA : ESTIMATE_FROZEN;
}

static void add_up(const gradd_model_t *m, const gradd_plan_options_t *o,
                   const gradd_plan_info_t *info, const explain_args_t *args,
                   const optimizer_t *optimizer, estimate_t *e) {
    for (int i = 0; i < o->n_inputs; i++)
        estimate_add_input(e, role_of(m, o, i, info), &o->inputs[i], optimizer);
    estimate_add_plan(e, info, o->grad_outputs, o->n_grad_outputs);
    estimate_finish(e, args->accumulate);
}

/* An estimate, and the rows that its plan leaves out. */
typedef struct estimate_entry_s {
    estimate_t e;
    explain_rows_t rows;
} estimate_entry_t;

typedef struct subject_s {
    const explain_file_t *file;
    const explain_args_t *args;
    const optimizer_t *optimizer;
} subject_t;

static gradd_status_t estimate_batch(const subject_t *s, int64_t batch, bool with_curve,
                                     estimate_entry_t *out) {
    const explain_file_t *file = s->file;
    const explain_args_t *args = s->args;
    const optimizer_t *optimizer = s->optimizer;
    explain_ask_t ask = {0};
    gradd_plan_t *plan = NULL;
    gradd_status_t status = explain_file_plan(file, args, batch, &ask, &out->rows, &plan);
    if (!status) {
        out->e = (estimate_t){.batch = batch};
        add_up(file->model, &ask.options, gradd_plan_info(plan), args, optimizer, &out->e);
        if (with_curve) status = gradd_plan_curve(plan, &out->e.curve);
    }
    gradd_plan_destroy(plan);
    explain_ask_finish(&ask);
    return status;
}

/* The total of a plan that does not meet the memory budget is no number. */
static gradd_status_t try_batch(const subject_t *s, int64_t batch, estimate_entry_t *out) {
    gradd_status_t status = estimate_batch(s, batch, false, out);
    if (status != GRADD_E_NOMEM || !s->args->memory_budget) return status;
    out->e.total = INT64_MAX;
    return GRADD_OK;
}

/* The largest batch whose total is at most `limit`; batch 0 if not even one fits. */
static gradd_status_t largest(const subject_t *s, int64_t limit, estimate_entry_t *out) {
    estimate_entry_t good = {0}, now;
    int64_t low = 0, high = 1;
    for (; high <= MAX_BATCH; high *= 2) {
        GRADD_TRY(try_batch(s, high, &now));
        if (now.e.total > limit) break;
        good = now;
        low = high;
    }
    while (high - low > 1 && high <= MAX_BATCH) {
        int64_t middle = low + (high - low) / 2;
        GRADD_TRY(try_batch(s, middle, &now));
        if (now.e.total > limit) {
            high = middle;
        } else {
            low = middle;
            good = now;
        }
    }
    *out = good;
    return GRADD_OK;
}

/* ---- printing -------------------------------------------------------------------------------- */

static void print_curve(const gradd_curve_t *curve) {
    char line[ESTIMATE_CURVE_LINE];
    puts("\n" ESTIMATE_CURVE_HEAD);
    for (int i = 0; i < curve->n; i++)
        puts(estimate_curve_line(curve, i, line));
}

/* Where the arena is one of a budget, that over all rows is nothing to compare it with. */
static void print_rows(const estimate_entry_t *entry, bool budget) {
    const explain_rows_t *r = &entry->rows;
    const int64_t front = r->real ? r->real : r->rows, behind = r->labelled ? r->labelled : front;
    char buffer[24];
    printf("of %lld rows %lld are needed, %lld behind the last attention: %.0f %% fewer operations",
           (long long)r->rows, (long long)front, (long long)behind, r->percent);
    if (!budget)
        printf("\n(over all rows activations take %s)", explain_amount(r->whole_bytes, buffer));
    putchar('\n');
}

static void print_text(const estimate_entry_t *list, int n, const subject_t *s) {
    char buffer[24];
    printf("%-26s", "batch");
    for (int i = 0; i < n; i++)
        if (list[i].e.batch)
            printf(" %12lld", (long long)list[i].e.batch);
        else
            printf(" %12s", "as given");
    putchar('\n');
    for (const estimate_part_t *part = estimate_parts; part->key; part++) {
        printf("%-26s", part->heading);
        for (int i = 0; i < n; i++)
            printf(" %12s", explain_amount(estimate_value(&list[i].e, part), buffer));
        putchar('\n');
    }
    for (int i = 0; i < n; i++) {
        if (!list[i].rows.rows) continue;
        if (n > 1) printf("batch %lld: ", (long long)list[i].e.batch);
        print_rows(&list[i], s->args->memory_budget || s->args->recompute);
    }
    for (int i = 0; i < n; i++) {
        if (!list[i].e.curve.n) continue;
        if (n > 1) printf("\nbatch %lld", (long long)list[i].e.batch);
        print_curve(&list[i].e.curve);
    }
    printf(ESTIMATE_FOOT "\n", s->optimizer->name);
}

static void print_json_curve(const gradd_curve_t *curve) {
    if (!curve->n) return;
    fputs(", \"curve\": [", stdout);
    for (int i = 0; i < curve->n; i++)
        printf("%s{\"activations\": %lld, \"recomputed\": %lld, \"percent\": %.2f}", i ? ", " : "",
               (long long)curve->points[i].arena_bytes,
               (long long)curve->points[i].recomputed_bytes, estimate_percent(curve, i));
    putchar(']');
}

static void print_json_rows(const explain_rows_t *r) {
    if (!r->rows) return;
    printf(", \"live\": {\"rows\": %lld, \"labelled\": %lld, \"real\": %lld, "
           "\"whole_activations\": %lld, \"percent\": %.2f}",
           (long long)r->rows, (long long)r->labelled, (long long)r->real,
           (long long)r->whole_bytes, r->percent);
}

static void print_json(const estimate_entry_t *list, int n, const char *optimizer) {
    printf("{\"optimizer\": \"%s\", \"estimates\": [", optimizer);
    for (int i = 0; i < n; i++) {
        printf("%s{\"batch\": %lld", i ? ", " : "", (long long)list[i].e.batch);
        for (const estimate_part_t *part = estimate_parts; part->key; part++)
            printf(", \"%s\": %lld", part->key, (long long)estimate_value(&list[i].e, part));
        print_json_rows(&list[i].rows);
        print_json_curve(&list[i].e.curve);
        putchar('}');
    }
    fputs("]}\n", stdout);
}

static gradd_status_t estimate_file(const subject_t *s) {
    estimate_entry_t list[EXPLAIN_MAX_BATCHES + 1];
    const explain_args_t *args = s->args;
    const bool curve = args->curve || args->n_batches + (args->fits_gib > 0) <= 1;
    int n = 0;
    for (int i = 0; i < args->n_batches; i++)
        GRADD_TRY(estimate_batch(s, args->batches[i], curve, &list[n++]));
    if (args->fits_gib > 0) {
        int64_t limit = (int64_t)(args->fits_gib * (double)(1LL << 30));
        GRADD_TRY(largest(s, limit, &list[n]));
        const int64_t batch = list[n].e.batch;
        if (!batch)
            return GRADD_FAIL(LIMIT, "not even a batch of 1 fits into %g GiB", args->fits_gib);
        if (curve) GRADD_TRY(estimate_batch(s, batch, true, &list[n]));
        n++;
    }
    if (!n) GRADD_TRY(estimate_batch(s, 0, curve, &list[n++]));
    if (args->json)
        print_json(list, n, s->optimizer->name);
    else
        print_text(list, n, s);
    return GRADD_OK;
}

gradd_status_t estimate_model(const explain_args_t *given) {
    explain_args_t args = *given;
    const optimizer_t *optimizer = NULL;
    explain_file_t file = {0};
    if (!args.train) args.train = "all";
    GRADD_TRY(estimate_optimizer(args.optimizer, args.optimizer ? strlen(args.optimizer) : 0,
                                 "--optimizer", &optimizer));
    GRADD_TRY(explain_file_open(args.model, &file));
    gradd_status_t status = estimate_file(&(subject_t){&file, &args, optimizer});
    explain_file_finish(&file);
    return status;
}

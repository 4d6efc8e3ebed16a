/* `gradd estimate`: the planned memory of training, per batch size, before anything is run.
 *
 * Everything is read off plans: a plan is made for each batch size, which takes milliseconds, and
 * its sizes are exact. The largest batch that fits is found by doubling and bisection over plans.
 * See explain.h. */
#include <string.h>

#include "server/explain/explain.h"

#define MAX_BATCH ((int64_t)1 << 20)

/* Bytes of optimizer state per byte of parameter, and per element. */
typedef struct optimizer_s {
    const char *name;
    int per_byte, per_element;
} optimizer_t;

static const optimizer_t optimizers[] = {
    {"adamw",      2, 0}, /* torch: two moments in the type of the parameter */
    {"fused-adam", 0, 8}, /* gradd: two moments in f32 */
    {"momentum",   1, 0},
    {"sgd",        0, 0},
    {"none",       0, 0},
};

typedef struct estimate_s {
    int64_t batch; /* 0 = as given */
    int64_t parameters, frozen, gradients, second_slot, state;
    int64_t activations, constants, ring, total;
} estimate_t;

static gradd_status_t find_optimizer(const char *name, const optimizer_t **out) {
    for (size_t i = 0; i < sizeof optimizers / sizeof optimizers[0]; i++)
        if (!strcmp(name ? name : "adamw", optimizers[i].name)) {
            *out = &optimizers[i];
            return GRADD_OK;
        }
    return GRADD_FAIL(UNSUPPORTED,
                      "--optimizer '%.60s': expected adamw, fused-adam, momentum, sgd or none",
                      name);
}

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

static void add_up(const gradd_model_t *m, const gradd_plan_options_t *o,
                   const gradd_plan_info_t *info, const explain_args_t *args,
                   const optimizer_t *optimizer, estimate_t *e) {
    for (int i = 0; i < o->n_inputs; i++) {
        int64_t bytes = gradd_type_bytes(&o->inputs[i]);
        if (is_trained(o, i, info)) {
            e->parameters += bytes;
            e->gradients += bytes;
            e->state += bytes * optimizer->per_byte +
                        gradd_type_count(&o->inputs[i]) * optimizer->per_element;
        } else if (is_data(m, i)) {
            e->ring += bytes;
        } else {
            e->frozen += bytes;
        }
    }
    for (int j = 0; j < info->n_outputs; j++)
        e->ring += gradd_type_bytes(&info->outputs[j]);
    for (int k = 0; k < o->n_grad_outputs; k++) /* the gradients that arrive are copied, too */
        e->ring += gradd_type_bytes(&info->outputs[o->grad_outputs[k]]);
    e->second_slot = args->accumulate ? e->gradients : 0;
    e->activations = info->arena_bytes;
    e->constants = info->constant_bytes;
    e->total = e->parameters + e->frozen + e->gradients + e->second_slot + e->state +
               e->activations + e->constants + e->ring;
}

static gradd_status_t estimate_batch(const explain_file_t *file, const explain_args_t *args,
                                     const optimizer_t *optimizer, int64_t batch, estimate_t *out) {
    explain_ask_t ask = {0};
    gradd_plan_t *plan = NULL;
    GRADD_TRY(explain_ask(file, args, batch, &ask));
    gradd_status_t status = gradd_plan_create(file->model, &ask.options, &plan);
    if (!status) {
        *out = (estimate_t){.batch = batch};
        add_up(file->model, &ask.options, gradd_plan_info(plan), args, optimizer, out);
    }
    gradd_plan_destroy(plan);
    explain_ask_finish(&ask);
    return status;
}

/* The largest batch whose total is at most `limit`; batch 0 if not even one fits. */
static gradd_status_t largest(const explain_file_t *file, const explain_args_t *args,
                              const optimizer_t *optimizer, int64_t limit, estimate_t *out) {
    estimate_t good = {0}, now;
    int64_t low = 0, high = 1;
    for (; high <= MAX_BATCH; high *= 2) {
        GRADD_TRY(estimate_batch(file, args, optimizer, high, &now));
        if (now.total > limit) break;
        good = now;
        low = high;
    }
    while (high - low > 1 && high <= MAX_BATCH) {
        int64_t middle = low + (high - low) / 2;
        GRADD_TRY(estimate_batch(file, args, optimizer, middle, &now));
        if (now.total > limit) {
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

typedef struct field_s {
    const char *name, *what;
    size_t offset;
} field_t;

static const field_t fields[] = {
    {"parameters",  "parameters",             offsetof(estimate_t, parameters) },
    {"frozen",      "frozen parameters",      offsetof(estimate_t, frozen)     },
    {"gradients",   "gradients",              offsetof(estimate_t, gradients)  },
    {"second_slot", "second gradient slot",   offsetof(estimate_t, second_slot)},
    {"state",       "optimizer state",        offsetof(estimate_t, state)      },
    {"activations", "activations, workspace", offsetof(estimate_t, activations)},
    {"constants",   "constants of the plan",  offsetof(estimate_t, constants)  },
    {"ring",        "inputs and outputs",     offsetof(estimate_t, ring)       },
    {"total",       "total",                  offsetof(estimate_t, total)      },
};
#define N_FIELDS (sizeof fields / sizeof fields[0])

static int64_t value_of(const estimate_t *e, size_t field) {
    return *(const int64_t *)((const char *)e + fields[field].offset);
}

static void print_text(const estimate_t *list, int n, const char *optimizer) {
    char buffer[24];
    printf("%-26s", "batch");
    for (int i = 0; i < n; i++)
        if (list[i].batch)
            printf(" %12lld", (long long)list[i].batch);
        else
            printf(" %12s", "as given");
    putchar('\n');
    for (size_t f = 0; f < N_FIELDS; f++) {
        printf("%-26s", fields[f].what);
        for (int i = 0; i < n; i++)
            printf(" %12s", explain_amount(value_of(&list[i], f), buffer));
        putchar('\n');
    }
    printf("(optimizer %s; processes without a model take what they take besides)\n", optimizer);
}

static void print_json(const estimate_t *list, int n, const char *optimizer) {
    printf("{\"optimizer\": \"%s\", \"estimates\": [", optimizer);
    for (int i = 0; i < n; i++) {
        printf("%s{\"batch\": %lld", i ? ", " : "", (long long)list[i].batch);
        for (size_t f = 0; f < N_FIELDS; f++)
            printf(", \"%s\": %lld", fields[f].name, (long long)value_of(&list[i], f));
        putchar('}');
    }
    fputs("]}\n", stdout);
}

static gradd_status_t estimate_file(const explain_file_t *file, const explain_args_t *args,
                                    const optimizer_t *optimizer) {
    estimate_t list[EXPLAIN_MAX_BATCHES + 1];
    int n = 0;
    for (int i = 0; i < args->n_batches; i++)
        GRADD_TRY(estimate_batch(file, args, optimizer, args->batches[i], &list[n++]));
    if (args->fits_gib > 0) {
        int64_t limit = (int64_t)(args->fits_gib * (double)(1LL << 30));
        GRADD_TRY(largest(file, args, optimizer, limit, &list[n]));
        if (!list[n].batch)
            return GRADD_FAIL(LIMIT, "not even a batch of 1 fits into %g GiB", args->fits_gib);
        n++;
    }
    if (!n) GRADD_TRY(estimate_batch(file, args, optimizer, 0, &list[n++]));
    if (args->json)
        print_json(list, n, optimizer->name);
    else
        print_text(list, n, optimizer->name);
    return GRADD_OK;
}

gradd_status_t estimate_model(const explain_args_t *given) {
    explain_args_t args = *given;
    const optimizer_t *optimizer = NULL;
    explain_file_t file = {0};
    if (!args.train) args.train = "all";
    GRADD_TRY(find_optimizer(args.optimizer, &optimizer));
    GRADD_TRY(explain_file_open(args.model, &file));
    gradd_status_t status = estimate_file(&file, &args, optimizer);
    explain_file_finish(&file);
    return status;
}

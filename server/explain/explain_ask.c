/* From names and sizes on the command line to the options of a plan. See explain_file.h. */
#include <stdlib.h>
#include <string.h>

#include "server/explain/explain_file.h"

#define LIST_TEXT 1500 /* of the inputs that an error names */
#define NAMES_END 500  /* bytes of names after which a list of them ends */

typedef const char *(*name_of_t)(const gradd_model_t *model, int i);

typedef struct symbol_s {
    const char *name;
    size_t n_name;
    int64_t size;
    const char *from; /* where the size comes from, for messages */
} symbol_t;

typedef struct asker_s {
    const explain_file_t *file;
    const explain_args_t *args;
    int64_t batch;
    arena_t *arena;
    symbol_t *symbols;
    int n_symbols;
} asker_t;

static bool same(const char *name, const char *text, size_t n) {
    return strlen(name) == n && !memcmp(name, text, n);
}

static const explain_shape_t *given_shape(const explain_args_t *args, const char *input) {
    for (int i = 0; i < args->n_shapes; i++)
        if (same(input, args->shapes[i].name, args->shapes[i].n_name)) return &args->shapes[i];
    return NULL;
}

/* ---- sizes ----------------------------------------------------------------------------------- */

static gradd_status_t learn(asker_t *a, const char *name, size_t n, int64_t size,
                            const char *from) {
    for (int i = 0; i < a->n_symbols; i++) {
        const symbol_t *s = &a->symbols[i];
        if (s->n_name != n || memcmp(s->name, name, n)) continue;
        if (s->size == size) return GRADD_OK;
        return GRADD_FAIL(TENSOR, "dimension '%.*s' is %lld for '%.100s' and %lld for '%.100s'",
                          (int)n, name, (long long)s->size, s->from, (long long)size, from);
    }
    a->symbols[a->n_symbols++] = (symbol_t){name, n, size, from};
    return GRADD_OK;
}

static int64_t symbol_size(const asker_t *a, const char *name) {
    for (int i = 0; name && i < a->n_symbols; i++)
        if (same(name, a->symbols[i].name, a->symbols[i].n_name)) return a->symbols[i].size;
    return -1;
}

static int64_t size_in(const asker_t *a, const explain_shape_t *shape, int dim) {
    return dim == 0 && a->batch > 0 ? a->batch : shape->dims[dim];
}

static bool is_batch(const explain_shape_t *symbol) {
    return same("batch", symbol->name, symbol->n_name);
}

/* Learns the symbols of the inputs from the given shapes. */
static gradd_status_t learn_symbols(asker_t *a) {
    const gradd_model_t *m = a->file->model;
    int n = gradd_model_n_inputs(m);
    size_t room = (size_t)a->args->n_symbols + (size_t)n * GRADD_MAX_RANK + 1;
    if (!(a->symbols = arena_array(a->arena, room, sizeof a->symbols[0]))) return GRADD_E_NOMEM;
    for (int i = 0; i < a->args->n_symbols; i++) {
        const explain_shape_t *s = &a->args->symbols[i];
        int64_t size = a->batch > 0 && is_batch(s) ? a->batch : s->dims[0];
        GRADD_TRY(learn(a, s->name, s->n_name, size, "--dim"));
    }
    for (int i = 0; i < n; i++) {
        const char *input = gradd_model_input_name(m, i);
        const explain_shape_t *shape = given_shape(a->args, input);
        for (int d = 0; shape && d < shape->rank; d++) {
            const char *symbol = explain_file_symbol(a->file, input, d);
            if (symbol) GRADD_TRY(learn(a, symbol, strlen(symbol), size_in(a, shape, d), input));
        }
    }
    return GRADD_OK;
}

/* " input_ids=d0xd1" at the end of a list. */
static void append_form(const asker_t *a, int i, char *list) {
    const char *input = gradd_model_input_name(a->file->model, i);
    gradd_type_t type = gradd_model_input_type(a->file->model, i);
    size_t at = strlen(list);
    at += (size_t)snprintf(list + at, LIST_TEXT - at, " %.200s=", input);
    for (int d = 0; d < type.rank && at < LIST_TEXT - 40; d++) {
        const char *symbol = explain_file_symbol(a->file, input, d);
        const char *between = d ? "x" : "";
        if (type.dims[d] >= 0)
            at += (size_t)snprintf(list + at, LIST_TEXT - at, "%s%lld", between,
                                   (long long)type.dims[d]);
        else
            at += (size_t)snprintf(list + at, LIST_TEXT - at, "%s%.20s", between,
                                   symbol ? symbol : "?");
    }
    if (type.rank < 0) snprintf(list + at, LIST_TEXT - at, "?");
}

/* The type of input i; false if a size is not known. */
static bool settle(const asker_t *a, int i, gradd_type_t *out) {
    const char *input = gradd_model_input_name(a->file->model, i);
    const explain_shape_t *shape = given_shape(a->args, input);
    gradd_type_t type = gradd_model_input_type(a->file->model, i);
    if (shape) {
        type.rank = shape->rank;
        for (int d = 0; d < shape->rank; d++)
            type.dims[d] = size_in(a, shape, d);
    }
    if (type.rank < 0) return false;
    for (int d = 0; d < type.rank; d++)
        if (type.dims[d] < 0) type.dims[d] = symbol_size(a, explain_file_symbol(a->file, input, d));
    *out = type;
    for (int d = 0; d < type.rank; d++)
        if (type.dims[d] < 0) return false;
    return true;
}

static gradd_status_t settle_all(const asker_t *a, gradd_type_t *types) {
    char missing[LIST_TEXT] = "";
    int n = gradd_model_n_inputs(a->file->model), n_missing = 0;
    for (int i = 0; i < n; i++) {
        if (settle(a, i, &types[i])) continue;
        n_missing++;
        if (strlen(missing) < LIST_TEXT - 300) append_form(a, i, missing);
    }
    if (!n_missing) return GRADD_OK;
    return GRADD_FAIL(TENSOR, "%d input%s without a size; give a number for each letter of:%s",
                      n_missing, n_missing == 1 ? " is" : "s are", missing);
}

static gradd_status_t check_shapes(const asker_t *a) {
    for (int i = 0; i < a->args->n_shapes; i++) {
        const explain_shape_t *s = &a->args->shapes[i];
        bool found = false;
        char all[LIST_TEXT] = "";
        for (int k = 0; k < gradd_model_n_inputs(a->file->model); k++) {
            gradd_type_t type = gradd_model_input_type(a->file->model, k);
            bool dynamic = type.rank < 0;
            found |= same(gradd_model_input_name(a->file->model, k), s->name, s->n_name);
            for (int d = 0; d < type.rank; d++)
                dynamic |= type.dims[d] < 0;
            if (dynamic && strlen(all) < LIST_TEXT - 300) append_form(a, k, all);
        }
        if (!found)
            return GRADD_FAIL(
                TENSOR, "the graph has no input '%.*s'; those without a fixed size:%s",
                (int)(s->n_name < 200 ? s->n_name : 200), s->name, all[0] ? all : " none");
    }
    return GRADD_OK;
}

/* Adds " name" to a list, or an end to it when it is long. */
static void append_name(const char *name, char *list) {
    size_t at = strlen(list);
    if (at < NAMES_END)
        snprintf(list + at, LIST_TEXT - at, " %.200s", name);
    else if (strcmp(list + at - 4, " ...") != 0)
        snprintf(list + at, LIST_TEXT - at, " ...");
}

static bool in_list(const char *name, const char *list) {
    const size_t n = strlen(name);
    for (const char *at = list; (at = strstr(at, name)); at += n)
        if (at > list && at[-1] == ' ' && (at[n] == ' ' || !at[n])) return true;
    return false;
}

/* Whether an input has a dimension of this name; appends those that it has to `all`. */
static bool has_symbol(const asker_t *a, int input, const explain_shape_t *s, char *all) {
    const char *name = gradd_model_input_name(a->file->model, input);
    gradd_type_t type = gradd_model_input_type(a->file->model, input);
    for (int d = 0; d < type.rank; d++) {
        const char *symbol = explain_file_symbol(a->file, name, d);
        if (!symbol) continue;
        if (same(symbol, s->name, s->n_name)) return true;
        if (!in_list(symbol, all)) append_name(symbol, all);
    }
    return false;
}

static gradd_status_t check_symbols(const asker_t *a) {
    for (int i = 0; i < a->args->n_symbols; i++) {
        const explain_shape_t *s = &a->args->symbols[i];
        char all[LIST_TEXT] = "";
        bool found = false;
        for (int k = 0; k < gradd_model_n_inputs(a->file->model) && !found; k++)
            found = has_symbol(a, k, s, all);
        if (!found)
            return GRADD_FAIL(
                TENSOR, "--dim: no input has a dimension '%.*s'; those with a name:%s",
                (int)(s->n_name < 200 ? s->n_name : 200), s->name, all[0] ? all : " none");
    }
    return GRADD_OK;
}

/* ---- names ----------------------------------------------------------------------------------- */

/* The kinds of things that names can stand for. */
typedef struct named_s {
    const char *what;
    name_of_t name_of;
    int n;
} named_t;

static gradd_status_t no_such(const gradd_model_t *model, const named_t *named, const char *name,
                              size_t bytes) {
    char all[LIST_TEXT] = "";
    for (int i = 0; i < named->n; i++)
        append_name(named->name_of(model, i), all);
    return GRADD_FAIL(TENSOR, "the graph has no %s '%.*s'; it has:%s", named->what,
                      (int)(bytes < 200 ? bytes : 200), name, all[0] ? all : " none");
}

static gradd_status_t find_names(const gradd_model_t *model, const char *list, const named_t *named,
                                 int32_t *out, int *out_n) {
    const char *what = named->what;
    const name_of_t name_of = named->name_of;
    const int limit = named->n;
    const char *name;
    size_t bytes;
    while (explain_next_name(&list, &name, &bytes)) {
        int at = 0;
        while (at < limit && !same(name_of(model, at), name, bytes))
            at++;
        if (at == limit) return no_such(model, named, name, bytes);
        for (int k = 0; k < *out_n; k++)
            if (out[k] == at)
                return GRADD_FAIL(TENSOR, "%s '%s' is named twice", what, name_of(model, at));
        out[(*out_n)++] = at;
    }
    return GRADD_OK;
}

/* Every float input whose sizes the graph fixes: what a parameter looks like. */
static int all_parameters(const gradd_model_t *m, int32_t *out) {
    int n = 0;
    for (int i = 0; i < gradd_model_n_inputs(m); i++) {
        gradd_type_t type = gradd_model_input_type(m, i);
        bool fixed = type.rank >= 0 && gradd_dtype_is_float(type.dtype);
        for (int d = 0; d < type.rank; d++)
            fixed &= type.dims[d] >= 0;
        if (fixed) out[n++] = i;
    }
    return n;
}

/* Default outputs: the loss, if there is one and something is trained; else all. */
static int default_outputs(const gradd_model_t *m, bool trains, int32_t *out) {
    int n = gradd_model_n_outputs(m);
    for (int j = 0; j < n && trains; j++)
        if (!strcmp(gradd_model_output_name(m, j), "loss")) {
            out[0] = j;
            return 1;
        }
    for (int j = 0; j < n; j++)
        out[j] = j;
    return n;
}

/* The position of the first output of floats, which only a plan can tell. */
static gradd_status_t first_float(const asker_t *a, const gradd_plan_options_t *o, int32_t *out,
                                  int *out_n) {
    gradd_plan_options_t forward = *o;
    gradd_plan_t *plan = NULL;
    forward.n_grads = 0;
    if (o->n_outputs > 1) GRADD_TRY(gradd_plan_create(a->file->model, &forward, &plan));
    out[0] = 0;
    for (int i = 0; plan && i < o->n_outputs; i++) {
        if (!gradd_dtype_is_float(gradd_plan_info(plan)->outputs[i].dtype)) continue;
        out[0] = i;
        break;
    }
    *out_n = 1;
    gradd_plan_destroy(plan);
    return GRADD_OK;
}

/* Positions in `outputs` of the named ones; the first of floats by default. */
static gradd_status_t find_grad_outputs(const asker_t *a, const gradd_plan_options_t *o,
                                        int32_t *out, int *out_n) {
    const int32_t *outputs = o->outputs;
    const int n_outputs = o->n_outputs;
    const gradd_model_t *m = a->file->model;
    int n = 0;
    if (!a->args->grad) return first_float(a, o, out, out_n);
    GRADD_TRY(find_names(m, a->args->grad,
                         &(named_t){"output", gradd_model_output_name, gradd_model_n_outputs(m)},
                         out, &n));
    for (int k = 0; k < n; k++) {
        int at = 0;
        while (at < n_outputs && outputs[at] != out[k])
            at++;
        if (at == n_outputs)
            return GRADD_FAIL(TENSOR, "--grad: output '%s' is not among those of --out",
                              gradd_model_output_name(m, out[k]));
        out[k] = at;
    }
    *out_n = n;
    return GRADD_OK;
}

/* A batch size that nothing takes would give the same figures for every one. */
static gradd_status_t check_batch(const asker_t *a) {
    bool taken = a->batch <= 0;
    for (int i = 0; i < a->args->n_shapes; i++)
        taken |= a->args->shapes[i].rank > 0;
    for (int i = 0; i < a->args->n_symbols; i++)
        taken |= is_batch(&a->args->symbols[i]);
    if (taken) return GRADD_OK;
    return GRADD_FAIL(UNSUPPORTED, "--batch and --fits set the first size of inputs that are given "
                                   "as NAME=SIZES, or --dim batch=SIZE: neither is there");
}

static gradd_status_t fill(asker_t *a, gradd_plan_options_t *o) {
    const gradd_model_t *m = a->file->model;
    int n_in = gradd_model_n_inputs(m), n_out = gradd_model_n_outputs(m);
    gradd_type_t *types = arena_array(a->arena, (size_t)n_in + 1, sizeof types[0]);
    int32_t *grads = arena_array(a->arena, (size_t)n_in + 1, sizeof grads[0]);
    int32_t *outputs = arena_array(a->arena, (size_t)n_out + 1, sizeof outputs[0]);
    int32_t *arriving = arena_array(a->arena, (size_t)n_out + 1, sizeof arriving[0]);
    if (!types || !grads || !outputs || !arriving) return GRADD_E_NOMEM;
    *o = (gradd_plan_options_t){.inputs = types,
                                .n_inputs = n_in,
                                .grads = grads,
                                .outputs = outputs,
                                .grad_outputs = arriving,
                                .flags = GRADD_PLAN_EARLY, /* as trainers have it */
                                .device = o->device,
                                .memory_budget = a->args->memory_budget};
    if (a->args->plain) o->flags |= GRADD_PLAN_PLAIN;
    if (a->args->dense_loss) o->flags |= GRADD_PLAN_DENSE_LOSS;
    if (a->args->recompute)
        GRADD_TRY(gradd_recompute_find(a->args->recompute, strlen(a->args->recompute),
                                       "--recompute", &o->recompute));
    GRADD_TRY(settle_all(a, types));
    if (a->args->train && !strcmp(a->args->train, "all"))
        o->n_grads = all_parameters(m, grads);
    else if (a->args->train)
        GRADD_TRY(find_names(m, a->args->train, &(named_t){"input", gradd_model_input_name, n_in},
                             grads, &o->n_grads));
    o->parameters = o->grads; /* what is trained is taken for one */
    o->n_parameters = o->n_grads;
    if (a->args->out)
        GRADD_TRY(find_names(m, a->args->out, &(named_t){"output", gradd_model_output_name, n_out},
                             outputs, &o->n_outputs));
    else
        o->n_outputs = default_outputs(m, o->n_grads > 0, outputs);
    if (o->n_grads && o->n_outputs)
        GRADD_TRY(find_grad_outputs(a, o, arriving, &o->n_grad_outputs));
    return GRADD_OK;
}

gradd_status_t explain_ask(const explain_file_t *file, const explain_args_t *args, int64_t batch,
                           explain_ask_t *out_ask) {
    asker_t a = {.file = file, .args = args, .batch = batch};
    const gradd_device_options_t device = {.threads = (int)args->threads,
                                           .compile_ms = GRADD_COMPILE_MS};
    gradd_plan_options_t options = {0};
    GRADD_TRY(arena_create(0, &a.arena));
    gradd_status_t status = gradd_device_open(&device, &options.device);
    if (!status) status = check_shapes(&a);
    if (!status) status = check_symbols(&a);
    if (!status) status = check_batch(&a);
    if (!status) status = learn_symbols(&a);
    if (!status) status = fill(&a, &options);
    if (status) {
        gradd_device_close(options.device);
        arena_destroy(a.arena);
        return status;
    }
    *out_ask = (explain_ask_t){a.arena, options};
    return GRADD_OK;
}

void explain_ask_finish(explain_ask_t *ask) {
    gradd_device_close(ask->options.device);
    arena_destroy(ask->arena);
    *ask = (explain_ask_t){0};
}

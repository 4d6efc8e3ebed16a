/* The table of a commit: all of a state but its values. Numbers are little-endian, as on all
 * machines that the library is built for; texts stand behind what names them, without an end, and
 * zeros up to a multiple of 8. See lasting.h.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "train/lasting.h"

enum { HAS_SEED = 1, HAS_SCHEDULE = 2, ALL_FLAGS = 3 };

typedef struct table_head_s {
    uint64_t n_parameters, n_properties;
    int64_t step, position, warmup, total;
    uint64_t seed, draws;
    float learning_rate, initial_learning_rate;
    uint32_t flags, zero;
} table_head_t;

typedef struct table_parameter_s {
    int64_t dims[GRADD_MAX_RANK];
    int64_t steps;
    uint64_t at[STATE_PIECES]; /* bytes from the beginning of the file; 0 = none */
    int32_t dtype, rank;
    uint32_t trainable, name_bytes; /* the name is behind it */
} table_parameter_t;

typedef struct table_property_s {
    int64_t integer;
    float real;
    uint32_t kind, name_bytes, text_bytes; /* both behind it */
} table_property_t;

_Static_assert(sizeof(table_head_t) == 80 && sizeof(table_parameter_t) == 112 &&
                   sizeof(table_property_t) == 24,
               "the format has no padding");

static size_t padded(size_t n) {
    return (n + 7) / 8 * 8;
}

/* ---- writing --------------------------------------------------------------------------------- */

size_t lasting_table_bytes(const gradd_train_state_t *state) {
    size_t n = sizeof(table_head_t);
    for (int i = 0; i < state->n_parameters; i++)
        n += sizeof(table_parameter_t) + padded(strlen(state->parameters[i].name));
    for (int i = 0; i < state->n_properties; i++)
        n += sizeof(table_property_t) + padded(strlen(state->properties[i].name)) +
             padded(strlen(state->properties[i].text));
    return n;
}

static char *put(char *at, const void *from, size_t n) {
    memcpy(at, from, n);
    memset(at + n, 0, padded(n) - n);
    return at + padded(n);
}

static char *put_parameter(char *at, const train_parameter_t *p) {
    table_parameter_t made = {.steps = p->steps,
                              .dtype = (int32_t)p->type.dtype,
                              .rank = p->type.rank,
                              .trainable = p->trainable,
                              .name_bytes = (uint32_t)strlen(p->name)};
    for (int d = 0; d < p->type.rank; d++)
        made.dims[d] = p->type.dims[d];
    memcpy(made.at, p->places.next, sizeof made.at);
    return put(put(at, &made, sizeof made), p->name, made.name_bytes);
}

static char *put_property(char *at, const gradd_train_property_t *p) {
    const table_property_t made = {.integer = p->integer,
                                   .real = p->real,
                                   .kind = (uint32_t)p->kind,
                                   .name_bytes = (uint32_t)strlen(p->name),
                                   .text_bytes = (uint32_t)strlen(p->text)};
    at = put(put(at, &made, sizeof made), p->name, made.name_bytes);
    return put(at, p->text, made.text_bytes);
}

void lasting_table_write(const gradd_train_state_t *state, void *to) {
    const gradd_train_progress_t *progress = &state->progress;
    const train_course_t *course = &state->course;
    const table_head_t head = {.n_parameters = (uint64_t)state->n_parameters,
                               .n_properties = (uint64_t)state->n_properties,
                               .step = progress->step,
                               .position = progress->position,
                               .warmup = course->warmup,
                               .total = course->total,
                               .seed = course->seed,
                               .draws = course->draws,
                               .learning_rate = progress->learning_rate,
                               .initial_learning_rate = progress->initial_learning_rate,
                               .flags = (course->has_seed ? HAS_SEED : 0) |
                                        (course->has_schedule ? HAS_SCHEDULE : 0)};
    char *at = put(to, &head, sizeof head);
    for (int i = 0; i < state->n_parameters; i++)
        at = put_parameter(at, &state->parameters[i]);
    for (int i = 0; i < state->n_properties; i++)
        at = put_property(at, &state->properties[i]);
}

/* ---- reading --------------------------------------------------------------------------------- */

typedef struct table_reader_s {
    const char *at, *end;
} table_reader_t;

static gradd_status_t take(table_reader_t *r, size_t n, const void **out) {
    if ((size_t)(r->end - r->at) < n || (size_t)(r->end - r->at) < padded(n))
        return GRADD_FAIL(MODEL, "the table ends too early");
    *out = r->at;
    r->at += padded(n);
    return GRADD_OK;
}

static gradd_status_t take_struct(table_reader_t *r, void *to, size_t n) {
    const void *from = NULL;
    GRADD_TRY(take(r, n, &from));
    memcpy(to, from, n);
    return GRADD_OK;
}

/* To be freed. */
static gradd_status_t take_text(table_reader_t *r, size_t n, char **out) {
    const void *from = NULL;
    GRADD_TRY(take(r, n, &from));
    if (memchr(from, 0, n)) return GRADD_FAIL(MODEL, "a text has a zero byte inside");
    char *made = malloc(n + 1);
    if (!made) return GRADD_FAIL(NOMEM, "no memory for a text of %zu bytes", n);
    memcpy(made, from, n);
    made[n] = 0;
    *out = made;
    return GRADD_OK;
}

static gradd_status_t check_places(const table_parameter_t *t) {
    if (t->trainable > 1) return GRADD_FAIL(MODEL, "trained: %u", t->trainable);
    if (t->steps < 0) return GRADD_FAIL(MODEL, "%lld steps", (long long)t->steps);
    for (int k = 1; k < STATE_PIECES; k++) {
        if (t->at[k] && (!t->trainable || t->rank < 0))
            return GRADD_FAIL(MODEL, "it has moments, and is not trained");
        if (t->at[k] && !t->at[k - 1])
            return GRADD_FAIL(MODEL, "it has moment %d, and not what comes before", k - 1);
    }
    if (t->at[0] && t->rank < 0) return GRADD_FAIL(MODEL, "it has values, but no shape");
    return GRADD_OK;
}

/* What would be the caller's fault is a damaged file here. */
static gradd_status_t of_file(gradd_status_t status) {
    if (status != GRADD_E_TENSOR) return status;
    const gradd_failure_t failure = *gradd_failure();
    return GRADD_FAIL(MODEL, "%s", failure.text);
}

static gradd_status_t add_parameter(gradd_train_state_t *state, const table_parameter_t *t,
                                    const char *name) {
    gradd_type_t type = {.rank = t->rank};
    GRADD_TRY(gradd_dtype_check(t->dtype, &type.dtype));
    if (t->rank < -1 || t->rank > GRADD_MAX_RANK) return GRADD_FAIL(MODEL, "rank %d", t->rank);
    for (int d = 0; d < t->rank; d++)
        type.dims[d] = t->dims[d];
    GRADD_TRY(check_places(t));
    GRADD_TRY(of_file(gradd_train_state_add(state, name, &type, NULL, t->trainable)));
    train_parameter_t *p = &state->parameters[state->n_parameters - 1];
    p->steps = t->steps;
    p->changed = false;
    memcpy(p->places.at, t->at, sizeof t->at);
    return GRADD_OK;
}

static gradd_status_t take_parameter(table_reader_t *r, gradd_train_state_t *state) {
    table_parameter_t t;
    char *name;
    GRADD_TRY(take_struct(r, &t, sizeof t));
    GRADD_TRY(take_text(r, t.name_bytes, &name));
    const gradd_status_t status = gradd_wrap(add_parameter(state, &t, name), "'%s'", name);
    free(name);
    return status;
}

static gradd_status_t add_property(gradd_train_state_t *state, const table_property_t *t,
                                   const char *name, const char *text) {
    if (t->kind > GRADD_TRAIN_TEXT)
        return GRADD_FAIL(MODEL, "property '%s' is of kind %u", name, t->kind);
    if (gradd_train_state_find_property(state, name) >= 0)
        return GRADD_FAIL(MODEL, "there are two properties '%s'", name);
    const gradd_train_property_t made = {name, (gradd_train_property_kind_t)t->kind, t->integer,
                                         t->real, text};
    return of_file(gradd_train_state_set_property(state, &made));
}

static gradd_status_t take_property(table_reader_t *r, gradd_train_state_t *state) {
    table_property_t t;
    char *name, *text;
    GRADD_TRY(take_struct(r, &t, sizeof t));
    GRADD_TRY(take_text(r, t.name_bytes, &name));
    gradd_status_t status = take_text(r, t.text_bytes, &text);
    if (!status) {
        status = add_property(state, &t, name, text);
        free(text);
    }
    free(name);
    return status;
}

static bool is_rate(float rate) {
    return isfinite(rate) && rate >= 0;
}

static gradd_status_t take_head(table_reader_t *r, gradd_train_state_t *state, table_head_t *h) {
    GRADD_TRY(take_struct(r, h, sizeof *h));
    if (h->step < 0) return GRADD_FAIL(MODEL, "the table says %lld steps", (long long)h->step);
    if (h->warmup < 0 || h->total < 0)
        return GRADD_FAIL(MODEL, "the table says a schedule of %lld steps, %lld to warm up",
                          (long long)h->total, (long long)h->warmup);
    if (!is_rate(h->learning_rate) || !is_rate(h->initial_learning_rate))
        return GRADD_FAIL(MODEL, "the table says learning rates of %g and %g",
                          (double)h->learning_rate, (double)h->initial_learning_rate);
    if (h->flags & ~(uint32_t)ALL_FLAGS || h->zero)
        return GRADD_FAIL(MODEL, "the table has flags %#x and %#x that are not known", h->flags,
                          h->zero);
    state->progress =
        (gradd_train_progress_t){h->step, h->learning_rate, h->initial_learning_rate, h->position};
    state->course = (train_course_t){.seed = h->seed,
                                     .draws = h->draws,
                                     .has_seed = h->flags & HAS_SEED,
                                     .has_schedule = h->flags & HAS_SCHEDULE,
                                     .warmup = h->warmup,
                                     .total = h->total};
    return GRADD_OK;
}

gradd_status_t lasting_table_read(const void *bytes, size_t n, gradd_train_state_t *state) {
    table_reader_t r = {bytes, (const char *)bytes + n};
    table_head_t head;
    GRADD_TRY(take_head(&r, state, &head));
    if (head.n_properties > LASTING_PROPERTIES)
        return GRADD_FAIL(LIMIT, "%llu properties, at most %d",
                          (unsigned long long)head.n_properties, LASTING_PROPERTIES);
    for (uint64_t i = 0; i < head.n_parameters; i++)
        GRADD_TRY(take_parameter(&r, state));
    for (uint64_t i = 0; i < head.n_properties; i++)
        GRADD_TRY(take_property(&r, state));
    if (r.at != r.end)
        return GRADD_FAIL(MODEL, "the table has %lld bytes too many", (long long)(r.end - r.at));
    return GRADD_OK;
}

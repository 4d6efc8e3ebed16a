/* Opens a state in a file, which a stranger may have written, and makes one. See lasting.h. */
#include <stdlib.h>
#include <string.h>

#include "train/lasting.h"

static bool is_ours(const lasting_head_t *h) {
    return !memcmp(h->magic, LASTING_MAGIC, sizeof h->magic);
}

static gradd_status_t check_head(const lasting_head_t *h, uint64_t i) {
    if (!is_ours(h)) return GRADD_FAIL(MODEL, "not a state of gradd, or not a complete one");
    if (h->version != LASTING_VERSION)
        return GRADD_FAIL(VERSION, "a state of version %u, expected %d", h->version,
                          LASTING_VERSION);
    if (h->bytes != sizeof *h || h->zeros[0])
        return GRADD_FAIL(MODEL, "head %llu has %u bytes, expected %zu", (unsigned long long)i,
                          h->bytes, sizeof *h);
    if (h->hash != lasting_hash(h, offsetof(lasting_head_t, hash)))
        return GRADD_FAIL(MODEL, "head %llu is damaged", (unsigned long long)i);
    if (!h->number || h->number > INT64_MAX || h->number % 2 != i)
        return GRADD_FAIL(MODEL, "head %llu has commit %llu", (unsigned long long)i,
                          (unsigned long long)h->number);
    return GRADD_OK;
}

/* The head of the latest commit; one of the two may be damaged, or was never written. */
static gradd_status_t read_heads(const lasting_t *l, lasting_head_t *out) {
    gradd_status_t failed = GRADD_OK;
    gradd_failure_t failure;
    out->number = 0;
    for (uint64_t i = 0; i < 2; i++) {
        lasting_head_t head;
        GRADD_TRY(l->on->read_at(l->file, i * LASTING_PAGE, &head, sizeof head));
        const gradd_status_t status = check_head(&head, i);
        if (status && (!failed || is_ours(&head))) {
            failed = status;
            failure = *gradd_failure();
        }
        if (!status && head.number > out->number) *out = head;
    }
    if (out->number) return GRADD_OK;
    gradd_failure_restore(&failure);
    return failed;
}

static gradd_status_t read_table(lasting_t *l, const lasting_head_t *h, uint64_t file_bytes,
                                 gradd_train_state_t *state) {
    if (h->table_bytes > LASTING_TABLE)
        return GRADD_FAIL(LIMIT, "a table of %llu bytes, at most %llu",
                          (unsigned long long)h->table_bytes, (unsigned long long)LASTING_TABLE);
    if (h->table_at < LASTING_FIRST || h->table_at > file_bytes ||
        h->table_bytes > file_bytes - h->table_at)
        return GRADD_FAIL(MODEL, "the table lies at byte %llu, the file has %llu",
                          (unsigned long long)h->table_at, (unsigned long long)file_bytes);
    GRADD_TRY(lasting_need_table(l, (size_t)h->table_bytes));
    GRADD_TRY(l->on->read_at(l->file, h->table_at, l->table, (size_t)h->table_bytes));
    if (h->table_hash != lasting_hash(l->table, (size_t)h->table_bytes))
        return GRADD_FAIL(MODEL, "the table is damaged");
    l->number = h->number;
    l->table_span = (lasting_span_t){h->table_at, h->table_at + h->table_bytes, -1, 0};
    return lasting_table_read(l->table, (size_t)h->table_bytes, state);
}

static gradd_status_t check_places(lasting_t *l, gradd_train_state_t *state, uint64_t file_bytes) {
    GRADD_TRY(lasting_need_spans(l, state->n_parameters));
    const int n = lasting_spans(state, l->spans);
    l->spans[n] = l->table_span;
    return lasting_check_spans(state, l->spans, n + 1, file_bytes);
}

static bool is_to_map(const lasting_t *l, const train_parameter_t *p) {
    return l->on->map_file && !p->trainable && p->places.at[0] && p->bytes;
}

static gradd_status_t map_values(lasting_t *l, gradd_train_state_t *state, uint64_t file_bytes) {
    for (int i = 0; i < state->n_parameters; i++) {
        train_parameter_t *p = &state->parameters[i];
        if (!is_to_map(l, p)) continue;
        if (!l->map && file_bytes > SIZE_MAX / 2)
            return GRADD_FAIL(LIMIT, "a file of %llu bytes", (unsigned long long)file_bytes);
        if (!l->map) GRADD_TRY(l->on->map_file(l->file, (size_t)file_bytes, &l->map));
        l->map_bytes = (size_t)file_bytes;
        p->data = (char *)l->map + p->places.at[0];
        p->places.is_mapped = true;
    }
    return GRADD_OK;
}

static gradd_status_t read_piece(const lasting_t *l, train_parameter_t *p, int k) {
    const uint64_t at = p->places.at[k];
    if (!at || (!k && p->places.is_mapped)) return GRADD_OK;
    GRADD_TRY(k ? state_make_moment(p, k - 1) : state_make_data(p));
    return l->on->read_at(l->file, at, state_piece(p, k), (size_t)state_piece_bytes(p, k));
}

static gradd_status_t read_state(lasting_t *l, gradd_train_state_t *state) {
    lasting_head_t head;
    uint64_t file_bytes;
    GRADD_TRY(l->on->file_bytes(l->file, &file_bytes));
    if (file_bytes < LASTING_FIRST)
        return GRADD_FAIL(MODEL, "a file of %llu bytes is no state of gradd",
                          (unsigned long long)file_bytes);
    GRADD_TRY(l->on->keep(l->file)); /* what a process that was killed has not */
    GRADD_TRY(read_heads(l, &head));
    GRADD_TRY(read_table(l, &head, file_bytes, state));
    GRADD_TRY(check_places(l, state, file_bytes));
    GRADD_TRY(map_values(l, state, file_bytes));
    for (int i = 0; i < state->n_parameters; i++)
        for (int k = 0; k < STATE_PIECES; k++)
            GRADD_TRY(read_piece(l, &state->parameters[i], k));
    l->step = state->progress.step;
    l->ended = l->on->seconds();
    return GRADD_OK;
}

void lasting_close(lasting_t *l) {
    if (!l) return;
    l->on->close_file(l->file, false);
    if (l->map) l->on->unmap_file(l->map, l->map_bytes);
    free(l->path);
    free(l->table);
    free(l->spans);
    free(l);
}

static gradd_status_t create(const gradd_platform_t *on, const char *path,
                             const gradd_train_lasting_t *o, lasting_t **out) {
    if (!path) return GRADD_FAIL(IO, "a state in a file: the path is missing");
    if (o->commit_every < 0 || o->commit_ms < 0)
        return GRADD_FAIL(LIMIT, "a commit every %lld steps, every %lld ms",
                          (long long)o->commit_every, (long long)o->commit_ms);
    lasting_t *l = calloc(1, sizeof *l);
    char *copy = strdup(path);
    if (!l || !copy) {
        free(l);
        free(copy);
        return GRADD_FAIL(NOMEM, "no memory for the state in '%s'", path);
    }
    l->on = on;
    l->path = copy;
    l->commit_every = o->commit_every;
    l->commit_seconds = (double)(o->commit_ms ? o->commit_ms : GRADD_TRAIN_COMMIT_MS) * 1e-3;
    *out = l;
    return GRADD_OK;
}

gradd_status_t lasting_open(const gradd_platform_t *on, const char *path,
                            const gradd_train_lasting_t *options, gradd_train_state_t **out_state) {
    gradd_train_state_t *state;
    lasting_t *l = NULL;
    GRADD_TRY(create(on, path, options, &l));
    gradd_status_t status = on->open_file(path, false, &l->file);
    if (status || !l->file) {
        lasting_close(l);
        if (!status) *out_state = NULL;
        return status;
    }
    status = gradd_train_state_create(&state);
    if (status) {
        lasting_close(l);
        return status;
    }
    state->lasting = l;
    status = gradd_wrap(read_state(l, state), "%s", path);
    if (status)
        gradd_train_state_destroy(state);
    else
        *out_state = state;
    return status;
}

/* ---- making ---------------------------------------------------------------------------------- */

gradd_status_t lasting_make(const gradd_platform_t *on, const char *path,
                            const gradd_train_lasting_t *options, gradd_train_state_t *state) {
    gradd_file_t *old = NULL;
    lasting_t *l = NULL;
    if (state->lasting)
        return GRADD_FAIL(STALE, "the state has a file already, '%s'", state->lasting->path);
    if (state->waits)
        return GRADD_FAIL(STALE, "gradients wait for a step of the optimizer: a file has none");
    GRADD_TRY(create(on, path, options, &l));
    gradd_status_t status = on->open_file(path, false, &old); /* not one that is in use */
    if (!status) {
        status = gradd_wrap(lasting_commit(state, l), "%s", path);
        on->close_file(old, false);
    }
    if (status)
        lasting_close(l);
    else
        state->lasting = l;
    return status;
}

static const gradd_train_lasting_t by_time = {0};

gradd_status_t gradd_train_keep_state(gradd_train_state_t *state, const char *path,
                                      const gradd_train_lasting_t *options) {
    return lasting_make(&gradd_platform, path, options ? options : &by_time, state);
}

static gradd_status_t make_of_checkpoint(const char *path, const gradd_train_lasting_t *o,
                                         gradd_train_state_t **out_state) {
    gradd_train_state_t *state;
    if (!o->checkpoint) return GRADD_FAIL(IO, "cannot open '%s': there is no such file", path);
    GRADD_TRY(gradd_train_state_load(o->checkpoint, &state));
    const gradd_status_t status = gradd_train_keep_state(state, path, o);
    if (status)
        gradd_train_state_destroy(state);
    else
        *out_state = state;
    return status;
}

gradd_status_t gradd_train_open_state(const char *path, const gradd_train_lasting_t *options,
                                      gradd_train_state_t **out_state) {
    const gradd_train_lasting_t *o = options ? options : &by_time;
    gradd_train_state_t *state;
    GRADD_TRY(lasting_open(&gradd_platform, path, o, &state));
    if (!state) return make_of_checkpoint(path, o, out_state);
    *out_state = state;
    return GRADD_OK;
}

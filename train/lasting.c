/* Commits a state to its file. See lasting.h. */
#include "train/lasting.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/exec/journal.h"

#define BESIDE     ".new"
#define HEAD_BYTES 512 /* written at once; the rest are zeros */

/* ---- memory that commits use again ------------------------------------------------------------
 */

gradd_status_t lasting_need_table(lasting_t *l, size_t bytes) {
    if (l->table && bytes <= l->table_room) return GRADD_OK;
    const size_t room = bytes + bytes / 4 + 64;
    void *larger = realloc(l->table, room);
    if (!larger) return GRADD_FAIL(NOMEM, "no memory for the table of a state");
    l->table = larger;
    l->table_room = room;
    return GRADD_OK;
}

/* For all pieces, and the table. */
gradd_status_t lasting_need_spans(lasting_t *l, int n_parameters) {
    const int n = n_parameters * STATE_PIECES + 1;
    if (n <= l->span_room) return GRADD_OK;
    lasting_span_t *larger = realloc(l->spans, sizeof larger[0] * (size_t)n);
    if (!larger) return GRADD_FAIL(NOMEM, "no memory for the places of a state");
    l->spans = larger;
    l->span_room = n;
    return GRADD_OK;
}

/* ---- what a commit writes -------------------------------------------------------------------- */

/* A commit that is being made. */
typedef struct lasting_commit_s {
    gradd_train_state_t *state;
    lasting_t *l;
    gradd_file_t *file;
    bool is_whole; /* the file is new */
    uint64_t number;
    lasting_span_t table;
    uint64_t bytes;
} lasting_commit_t;

static uint64_t aligned(uint64_t n) {
    return (n + GRADD_TENSOR_ALIGN - 1) / GRADD_TENSOR_ALIGN * GRADD_TENSOR_ALIGN;
}

static bool is_written(const train_parameter_t *p, bool is_whole) {
    bool is_new = false; /* a piece has no place yet */
    for (int k = 0; k < STATE_PIECES; k++)
        is_new |= state_piece(p, k) && !p->places.at[k];
    return is_whole || is_new || p->trainable || p->changed;
}

static uint64_t place_parameter(train_parameter_t *p, bool is_whole, uint64_t at) {
    p->places.written = is_written(p, is_whole);
    for (int k = 0; k < STATE_PIECES; k++) {
        const bool is_there = state_piece(p, k);
        p->places.next[k] = !is_there ? 0 : p->places.written ? at : p->places.at[k];
        if (is_there && p->places.written) at += aligned((uint64_t)state_piece_bytes(p, k));
    }
    return at;
}

/* Side by side from `at` on, what is trained behind the rest: it makes room at once. Returns where
 * they end. */
static uint64_t place_all(gradd_train_state_t *state, bool is_whole, uint64_t at) {
    for (int trained = 0; trained < 2; trained++)
        for (int i = 0; i < state->n_parameters; i++)
            if (state->parameters[i].trainable == (bool)trained)
                at = place_parameter(&state->parameters[i], is_whole, at);
    return at;
}

/* Finds places for what is written, and makes the table. */
static gradd_status_t make_places(lasting_commit_t *a) {
    lasting_t *l = a->l;
    const uint64_t table_bytes = lasting_table_bytes(a->state);
    uint64_t from = LASTING_FIRST;
    if (table_bytes > LASTING_TABLE)
        return GRADD_FAIL(LIMIT, "a table of %llu bytes: names and properties are too long",
                          (unsigned long long)table_bytes);
    GRADD_TRY(lasting_need_table(l, (size_t)table_bytes));
    GRADD_TRY(lasting_need_spans(l, a->state->n_parameters));
    a->bytes = place_all(a->state, a->is_whole, from) - from + table_bytes;
    if (!a->is_whole) {
        const int n = lasting_spans(a->state, l->spans);
        l->spans[n] = l->table_span;
        from = lasting_find_room(l->spans, n + 1, a->bytes);
    }
    a->table.at = place_all(a->state, a->is_whole, from);
    a->table.end = a->table.at + table_bytes;
    a->table.parameter = -1;
    lasting_table_write(a->state, l->table);
    return GRADD_OK;
}

/* From here on the file may change where the values lie in it. */
static void own_pages(train_parameter_t *p) {
    volatile char *bytes = p->data;
    if (!p->places.is_mapped || p->places.is_own) return;
    for (int64_t i = 0; i < p->bytes; i += LASTING_PAGE)
        bytes[i] = bytes[i];
    if (p->bytes) bytes[p->bytes - 1] = bytes[p->bytes - 1];
    p->places.is_own = true;
}

static gradd_status_t write_parameter(const lasting_commit_t *a, train_parameter_t *p) {
    own_pages(p);
    for (int k = 0; k < STATE_PIECES; k++)
        if (p->places.next[k])
            GRADD_TRY(a->l->on->write_at(a->file, p->places.next[k], state_piece(p, k),
                                         (size_t)state_piece_bytes(p, k)));
    return GRADD_OK;
}

static gradd_status_t fill(void *on) {
    const lasting_commit_t *a = on;
    for (int trained = 0; trained < 2; trained++)
        for (int i = 0; i < a->state->n_parameters; i++) {
            train_parameter_t *p = &a->state->parameters[i];
            if (p->trainable == (bool)trained && p->places.written)
                GRADD_TRY(write_parameter(a, p));
        }
    return a->l->on->write_at(a->file, a->table.at, a->l->table,
                              (size_t)(a->table.end - a->table.at));
}

static gradd_status_t seal(void *on) {
    const lasting_commit_t *a = on;
    char block[HEAD_BYTES] = {0};
    lasting_head_t head = {.version = LASTING_VERSION,
                           .bytes = sizeof head,
                           .number = a->number,
                           .table_at = a->table.at,
                           .table_bytes = a->table.end - a->table.at};
    memcpy(head.magic, LASTING_MAGIC, sizeof head.magic);
    head.table_hash = lasting_hash(a->l->table, (size_t)head.table_bytes);
    head.hash = lasting_hash(&head, offsetof(lasting_head_t, hash));
    memcpy(block, &head, sizeof head);
    if (!a->is_whole) a->l->doubtful = true;
    return a->l->on->write_at(a->file, a->number % 2 * LASTING_PAGE, block, sizeof block);
}

static gradd_status_t keep(void *on) {
    const lasting_commit_t *a = on;
    return a->l->on->keep(a->file);
}

/* ---- commits --------------------------------------------------------------------------------- */

/* What reading refuses is not written. */
static gradd_status_t check_state(const gradd_train_state_t *state) {
    const gradd_train_progress_t *p = &state->progress;
    if (state->n_properties > LASTING_PROPERTIES)
        return GRADD_FAIL(LIMIT, "%d properties, at most %d", state->n_properties,
                          LASTING_PROPERTIES);
    const float rates[] = {p->learning_rate, p->initial_learning_rate};
    for (int i = 0; i < 2; i++)
        if (!isfinite(rates[i]) || rates[i] < 0)
            return GRADD_FAIL(TENSOR, "a learning rate of %g", (double)rates[i]);
    if (p->step < 0) return GRADD_FAIL(TENSOR, "%lld steps", (long long)p->step);
    for (int i = 0; i < state->n_parameters; i++)
        if (state->parameters[i].steps < 0)
            return GRADD_FAIL(TENSOR, "'%s': %lld steps", state->parameters[i].name,
                              (long long)state->parameters[i].steps);
    return GRADD_OK;
}

static void take_over(const lasting_commit_t *a) {
    lasting_t *l = a->l;
    for (int i = 0; i < a->state->n_parameters; i++) {
        train_parameter_t *p = &a->state->parameters[i];
        memcpy(p->places.at, p->places.next, sizeof p->places.at);
        p->changed = false;
    }
    l->number = a->number;
    l->table_span = a->table;
    l->doubtful = false;
    l->step = a->state->progress.step;
    l->bytes = (int64_t)a->bytes + HEAD_BYTES;
}

static gradd_status_t commit_to(lasting_commit_t *a) {
    const journal_entry_t entry = {.on = a, .fill = fill, .seal = seal, .keep = keep};
    GRADD_TRY(make_places(a));
    return journal_replace(&entry, false);
}

static gradd_status_t commit_in_place(gradd_train_state_t *state) {
    lasting_t *l = state->lasting;
    lasting_commit_t a = {.state = state, .l = l, .file = l->file, .number = l->number + 1};
    GRADD_TRY(commit_to(&a));
    take_over(&a);
    return GRADD_OK;
}

/* All of it, to a file that then has the path of the one that there may be. */
static gradd_status_t commit_beside(gradd_train_state_t *state, lasting_t *l) {
    lasting_commit_t a = {.state = state, .l = l, .is_whole = true, .number = l->number + 1};
    const size_t n = strlen(l->path) + sizeof BESIDE;
    char *beside = malloc(n);
    if (!beside) return GRADD_FAIL(NOMEM, "no memory to write '%s'", l->path);
    snprintf(beside, n, "%s" BESIDE, l->path);
    gradd_status_t status = l->on->open_file(beside, true, &a.file);
    free(beside);
    if (!status) status = commit_to(&a);
    if (!status) status = l->on->keep_as(a.file, l->path);
    if (status) {
        l->on->close_file(a.file, true);
        return status;
    }
    l->on->close_file(l->file, false);
    l->file = a.file;
    take_over(&a);
    return GRADD_OK;
}

bool lasting_is_at(const lasting_t *l, const char *path) {
    return l && l->file && l->on->is_named && l->on->is_named(l->file, path);
}

/* A commit to a file without a name is lost, and so is what another has put in its place. */
static gradd_status_t check_name(const lasting_t *l) {
    if (!l->file || !l->on->is_named || l->on->is_named(l->file, NULL)) return GRADD_OK;
    return GRADD_FAIL(STALE,
                      "the path names the state's file no longer: it was deleted, renamed or "
                      "replaced; a checkpoint saves what there is");
}

gradd_status_t lasting_commit(gradd_train_state_t *state, lasting_t *l) {
    const double began = l->on->seconds();
    GRADD_TRY(check_state(state));
    GRADD_TRY(check_name(l));
    GRADD_TRY(l->file && !l->doubtful ? commit_in_place(state) : commit_beside(state, l));
    l->ended = l->on->seconds();
    l->seconds = l->ended - began;
    return GRADD_OK;
}

gradd_status_t gradd_train_commit(gradd_train_state_t *state) {
    if (!state->lasting) return GRADD_FAIL(UNSUPPORTED, "the state has no file");
    if (state->waits)
        return GRADD_FAIL(STALE, "gradients wait for a step of the optimizer: a commit has none");
    return gradd_wrap(lasting_commit(state, state->lasting), "%s", state->lasting->path);
}

static bool is_due(const gradd_train_state_t *state) {
    const lasting_t *l = state->lasting;
    if (!l || state->waits || state->progress.step == l->step) return false;
    if (l->commit_every) return state->progress.step - l->step >= l->commit_every;
    const double pause = l->on->seconds() - l->ended;
    return pause >= l->commit_seconds && pause * GRADD_TRAIN_COMMIT_SHARE >= l->seconds;
}

gradd_status_t lasting_commit_due(gradd_train_state_t *state) {
    return is_due(state) ? gradd_train_commit(state) : GRADD_OK;
}

gradd_train_commits_t gradd_train_commits(const gradd_train_state_t *state) {
    const lasting_t *l = state->lasting;
    if (!l) return (gradd_train_commits_t){0};
    return (gradd_train_commits_t){(int64_t)l->number, l->step, l->bytes, l->seconds};
}

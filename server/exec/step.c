/* Optimizer step through a redo journal. See step.h. */
#include "server/exec/step.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/math/adam.h"
#include "server/device/device.h"
#include "server/exec/journal.h"
#include "server/exec/step_request.h"

struct stepping_s {
    const step_request_t *r;
    gradd_device_t *device;
    const gradd_backend_t *b;
    gradd_queue_t *queue;
    step_journal_t *journal; /* the device's */
    step_journal_t head;     /* what its words will say when the queue is here */
    int64_t chunk;           /* elements, as its magic said when it was read */
    uint64_t *touched;       /* Owned: bit per row of `scanned`; or NULL */
    const step_tensor_t *scanned;
    bool is_open;         /* the journal */
    gradd_span_t *spans;  /* Owned: of all gradients, once the journal is open */
    int n_spans, n_added; /* of these so many are in `squares` */
    double squares;
    bool begun; /* the norm is known: */
    double norm;
};

/* Elements of a gradient whose squares are added up at once. Sums of larger ones are those of its
 * pieces, also where nothing waits. */
#define NORM_PIECE ((int64_t)16 << 20)

/* A word of the journal, in turn with all else. */
static gradd_status_t put(stepping_t *s, uint64_t *head_word, uint64_t value) {
    const size_t at = (size_t)((char *)head_word - (char *)&s->head);
    *head_word = value;
    return s->b->store(s->queue, (uint64_t *)((char *)s->journal + at), value);
}

static float *buffer(const stepping_t *s, int which) {
    return (float *)(s->journal + 1) + which * s->chunk;
}

static bool clips(const step_request_t *r) {
    return r->max_norm > 0 && isfinite(r->max_norm);
}

static double grad_scale(const step_request_t *r) {
    return r->grad_scale ? r->grad_scale : 1;
}

/* The value of `sealed` for a step that was skipped. */
static uint64_t skip_mark(const step_request_t *r) {
    return r->step << STEP_CHUNK_BITS | ((UINT64_C(1) << STEP_CHUNK_BITS) - 1);
}

static gradd_status_t list_spans(stepping_t *s) {
    const step_request_t *r = s->r;
    int64_t n = 0;
    for (int i = 0; i < r->n_tensors; i++)
        n += r->tensors[i].n / NORM_PIECE + 1;
    s->spans = calloc((size_t)n + 1, sizeof s->spans[0]);
    if (!s->spans) return GRADD_FAIL(NOMEM, "no memory for a step");
    for (int i = 0; i < r->n_tensors; i++) {
        const step_tensor_t *t = &r->tensors[i];
        const char *at = t->g;
        for (int64_t from = 0; t->g && from < t->n; from += NORM_PIECE) {
            const int64_t left = t->n - from;
            s->spans[s->n_spans++] =
                (gradd_span_t){at + (size_t)from * gradd_dtype_bytes(t->dtype), t->dtype,
                               left < NORM_PIECE ? left : NORM_PIECE};
        }
    }
    return GRADD_OK;
}

/* Of the gradients as they lie there. It is finite where all of them are: squares of f32 are far
 * from the largest double. A device of the host adds one up after the other, which is the same sum;
 * *out_done is false if something else is to run before. */
static gradd_status_t global_norm(stepping_t *s, bool *out_done) {
    *out_done = false;
    if (!s->spans) GRADD_TRY(list_spans(s));
    const int at_once = s->b->host ? 1 : s->n_spans;
    while (s->n_added < s->n_spans) {
        double squares;
        GRADD_TRY(s->b->norm2(s->queue, s->spans + s->n_added, at_once, &squares));
        s->squares += squares;
        s->n_added += at_once;
        if (s->n_added < s->n_spans && device_makes_way(s->device)) return GRADD_OK;
    }
    s->norm = sqrt(s->squares);
    *out_done = true;
    return GRADD_OK;
}

/* Of scaled gradients. */
static float scale_of(const step_request_t *r, double norm) {
    return (float)((clips(r) ? gradd_clip_factor(r->max_norm, norm) : 1) * grad_scale(r));
}

/* Elements of a parameter, and where the journal's buffers have them. */
typedef struct piece_s {
    const step_tensor_t *t;
    int64_t from, n, at;
} piece_t;

static gradd_status_t write_journal(const stepping_t *s, const piece_t *p, float scale) {
    const step_tensor_t *t = p->t;
    gradd_adam_span_t span = {.m = t->m + p->from,
                              .v = t->v + p->from,
                              .out_p = buffer(s, 0) + p->at,
                              .out_m = buffer(s, 1) + p->at,
                              .out_v = buffer(s, 2) + p->at,
                              .n = p->n};
    if (gradd_dtype_is_half(t->dtype)) {
        span.half = t->dtype;
        span.p16 = (const uint16_t *)t->p + p->from;
        span.g16 = (const uint16_t *)t->g + p->from;
        span.p = t->master ? t->master + p->from : NULL;
    } else {
        span.p = (const float *)t->p + p->from;
        span.g = (const float *)t->g + p->from;
    }
    return s->b->adam(s->queue, &s->r->groups[t->group], scale, &span);
}

static gradd_status_t commit_piece(const stepping_t *s, const piece_t *p) {
    const step_tensor_t *t = p->t;
    const gradd_adam_commit_t commit = {.p = buffer(s, 0) + p->at,
                                        .m = buffer(s, 1) + p->at,
                                        .v = buffer(s, 2) + p->at,
                                        .out_p = (char *)t->p +
                                                 gradd_dtype_bytes(t->dtype) * (size_t)p->from,
                                        .dtype = t->dtype,
                                        .out_master = t->master ? t->master + p->from : NULL,
                                        .out_m = t->m + p->from,
                                        .out_v = t->v + p->from,
                                        .n = p->n};
    return s->b->adam_commit(s->queue, &commit);
}

/* ---- chunks ---------------------------------------------------------------------------------- */

static int row_words(const piece_t *chunk) {
    return (int)((chunk->n / chunk->t->width + 63) / 64);
}

static bool has_row(const stepping_t *s, int64_t row) {
    return s->head.rows[row / 64] >> (row % 64) & 1;
}

/* Finds the rows of the parameter that have a gradient, in one pass over it; on a device of the
 * host, which need not be waited for, those of the chunk. *out_first: of the chunk's rows in
 * `touched`. */
static gradd_status_t scan_gradient(stepping_t *s, const piece_t *chunk, int64_t *out_first) {
    const step_tensor_t *t = chunk->t;
    const bool host = s->b->host;
    const int64_t from = host ? chunk->from : 0;
    const gradd_span_t span = {(const char *)t->g + (size_t)from * gradd_dtype_bytes(t->dtype),
                               t->dtype, host ? chunk->n : t->n};
    *out_first = (chunk->from - from) / t->width;
    if (s->scanned != t) {
        s->scanned = NULL;
        free(s->touched);
        s->touched = malloc(sizeof s->touched[0] * (size_t)(t->n / t->width / 64 + 1));
        if (!s->touched) return GRADD_FAIL(NOMEM, "no memory for a step");
    } else if (!host) {
        return GRADD_OK;
    }
    GRADD_TRY(s->b->touched(s->queue, &span, t->width, s->touched));
    s->scanned = t;
    return GRADD_OK;
}

/* Writes which rows of the chunk have a gradient. */
static gradd_status_t find_rows(stepping_t *s, const piece_t *chunk, bool *out_any) {
    const int64_t rows = chunk->n / chunk->t->width;
    int64_t first;
    GRADD_TRY(scan_gradient(s, chunk, &first));
    *out_any = false;
    for (int64_t k = 0; k * 64 < rows; k++) {
        uint64_t bits = 0;
        for (int64_t row = k * 64; row < rows && row < k * 64 + 64; row++) {
            const int64_t at = first + row;
            bits |= (s->touched[at / 64] >> (at % 64) & 1) << (row % 64);
        }
        *out_any |= bits != 0;
        GRADD_TRY(put(s, &s->head.rows[k], bits));
    }
    return GRADD_OK;
}

static gradd_status_t read_rows(stepping_t *s, const piece_t *chunk) {
    const size_t bytes = sizeof s->head.rows[0] * (size_t)row_words(chunk);
    GRADD_TRY(s->b->copy(s->queue, s->head.rows, s->journal->rows, bytes));
    GRADD_TRY(s->b->wait(s->queue, NULL));
    return s->b->queue_enter(s->queue, 0);
}

/* From the parameter to the journal, or back. */
static gradd_status_t move_piece(const stepping_t *s, const piece_t *p, const float *scale) {
    return scale ? write_journal(s, p, *scale) : commit_piece(s, p);
}

/* All of the chunk, or its rows, those that are neighbours at once. */
static gradd_status_t move_chunk(const stepping_t *s, const piece_t *chunk, const float *scale) {
    const int64_t width = chunk->t->width, rows = width ? chunk->n / width : 0;
    int64_t at = 0;
    if (!width) return move_piece(s, chunk, scale);
    for (int64_t row = 0, end; row < rows; row = end) {
        end = row + 1;
        if (!has_row(s, row)) continue;
        while (end < rows && has_row(s, end))
            end++;
        const piece_t run = {chunk->t, chunk->from + row * width, (end - row) * width, at};
        GRADD_TRY(move_piece(s, &run, scale));
        at += run.n;
    }
    return GRADD_OK;
}

/* A chunk as an entry of the journal. */
typedef struct chunk_entry_s {
    stepping_t *s;
    const piece_t *chunk;
    float scale;
} chunk_entry_t;

static gradd_status_t fill_chunk(void *on) {
    const chunk_entry_t *e = on;
    return move_chunk(e->s, e->chunk, &e->scale);
}

static gradd_status_t seal_chunk(void *on) {
    const chunk_entry_t *e = on;
    return put(e->s, &e->s->head.sealed, e->s->head.progress);
}

static gradd_status_t apply_chunk(void *on) {
    const chunk_entry_t *e = on;
    return move_chunk(e->s, e->chunk, NULL);
}

static gradd_status_t update_chunk(stepping_t *s, const piece_t *chunk, float scale) {
    const uint64_t now = s->head.progress;
    const bool by_rows = chunk->t->width, is_sealed = s->head.sealed == now;
    chunk_entry_t e = {s, chunk, scale};
    const journal_entry_t entry = {
        .on = &e, .fill = fill_chunk, .seal = seal_chunk, .apply = apply_chunk};
    bool any = true;
    if (by_rows) GRADD_TRY(is_sealed ? read_rows(s, chunk) : find_rows(s, chunk, &any));
    if (any) GRADD_TRY(journal_replace(&entry, is_sealed));
    return put(s, &s->head.progress, now + 1);
}

/* Those that are left; *out_done is false if something else is to run before. */
static gradd_status_t update_chunks(stepping_t *s, float scale, bool *out_done) {
    const step_request_t *r = s->r;
    uint64_t done = s->head.progress & ((1u << STEP_CHUNK_BITS) - 1), at = 0;
    *out_done = false;
    for (int i = 0; i < r->n_tensors; i++) {
        const step_tensor_t *t = &r->tensors[i];
        const int64_t most = step_chunk_elements(t, s->chunk);
        for (int64_t from = 0; t->g && from < t->n; from += most) {
            const int64_t left = t->n - from;
            const piece_t chunk = {t, from, left < most ? left : most, 0};
            if (at++ < done) continue;
            GRADD_TRY(update_chunk(s, &chunk, scale));
            if (device_makes_way(s->device)) return GRADD_OK;
        }
    }
    *out_done = true;
    return GRADD_OK;
}

/* ---- requests -------------------------------------------------------------------------------- */

/* The client may write into the journal at any time: its length counts as it was read here. */
static gradd_status_t check_chunk(stepping_t *s) {
    const uint64_t magic = s->head.magic;
    const int64_t bytes = s->r->journal_bytes;
    s->chunk = magic >> 32 == STEP_JOURNAL_LONG ? (int64_t)(uint32_t)magic : STEP_CHUNK;
    if (s->chunk < STEP_CHUNK || s->chunk > STEP_CHUNK_MAX || s->chunk % STEP_CHUNK)
        return GRADD_FAIL(SHM,
                          "journal: expected chunks of a multiple of %lld elements, at most %lld, "
                          "got %lld",
                          (long long)STEP_CHUNK, (long long)STEP_CHUNK_MAX, (long long)s->chunk);
    if (bytes < (int64_t)STEP_JOURNAL_BYTES_OF(s->chunk))
        return GRADD_FAIL(TENSOR,
                          "journal: expected %zu bytes for chunks of %lld elements, got %lld",
                          STEP_JOURNAL_BYTES_OF(s->chunk), (long long)s->chunk, (long long)bytes);
    return GRADD_OK;
}

static gradd_status_t read_journal(stepping_t *s) {
    GRADD_TRY(s->b->copy(s->queue, &s->head, s->journal, offsetof(step_journal_t, rows)));
    GRADD_TRY(s->b->wait(s->queue, NULL));
    GRADD_TRY(s->b->queue_enter(s->queue, 0));
    const uint64_t magic = s->head.magic;
    if (magic && magic != STEP_JOURNAL_MAGIC && magic >> 32 != STEP_JOURNAL_LONG)
        return GRADD_FAIL(SHM, "the region given as journal is not one");
    return check_chunk(s);
}

static gradd_status_t begin_journal(stepping_t *s) {
    if (s->head.magic) return GRADD_OK;
    GRADD_TRY(put(s, &s->head.sealed, ~UINT64_C(0)));
    return put(s, &s->head.magic, STEP_JOURNAL_MAGIC);
}

/* Opens the journal for this step; *out_done if it is finished already. */
static gradd_status_t open_journal(stepping_t *s, bool *out_done) {
    const step_request_t *r = s->r;
    GRADD_TRY(begin_journal(s));
    const uint64_t mark = step_fingerprint(r), progress = s->head.progress;
    const uint64_t chunk = progress & ((1u << STEP_CHUNK_BITS) - 1);
    uint64_t current =
        progress >> STEP_CHUNK_BITS; /* step in progress, or the next one if chunk is 0 */
    *out_done = r->step + 1 == current && !chunk;
    if (*out_done && s->head.fingerprint != mark)
        return GRADD_FAIL(STALE,
                          "step %llu was finished by another request: other parameters, settings "
                          "or gradients",
                          (unsigned long long)r->step);
    if (*out_done) return GRADD_OK;
    if (r->step != current)
        return GRADD_FAIL(STALE, "the journal is at step %llu, the request says %llu",
                          (unsigned long long)current, (unsigned long long)r->step);
    bool begun = chunk || s->head.sealed == progress;
    if (begun && s->head.fingerprint != mark)
        return GRADD_FAIL(STALE, "step %llu was begun with other parameters, settings or gradients",
                          (unsigned long long)r->step);
    return put(s, &s->head.fingerprint, mark);
}

/* Opens the journal and looks at the gradients; *out_done if the step is finished already, or
 * skipped. Something else is to run before if it has not begun then. */
static gradd_status_t begin(stepping_t *s, bool *out_done) {
    uint64_t bits;
    bool known = true;
    if (!s->is_open) {
        GRADD_TRY(read_journal(s));
        GRADD_TRY(step_check(s->r, s->chunk));
        GRADD_TRY(open_journal(s, out_done));
        if (*out_done) return GRADD_OK;
        s->is_open = true;
    }
    if (clips(s->r) || s->r->finite) GRADD_TRY(global_norm(s, &known));
    if (!known) return GRADD_OK;
    s->norm *= grad_scale(s->r);
    memcpy(&bits, &s->norm, sizeof bits);
    GRADD_TRY(put(s, &s->head.norm, bits));
    s->begun = true;
    if (!s->r->finite || isfinite(s->norm)) return GRADD_OK;
    *out_done = true;
    GRADD_TRY(put(s, &s->head.sealed, skip_mark(s->r)));
    return put(s, &s->head.progress, (s->r->step + 1) << STEP_CHUNK_BITS);
}

static gradd_status_t update(stepping_t *s, bool *out_done) {
    *out_done = false;
    GRADD_TRY(s->b->queue_enter(s->queue, 0));
    if (!s->begun) GRADD_TRY(begin(s, out_done));
    if (*out_done || !s->begun) return GRADD_OK;
    GRADD_TRY(update_chunks(s, scale_of(s->r, s->norm), out_done));
    if (!*out_done) return GRADD_OK;
    return put(s, &s->head.progress, (s->r->step + 1) << STEP_CHUNK_BITS);
}

gradd_status_t step_create(gradd_device_t *device, const step_request_t *r, stepping_t **out_step) {
    stepping_t *s = malloc(sizeof *s);
    if (!s) return GRADD_FAIL(NOMEM, "no memory for a step");
    *s = (stepping_t){.r = r,
                      .device = device,
                      .b = device->backend,
                      .queue = device->queue,
                      .journal = r->journal};
    *out_step = s;
    return GRADD_OK;
}

gradd_status_t step_continue(stepping_t *s, bool *out_done) {
    gradd_status_t status = update(s, out_done);
    gradd_status_t waited = s->b->wait(s->queue, NULL);
    return status ? status : waited;
}

void step_destroy(stepping_t *s) {
    if (!s) return;
    free(s->touched);
    free(s->spans);
    free(s);
}

double step_norm(const stepping_t *s, bool *out_skipped) {
    double norm;
    memcpy(&norm, &s->head.norm, sizeof norm);
    *out_skipped = s->head.sealed == skip_mark(s->r);
    return norm;
}

gradd_status_t step_apply(gradd_device_t *device, const step_request_t *r, double *out_norm,
                          bool *out_skipped) {
    stepping_t *s;
    bool done = false;
    GRADD_TRY(step_create(device, r, &s));
    gradd_status_t status = GRADD_OK;
    while (!status && !done)
        status = step_continue(s, &done);
    if (!status) *out_norm = step_norm(s, out_skipped);
    step_destroy(s);
    return status;
}

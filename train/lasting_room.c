/* Which bytes of a state's file are in use, and where there is room. See lasting.h. */
#include <stdlib.h>

#include "train/lasting.h"

int lasting_spans(const gradd_train_state_t *state, lasting_span_t *out) {
    int n = 0;
    for (int i = 0; i < state->n_parameters; i++) {
        const train_parameter_t *p = &state->parameters[i];
        for (int k = 0; k < STATE_PIECES; k++) {
            const uint64_t at = p->places.at[k];
            if (!at) continue;
            out[n++] = (lasting_span_t){at, at + (uint64_t)state_piece_bytes(p, k), i, k};
        }
    }
    return n;
}

static int compare(const void *a, const void *b) {
    const lasting_span_t *x = a, *y = b;
    if (x->at != y->at) return x->at < y->at ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

static void sort(lasting_span_t *spans, int n) {
    qsort(spans, (size_t)n, sizeof spans[0], compare);
}

/* ---- files of strangers ---------------------------------------------------------------------- */

static const char *name_of(const gradd_train_state_t *state, const lasting_span_t *span) {
    return span->parameter < 0 ? "the table" : state->parameters[span->parameter].name;
}

static gradd_status_t check_span(const gradd_train_state_t *state, const lasting_span_t *span,
                                 uint64_t file_bytes) {
    if (span->at % GRADD_TENSOR_ALIGN)
        return GRADD_FAIL(MODEL, "'%s': piece %d at byte %llu, no multiple of %d",
                          name_of(state, span), span->piece, (unsigned long long)span->at,
                          GRADD_TENSOR_ALIGN);
    if (span->at < LASTING_FIRST || span->end < span->at || span->end > file_bytes)
        return GRADD_FAIL(
            MODEL, "'%s': piece %d in bytes %llu to %llu, the file has them from %d to %llu",
            name_of(state, span), span->piece, (unsigned long long)span->at,
            (unsigned long long)span->end, LASTING_FIRST, (unsigned long long)file_bytes);
    return GRADD_OK;
}

gradd_status_t lasting_check_spans(const gradd_train_state_t *state, lasting_span_t *spans, int n,
                                   uint64_t file_bytes) {
    for (int i = 0; i < n; i++)
        GRADD_TRY(check_span(state, &spans[i], file_bytes));
    sort(spans, n);
    for (int i = 1; i < n; i++)
        if (spans[i].at < spans[i - 1].end)
            return GRADD_FAIL(MODEL, "'%s' and '%s' overlap at byte %llu",
                              name_of(state, &spans[i - 1]), name_of(state, &spans[i]),
                              (unsigned long long)spans[i].at);
    return GRADD_OK;
}

/* ---- room ------------------------------------------------------------------------------------ */

static uint64_t page_of(uint64_t at) {
    return at / LASTING_PAGE * LASTING_PAGE;
}

uint64_t lasting_find_room(lasting_span_t *spans, int n, uint64_t bytes) {
    uint64_t at = LASTING_FIRST;
    sort(spans, n);
    for (int i = 0; i < n; i++) {
        const uint64_t from = page_of(spans[i].at);
        if (from >= at && from - at >= bytes) return at;
        const uint64_t end = page_of(spans[i].end + LASTING_PAGE - 1);
        if (end > at) at = end;
    }
    return at;
}

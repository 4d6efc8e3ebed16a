/* Reads a slice as keys, in blocks, and orders it; see the header. */
#include "kernels/describe/slice_order.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/describe/dispatch.h"
#include "kernels/math/bf16.h"

/* A slice into sort keys: flip is -1 to sort down and 0 to sort up. */
#define READ_KEYS(name, T, key_of)                                                                 \
    GRADD_MULTIARCH static void name(int64_t *key, const void *data, int64_t n, int64_t stride,    \
                                     int64_t flip) {                                               \
        const T *x = data;                                                                         \
        if (stride == 1) {                                                                         \
            for (int64_t i = 0; i < n; i++)                                                        \
                key[i] = key_of(x[i]) ^ flip;                                                      \
        } else {                                                                                   \
            for (int64_t i = 0; i < n; i++)                                                        \
                key[i] = key_of(x[i * stride]) ^ flip;                                             \
        }                                                                                          \
    }
#define KEY_OF_BF16(x) gradd_sort_key_f32(gradd_bf16_f32(x))
#define KEY_OF_INT(x)  (int64_t)(x)

READ_KEYS(keys_f32, float, gradd_sort_key_f32)
READ_KEYS(keys_f64, double, gradd_sort_key_f64)
READ_KEYS(keys_bf16, gradd_bf16_t, KEY_OF_BF16)
READ_KEYS(keys_i32, int32_t, KEY_OF_INT)
READ_KEYS(keys_i64, int64_t, KEY_OF_INT)

typedef void (*read_keys_t)(int64_t *key, const void *data, int64_t n, int64_t stride,
                            int64_t flip);

static read_keys_t reader_of(gradd_dtype_t dtype) {
    switch ((int)dtype) {
    case GRADD_DT_F32:
        return keys_f32;
    case GRADD_DT_F64:
        return keys_f64;
    case GRADD_DT_BF16:
        return keys_bf16;
    case GRADD_DT_I32:
        return keys_i32;
    default:
        return keys_i64;
    }
}

int64_t gradd_slice_room(const gradd_slice_t *s) {
    return s->how == GRADD_ORDER_PARTIAL ? s->k : s->n;
}

/* Keys are read and looked through in blocks. */
#define BLOCK 256

typedef struct slice_block_s {
    int64_t key[BLOCK];
    int64_t n, from; /* from: the place of key[0] */
} slice_block_t;

/* In front of the first one; the keys stay unset. */
static void first_block(slice_block_t *b) {
    b->n = b->from = 0;
}

static bool next_block(slice_block_t *b, const gradd_slice_t *s, const char *x) {
    b->from += b->n;
    b->n = s->n - b->from < BLOCK ? s->n - b->from : BLOCK;
    if (b->n <= 0) return false;
    reader_of(s->dtype)(b->key, x + (size_t)(b->from * s->stride) * gradd_dtype_bytes(s->dtype),
                        b->n, s->stride, s->flip);
    return true;
}

GRADD_MULTIARCH static int64_t smallest(const int64_t *key, int64_t n) {
    int64_t least = key[0];
    for (int64_t i = 1; i < n; i++)
        least = key[i] < least ? key[i] : least;
    return least;
}

/* The k first of a slice, of which no more are kept than that. */
static void partial(const gradd_slice_t *s, const char *x, gradd_entry_t *heap) {
    int64_t kept = 0;
    slice_block_t b;
    for (first_block(&b); next_block(&b, s, x);) {
        if (kept == s->k && smallest(b.key, b.n) >= heap[0].key) continue;
        for (int64_t i = 0; i < b.n; i++) {
            const gradd_entry_t entry = {b.key[i], b.from + i};
            if (kept < s->k) {
                heap[kept++] = entry;
                if (kept == s->k) gradd_heap_make(heap, kept);
            } else if (entry.key < heap[0].key) {
                gradd_heap_replace(heap, kept, entry);
            }
        }
    }
    gradd_heap_sort(heap, kept);
}

/* Where the first k + 1 keys are all different every sort gives the same k. A few are found faster
 * by insertion; false if two are equal, and then out holds nothing. */
#define FEW 16

static bool few_without_ties(const gradd_slice_t *s, const char *x, gradd_entry_t *out) {
    gradd_entry_t best[FEW + 1];
    const int64_t want = s->k < s->n ? s->k + 1 : s->k;
    int64_t kept = 0;
    slice_block_t b;
    for (first_block(&b); next_block(&b, s, x);) {
        for (int64_t i = 0; i < b.n; i++) {
            const int64_t key = b.key[i];
            if (kept == want && key >= best[want - 1].key) continue;
            int64_t to = kept < want ? kept++ : want - 1;
            for (; to > 0 && key < best[to - 1].key; to--)
                best[to] = best[to - 1];
            best[to] = (gradd_entry_t){key, b.from + i};
        }
    }
    for (int64_t i = 1; i < want; i++)
        if (best[i].key == best[i - 1].key) return false;
    memcpy(out, best, (size_t)s->k * sizeof *out);
    return true;
}

static int compare_stably(const void *a, const void *b) {
    const gradd_entry_t *x = a, *y = b;
    if (x->key != y->key) return x->key < y->key ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at;
}

/* Rising order, equal keys by rising place. */
static void sort_stably(gradd_entry_t *q, int64_t n) {
    if (n > 1) qsort(q, (size_t)n, sizeof *q, compare_stably);
}

void gradd_slice_order(const gradd_slice_t *s, const char *x, gradd_entry_t *out) {
    if (s->how == GRADD_ORDER_PARTIAL) {
        partial(s, x, out);
        return;
    }
    if (s->how == GRADD_ORDER_SELECT_SORT && s->k <= FEW && few_without_ties(s, x, out)) return;
    slice_block_t b;
    for (first_block(&b); next_block(&b, s, x);)
        for (int64_t i = 0; i < b.n; i++)
            out[b.from + i] = (gradd_entry_t){b.key[i], b.from + i};
    if (s->how == GRADD_ORDER_SORT) {
        gradd_sort_entries(out, s->n);
    } else if (s->how == GRADD_ORDER_SORT_STABLY) {
        sort_stably(out, s->n);
    } else {
        gradd_select_nth(out, s->n, s->k - 1);
        if (s->how == GRADD_ORDER_SELECT_SORT)
            gradd_sort_entries(out, s->k - 1); /* the last is in place */
    }
}

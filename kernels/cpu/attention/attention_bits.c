/* Bits of the keys that queries may look at. See attention_bits.h. */
#include "kernels/cpu/attention/attention_bits.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/attention/attention_runs.h"
#include "kernels/describe/dispatch.h"
#include "kernels/math/rng.h"

enum { TILE = GRADD_ATTN_TILE };

static int64_t offset_of(const gradd_attn_extra_t *e, const attn_block_t *block, int64_t query) {
    return block->b * e->batch + block->h * e->head + query * e->row;
}

void gradd_attn_ranges(const uint8_t *mask, int64_t rows, int64_t n, int32_t *out) {
#pragma omp parallel for schedule(static) if (rows * n >= GRADD_PARALLEL_MIN)
    for (int64_t i = 0; i < rows; i++) {
        const uint8_t *row = mask + i * n;
        int64_t lo = 0, hi = n, count = 0;
        while (lo < n && !row[lo])
            lo++;
        while (hi > lo && !row[hi - 1])
            hi--;
        for (int64_t j = lo; j < hi; j++)
            count += row[j] != 0;
        out[3 * i] = count ? (int32_t)lo : 0;
        out[3 * i + 1] = count ? (int32_t)hi : (int32_t)n;
        out[3 * i + 2] = !count             ? GRADD_ATTN_NONE
                         : count == hi - lo ? GRADD_ATTN_SOLID
                                            : GRADD_ATTN_HOLES;
    }
}

void attn_bits_mark(attn_bits_t *bits, const gradd_attn_t *p, int64_t i) {
    bits->dead[i] = bits->holes[i] = false;
    bits->rare[i] = bits->any_rare = true;
    bits->lo[i] = 0, bits->hi[i] = (int32_t)p->n_k;
    bits->from = 0, bits->to = p->n_k;
}

/* A query without any allowed key. */
static void begin_dead(attn_bits_t *bits, const gradd_attn_t *p, int64_t i) {
    const bool uneven = p->bias.data && !(p->hides & GRADD_ATTN_HIDES_BIAS);
    /* the gradient of the cap is taken at the product */
    const bool capped = p->softcap != 0 && !(p->hides & GRADD_ATTN_HIDES_SCORE);
    if (!p->zero && (uneven || capped || p->sunk || isinf(p->fill))) {
        attn_bits_mark(bits, p, i);
        return;
    }
    bits->dead[i] = bits->any_dead = true;
    bits->lo[i] = 0, bits->hi[i] = p->zero ? 0 : (int32_t)p->n_k;
}

static void begin_query(attn_bits_t *bits, const gradd_attn_t *p, const attn_block_t *block,
                        int64_t i) {
    const int32_t *range = p->range.data;
    bits->lo[i] = 0, bits->hi[i] = (int32_t)p->n_k;
    if (!range) return;
    range += offset_of(&p->range, block, block->first + i);
    bits->holes[i] = range[2] == GRADD_ATTN_HOLES && p->mask.data;
    /* a range comes from our own kernel, but a wrong one must not lead outside of the tensors */
    bits->lo[i] = range[0] < 0 ? 0 : range[0];
    bits->hi[i] = range[1] > p->n_k ? (int32_t)p->n_k : range[1];
    if (range[2] == GRADD_ATTN_NONE && p->mask.data) begin_dead(bits, p, i);
}

void attn_bits_begin(attn_bits_t *bits, const gradd_attn_t *p, const attn_block_t *block) {
    memset(bits->holes, 0, sizeof bits->holes);
    memset(bits->dead, 0, sizeof bits->dead);
    memset(bits->rare, 0, sizeof bits->rare);
    bits->any_dead = bits->any_rare = false;
    bits->from = p->n_k, bits->to = 0;
    for (int64_t i = 0; i < TILE; i++) {
        bits->lo[i] = 0, bits->hi[i] = (int32_t)p->n_k;
        bits->drop_group[i] = -1;
        if (i >= block->n) continue;
        begin_query(bits, p, block, i);
        if (bits->lo[i] >= bits->hi[i]) continue;
        if (bits->lo[i] < bits->from) bits->from = bits->lo[i];
        if (bits->hi[i] > bits->to) bits->to = bits->hi[i];
    }
}

/* Bits [lo, hi) of a word. */
static uint64_t span(int64_t lo, int64_t hi) {
    if (hi <= lo) return 0;
    return (hi >= 64 ? ~0ull : (1ull << hi) - 1) & ~0ull << lo;
}

/* One bit per byte that is not zero; n <= 64. */
GRADD_MULTIARCH static uint64_t gather_bits(const uint8_t *bytes, int64_t n) {
    uint8_t padded[64] = {0};
    uint64_t word = 0;
    memcpy(padded, bytes, (size_t)n);
    for (int part = 0; part < 8; part++) {
        uint64_t eight;
        memcpy(&eight, padded + 8 * part, 8);
        /* 1 in every byte that is not zero, then the product puts the eight bits side by side */
        eight = ((eight & 0x7f7f7f7f7f7f7f7full) + 0x7f7f7f7f7f7f7f7full) | eight;
        eight = eight >> 7 & 0x0101010101010101ull;
        word |= (eight * 0x0102040810204080ull >> 56) << 8 * part;
    }
    return word;
}

/* The mask's bits for n keys. */
static uint64_t mask_word(const gradd_attn_t *p, const attn_block_t *block, int64_t i,
                          int64_t first, int64_t n) {
    const uint8_t *row = p->mask.data;
    return gather_bits(row + offset_of(&p->mask, block, block->first + i) + first, n);
}

static void show_special(attn_bits_t *bits, const gradd_attn_t *p, const attn_block_t *block,
                         int64_t first, int64_t n) {
    for (int64_t i = 0; i < TILE; i++)
        bits->shown[i] = bits->dead[i]   ? 0
                         : bits->rare[i] ? mask_word(p, block, i, first, n)
                                         : ~0ull;
}

attn_cover_t attn_bits_tile(attn_bits_t *bits, const gradd_attn_t *p, const attn_block_t *block,
                            int64_t first, int64_t n) {
    const uint64_t full = span(0, n);
    uint64_t any = 0, all = full;
    if (attn_bits_special(bits)) show_special(bits, p, block, first, n);
    for (int64_t i = 0; i < TILE; i++) {
        int64_t lo = bits->lo[i] - first, hi = bits->hi[i] - first;
        uint64_t word = i < block->n && lo < n ? span(lo < 0 ? 0 : lo, hi > n ? n : hi) : 0;
        if (word && bits->holes[i]) word &= mask_word(p, block, i, first, n);
        any |= word;
        if (i >= block->n) word = full;
        all &= word;
        bits->allowed[i] = word;
    }
    return !any ? ATTN_COVER_NONE : all == full ? ATTN_COVER_ALL : ATTN_COVER_SOME;
}

/* Keep bits of one group of 64 elements. */
static uint64_t keep_bits(const gradd_attn_drop_t *d, int64_t group) {
    uint32_t words[GRADD_RNG_GROUP];
    const uint32_t limit = (uint32_t)d->limit;
    uint8_t keep[GRADD_RNG_GROUP];
    if (d->limit > UINT32_MAX) return 0;
    gradd_rng_group(d->seed, d->node, (uint64_t)group, words);
    for (int i = 0; i < GRADD_RNG_GROUP; i++)
        keep[i] = words[i] >= limit;
    return gather_bits(keep, GRADD_RNG_GROUP);
}

/* A tile of a row starts anywhere within a group: the bits of two groups, of which the second is
 * the first one of the next tile. */
static uint64_t keep_word(attn_bits_t *bits, const gradd_attn_drop_t *d, int64_t i,
                          int64_t element) {
    const int64_t group = element / GRADD_RNG_GROUP, shift = element % GRADD_RNG_GROUP;
    const uint64_t low = bits->drop_group[i] == group ? bits->drop_next[i] : keep_bits(d, group);
    if (!shift) return low;
    bits->drop_group[i] = group + 1;
    bits->drop_next[i] = keep_bits(d, group + 1);
    return low >> shift | bits->drop_next[i] << (64 - shift);
}

/* Bits of n live keys from `first` on, for query i: of the elements that they are among all rows.
 * Neighbours in a sequence come together. */
static uint64_t keep_live(attn_bits_t *bits, const gradd_attn_t *p, const attn_block_t *block,
                          int64_t i, int64_t first, int64_t n) {
    const gradd_attn_rows_t *rows = &p->rows;
    const int64_t query = rows->q[block->first + i];
    const int64_t head = query / rows->positions * p->heads + block->h;
    const int64_t start = (head * rows->positions + query % rows->positions) * rows->key_positions;
    const int64_t from = bits->lo[i] > first ? bits->lo[i] - first : 0;
    const int64_t to = bits->hi[i] - first < n ? bits->hi[i] - first : n;
    uint64_t word = 0;
    attn_runs_t runs;
    if (from >= to) return 0;
    attn_find_runs(rows->k, rows->key_positions, 0, first + from, to - from, &runs);
    for (int k = 0; k < runs.n; k++) {
        const attn_run_t *run = &runs.v[k];
        const uint64_t kept = keep_word(bits, &p->drop, i, start + run->position);
        word |= (kept & span(0, run->n)) << (from + run->at);
    }
    return word;
}

void attn_bits_drop(attn_bits_t *bits, const gradd_attn_t *p, const attn_block_t *block,
                    int64_t first, int64_t n) {
    for (int64_t i = 0; i < TILE && p->rows.q; i++)
        bits->kept[i] = i < block->n ? keep_live(bits, p, block, i, first, n) : 0;
    /* bits beyond the last key are not looked at */
    for (int64_t i = 0; i < TILE && !p->rows.q; i++) {
        const int64_t row = (block->b * p->heads + block->h) * p->n_q + block->first + i;
        bits->kept[i] = i < block->n ? keep_word(bits, &p->drop, i, row * p->n_k + first) : 0;
    }
}

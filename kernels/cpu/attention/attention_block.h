/* Attention of one block of 64 queries, written once for f32 and f64. See attention_cpu.h.
 *
 * Included after attention_tile.h with the same macros. A block walks over the tiles of keys that
 * its queries may look at. Rows of the tensors are used where they lie; they are copied into the
 * thread's scratch if they are bf16 or if their width is not a whole number of vectors. Where the
 * processor multiplies bf16 in pairs, both sides of every product are bf16, see attention_pairs.h:
 * tiles are rounded for it, and the scale and dropout's factor, which otherwise go into the turned
 * side, multiply the product. */

/* False for f64 at compile time. */
#define PAIRED(w) (ATTN_PAIRS && sizeof(REAL) == sizeof(attn_pair_t) && (w)->pairs)

typedef struct NAME(workspace_s) { /* one thread's scratch, and what belongs to the block at hand */
    REAL *qt, *dyt;           /* [D][64] scaled queries, [E][64] gradients, both turned; pairs: half
                                 as many rows */
    REAL *q, *k, *v, *y, *dy; /* [64][padded width] room for copies; pairs: half as many rows */
    REAL *out, *dq;           /* [64][padded width] sums */
    REAL *x, *p, *z;          /* tiles [64 keys][64 queries] */
    REAL *packed;             /* a tile as pairs */
    REAL *dk, *dv;            /* [n_k][padded width] sums, where they cannot be made in place */
    REAL max[TILE], sum[TILE], factor[TILE], delta[TILE];
    bool pairs;
    attn_bits_t bits;
    attn_runs_t queries; /* of the block */
} NAME(workspace_t);

typedef struct NAME(rows_s) {
    const REAL *at;
    int64_t ld;
} NAME(rows_t);

static int64_t NAME(padded)(int64_t cols) {
    return (cols + LANES - 1) / LANES * LANES;
}

/* Takes n elements of a thread's scratch; with base NULL only counts. */
static REAL *NAME(take)(REAL *base, size_t *used, int64_t n) {
    REAL *at = base ? base + *used : NULL;
    *used += (size_t)(n + 31) / 32 * 32;
    return at;
}

/* Whether gradients of rows this wide are summed where the caller wants them. */
static bool NAME(in_place)(const gradd_attn_t *p, int64_t cols) {
    return !gradd_dtype_is_half(p->dtype) && cols % LANES == 0;
}

/* Elements of a thread's scratch. */
static size_t NAME(share)(const gradd_attn_t *p, bool backward, REAL *base, NAME(workspace_t) * w) {
    const int64_t d = NAME(padded)(p->d), e = NAME(padded)(p->d_v), tile = TILE * TILE;
    size_t used = 0;
    w->qt = NAME(take)(base, &used, d * TILE);
    w->q = NAME(take)(base, &used, d * TILE);
    w->k = NAME(take)(base, &used, d * TILE);
    w->v = NAME(take)(base, &used, e * TILE);
    w->out = NAME(take)(base, &used, e * TILE);
    w->x = NAME(take)(base, &used, tile);
    w->packed = NAME(take)(base, &used, p->dtype == GRADD_DT_BF16 ? tile / 2 : 0);
    if (!backward) return used;
    w->dyt = NAME(take)(base, &used, e * TILE);
    w->y = NAME(take)(base, &used, e * TILE);
    w->dy = NAME(take)(base, &used, e * TILE);
    w->dq = NAME(take)(base, &used, d * TILE);
    w->p = NAME(take)(base, &used, tile);
    w->z = NAME(take)(base, &used, tile);
    w->dk = NAME(in_place)(p, p->d) ? NULL : NAME(take)(base, &used, d * p->n_k);
    w->dv = NAME(in_place)(p, p->d_v) ? NULL : NAME(take)(base, &used, e * p->n_k);
    return used;
}

/* ---- rows of tensors ------------------------------------------------------------------------- */

static int64_t NAME(row_at)(const gradd_attn_side_t *s, const attn_block_t *rows) {
    return rows->b * s->batch + rows->h * s->head + rows->first * s->row;
}

/* Rows as REAL. `whole`: they will be read in whole vectors. */
static NAME(rows_t) NAME(rows)(const gradd_attn_t *p, const gradd_attn_side_t *s,
                               const attn_block_t *rows, int64_t cols, bool whole, REAL *room) {
    const int64_t at = NAME(row_at)(s, rows), ld = NAME(padded)(cols);
    const bool narrow = gradd_dtype_is_half(p->dtype);
    if (!narrow && (!whole || cols % LANES == 0))
        return (NAME(rows_t)){(const REAL *)s->data + at, s->row};
    for (int64_t i = 0; i < rows->n; i++) {
        REAL *to = room + i * ld;
        if (narrow)
            NAME(widen)(to, (const uint16_t *)s->data + at + i * s->row, p->dtype, cols);
        else
            memcpy(to, (const REAL *)s->data + at + i * s->row, sizeof(REAL) * (size_t)cols);
        for (int64_t c = cols; c < ld; c++)
            to[c] = 0;
    }
    return (NAME(rows_t)){room, ld};
}

static const gradd_bf16_t *NAME(rows_bf16)(const gradd_attn_side_t *s, const attn_block_t *rows) {
    return (const gradd_bf16_t *)s->data + NAME(row_at)(s, rows);
}

/* Rows as the right side of a product that sums over them. */
static operand_t NAME(right)(const gradd_attn_t *p, const gradd_attn_side_t *s,
                             const attn_block_t *rows, int64_t cols, const NAME(workspace_t) * w,
                             REAL *room) {
    if (PAIRED(w)) {
        const int64_t ld = NAME(padded)(cols);
        attn_pairs_rows(NAME(rows_bf16)(s, rows), s->row, rows->n, cols, (attn_pair_t *)room, ld);
        return (operand_t){room, 0, ld};
    }
    NAME(rows_t) x = NAME(rows)(p, s, rows, cols, true, room);
    return (operand_t){x.at, 0, x.ld};
}

static operand_t NAME(rows_as_pairs)(const gradd_attn_side_t *s, const attn_block_t *rows) {
    return (operand_t){NAME(rows_bf16)(s, rows), s->row / 2, 1};
}

/* Rows as the left side of a product that sums along them. */
static operand_t NAME(left)(const gradd_attn_t *p, const gradd_attn_side_t *s,
                            const attn_block_t *rows, int64_t cols, const NAME(workspace_t) * w,
                            REAL *room) {
    if (PAIRED(w)) return NAME(rows_as_pairs)(s, rows);
    NAME(rows_t) x = NAME(rows)(p, s, rows, cols, false, room);
    return (operand_t){x.at, x.ld, 1};
}

/* Rows as the left side where they are a right side already: elsewhere the same numbers serve. */
static operand_t NAME(left_too)(const gradd_attn_side_t *s, const attn_block_t *rows,
                                const NAME(workspace_t) * w, operand_t right) {
    if (PAIRED(w)) return NAME(rows_as_pairs)(s, rows);
    return (operand_t){right.at, right.sum, 1};
}

/* n queries, a left side, turned: then they are a right side. `scale` is not for pairs. */
static void NAME(turn_left)(operand_t x, int64_t n, int64_t cols, REAL scale,
                            const NAME(workspace_t) * w, REAL *out) {
    if (PAIRED(w))
        NAME(turn_bits)(x.at, x.row, n, cols / 2, out);
    else
        NAME(turn)(x.at, x.row, n, cols, scale, out);
}

/* A tile as the left side of a product that sums over its keys, or over its queries. */
static operand_t NAME(tile_left)(const REAL *tile, bool over_keys, int64_t keys, int64_t queries,
                                 const NAME(workspace_t) * w) {
    if (!PAIRED(w)) return over_keys ? (operand_t){tile, 1, TILE} : (operand_t){tile, TILE, 1};
    const float *x = (const float *)(const void *)tile;
    attn_pair_t *out = (attn_pair_t *)w->packed;
    if (over_keys) {
        attn_pairs_of_keys(x, keys, queries, out);
        return (operand_t){out, 1, TILE};
    }
    attn_pairs_of_queries(x, keys, queries, out);
    return (operand_t){out, TILE / 2, 1};
}

/* C[m, n] = A B, or C += A B, over k elements. */
static void NAME(multiply)(const NAME(workspace_t) * w, int64_t m, int64_t n, int64_t k,
                           operand_t a, operand_t b, bool add, REAL *c, int64_t ldc) {
    const int64_t steps = PAIRED(w) ? (k + 1) / 2 : k;
    const attn_product_t product = {m, n, steps, a.row, a.sum, b.sum, ldc, add};
    if (PAIRED(w))
        attn_pairs_product(&product, a.at, b.at, (float *)(void *)c);
    else
        NAME(product)(&product, a.at, b.at, c);
}

/* Writes rows of scratch into a tensor. */
static void NAME(put_rows)(const gradd_attn_t *p, const gradd_attn_side_t *s,
                           const attn_block_t *rows, int64_t cols, const REAL *from) {
    const int64_t at = NAME(row_at)(s, rows), ld = NAME(padded)(cols);
    for (int64_t i = 0; i < rows->n; i++, from += ld) {
        if (gradd_dtype_is_half(p->dtype))
            NAME(narrow)((uint16_t *)s->data + at + i * s->row, from, p->dtype, cols);
        else
            memcpy((REAL *)s->data + at + i * s->row, from, sizeof(REAL) * (size_t)cols);
    }
}

/* ---- scores ---------------------------------------------------------------------------------- */

static int64_t NAME(lanes)(const attn_block_t *block) {
    return NAME(padded)(block->n);
}

/* Clears the lanes of queries that may not look at anything. */
static void NAME(clear_dead)(const NAME(workspace_t) * w, REAL *x, int64_t rows) {
    for (int64_t i = 0; i < TILE; i++)
        for (int64_t j = 0; w->bits.dead[i] && j < rows; j++)
            x[j * TILE + i] = 0;
}

/* Where the bias of a pair of runs begins; they are of one sequence. */
static int64_t NAME(bias_at)(const gradd_attn_extra_t *e, int64_t head, const attn_run_t *q,
                             const attn_run_t *k) {
    return q->b * e->batch + head * e->head + q->position * e->row + k->position * e->col;
}

static void NAME(add_bias_of_runs)(const gradd_attn_t *p, int64_t head, const attn_run_t *q,
                                   const attn_run_t *k, REAL *x) {
    const gradd_attn_extra_t *e = &p->bias;
    const REAL *bias = (const REAL *)e->data + NAME(bias_at)(e, head, q, k);
    x += k->at * TILE + q->at;
    if (e->row && e->col) {
        NAME(add_turned)(bias, e->row, q->n, k->n, x, TILE);
        return;
    }
    for (int64_t j = 0; j < k->n; j++)
        for (int64_t i = 0; i < q->n; i++)
            x[j * TILE + i] += bias[i * e->row + j * e->col];
}

static void NAME(find_key_runs)(const gradd_attn_t *p, const attn_block_t *keys, attn_runs_t *out) {
    attn_find_runs(p->rows.k, p->rows.key_positions, keys->b, keys->first, keys->n, out);
}

/* Nothing for pairs of different sequences, which do not look at each other. */
static void NAME(add_bias)(const gradd_attn_t *p, const attn_block_t *block,
                           const attn_block_t *keys, const NAME(workspace_t) * w, REAL *x) {
    attn_runs_t runs;
    NAME(find_key_runs)(p, keys, &runs);
    for (int i = 0; i < w->queries.n; i++)
        for (int j = 0; j < runs.n; j++)
            if (w->queries.v[i].b == runs.v[j].b)
                NAME(add_bias_of_runs)(p, block->h, &w->queries.v[i], &runs.v[j], x);
}

/* Where masked keys have a share, those whose bias is hidden give it no gradient. */
static void NAME(add_dbias_of_runs)(const gradd_attn_t *p, int64_t head, const attn_run_t *q,
                                    const attn_run_t *k, const NAME(workspace_t) * w) {
    const gradd_attn_extra_t *e = &p->bias;
    const bool gated = attn_bits_special(&w->bits) && p->hides & GRADD_ATTN_HIDES_BIAS &&
                       !(p->hides & GRADD_ATTN_FLOOR);
    const REAL *z = w->z + k->at * TILE + q->at;
    REAL *dbias = (REAL *)p->dbias + NAME(bias_at)(e, head, q, k);
    if (!gated && e->row && e->col) {
        NAME(add_turned)(z, TILE, k->n, q->n, dbias, e->row);
        return;
    }
    for (int64_t i = 0; i < q->n; i++) {
        const uint64_t word = gated ? w->bits.shown[q->at + i] >> k->at : ~0ull;
        for (int64_t j = 0; j < k->n && word == ~0ull; j++)
            dbias[i * e->row + j * e->col] += z[j * TILE + i];
        for (int64_t j = 0; j < k->n && word != ~0ull; j++)
            if (word >> j & 1) dbias[i * e->row + j * e->col] += z[j * TILE + i];
    }
}

static void NAME(add_dbias)(const gradd_attn_t *p, const attn_block_t *block,
                            const attn_block_t *keys, const NAME(workspace_t) * w) {
    attn_runs_t runs;
    NAME(find_key_runs)(p, keys, &runs);
    for (int i = 0; i < w->queries.n; i++)
        for (int j = 0; j < runs.n; j++)
            if (w->queries.v[i].b == runs.v[j].b)
                NAME(add_dbias_of_runs)(p, block->h, &w->queries.v[i], &runs.v[j], w);
}

/* Turned queries, scaled unless they are pairs. */
static void NAME(begin)(const gradd_attn_t *p, const attn_block_t *block, operand_t q,
                        NAME(workspace_t) * w) {
    attn_bits_begin(&w->bits, p, block);
    attn_find_runs(p->rows.q, p->rows.positions, block->b, block->first, block->n, &w->queries);
    NAME(turn_left)(q, block->n, p->d, (REAL)p->scale, w, w->qt);
    if (w->bits.any_dead) NAME(clear_dead)(w, w->qt, PAIRED(w) ? p->d / 2 : p->d);
}

/* Scores of a tile into w->x, capped but neither biased nor masked. */
static void NAME(scores)(const gradd_attn_t *p, const attn_block_t *block, const attn_block_t *keys,
                         operand_t k, NAME(workspace_t) * w) {
    const int64_t lanes = NAME(lanes)(block);
    const operand_t q = {w->qt, 0, TILE};
    NAME(multiply)(w, keys->n, lanes, p->d, k, q, false, w->x, TILE);
    if (PAIRED(w)) NAME(times)(w->x, keys->n, lanes, (REAL)p->scale);
    if (p->softcap != 0) NAME(cap)(w->x, keys->n, lanes, (REAL)p->softcap);
}

/* The fill, in rows where it counts. */
static void NAME(put_fill)(const gradd_attn_t *p, const NAME(workspace_t) * w, REAL *x,
                           int64_t keys) {
    for (int64_t i = 0; i < TILE; i++)
        for (int64_t j = 0; w->bits.rare[i] && j < keys; j++)
            if (!(w->bits.shown[i] >> j & 1)) x[j * TILE + i] = (REAL)p->fill;
}

/* Bias and mask. */
static void NAME(limit)(const gradd_attn_t *p, const attn_block_t *block, const attn_block_t *keys,
                        bool masked, NAME(workspace_t) * w, REAL *x) {
    const bool hides_bias = p->hides & GRADD_ATTN_HIDES_BIAS;
    if (w->bits.any_rare && !hides_bias) NAME(put_fill)(p, w, x, keys->n);
    if (p->bias.data) NAME(add_bias)(p, block, keys, w, x);
    if (p->bias.data && w->bits.any_dead) NAME(clear_dead)(w, x, keys->n);
    if (w->bits.any_rare && hides_bias) NAME(put_fill)(p, w, x, keys->n);
    if (masked) NAME(select)(x, x, keys->n, NAME(lanes)(block), w->bits.allowed, -(REAL)INFINITY);
}

static attn_block_t NAME(keys_at)(const gradd_attn_t *p, const attn_block_t *block, int64_t first) {
    const int64_t n = p->n_k - first < TILE ? p->n_k - first : TILE;
    return (attn_block_t){block->b, block->h / (p->heads / p->kv_heads), first, n};
}

/* ---- forward --------------------------------------------------------------------------------- */

static void NAME(forward_tile)(const gradd_attn_t *p, const attn_block_t *block, int64_t first,
                               bool *started, NAME(workspace_t) * w) {
    const attn_block_t keys = NAME(keys_at)(p, block, first);
    const int64_t lanes = NAME(lanes)(block), e = NAME(padded)(p->d_v);
    const attn_cover_t cover = attn_bits_tile(&w->bits, p, block, first, keys.n);
    if (cover == ATTN_COVER_NONE) return;
    NAME(scores)(p, block, &keys, NAME(left)(p, &p->k, &keys, p->d, w, w->k), w);
    NAME(limit)(p, block, &keys, cover == ATTN_COVER_SOME, w, w->x);
    bool rescale = NAME(soften)(w->x, keys.n, lanes, w->max, w->sum, w->factor);
    if (rescale && *started) NAME(scale_rows)(w->out, e, block->n, e, w->factor);
    if (p->drop.active) {
        attn_bits_drop(&w->bits, p, block, first, keys.n);
        NAME(select)(w->x, w->x, keys.n, lanes, w->bits.kept, 0);
    }
    const operand_t prob = NAME(tile_left)(w->x, true, keys.n, block->n, w);
    const operand_t v = NAME(right)(p, &p->v, &keys, p->d_v, w, w->v);
    NAME(multiply)(w, block->n, e, keys.n, prob, v, *started, w->out, e);
    *started = true;
}

/* Sums over all tiles: out, max, sum. */
static void NAME(forward_tiles)(const gradd_attn_t *p, const attn_block_t *block,
                                NAME(workspace_t) * w) {
    bool started = false;
    const REAL *sinks = p->sinks;
    for (int64_t i = 0; i < TILE; i++) {
        w->max[i] = sinks ? sinks[block->h] : -(REAL)INFINITY;
        w->sum[i] = sinks && w->max[i] > -(REAL)INFINITY; /* exp(sink - max) */
    }
    for (int64_t first = w->bits.from / TILE * TILE; first < w->bits.to; first += TILE)
        NAME(forward_tile)(p, block, first, &started, w);
    if (!started) memset(w->out, 0, sizeof(REAL) * (size_t)(block->n * NAME(padded)(p->d_v)));
}

/* The largest bias of a query. NaN if there is one. */
static REAL NAME(largest_bias)(const gradd_attn_t *p, const attn_block_t *block, int64_t i) {
    const gradd_attn_extra_t *e = &p->bias;
    const REAL *row = (const REAL *)e->data + block->b * e->batch + block->h * e->head +
                      (block->first + i) * e->row;
    REAL most = row[0];
    for (int64_t j = 1; j < p->n_k && e->col && most == most; j++)
        if (!(row[j * e->col] <= most)) most = row[j * e->col];
    return most;
}

/* A query is rare if no allowed score is above this. `before` is the limit of the query before it,
 * which often has the same bias. */
static REAL NAME(rare_limit)(const gradd_attn_t *p, const attn_block_t *block, int64_t i,
                             REAL before) {
    const REAL vanishing = sizeof(REAL) == 8 ? 746 : 104; /* exp(-it) is zero */
    if (p->fill <= GRADD_ATTN_MASKED) return (REAL)GRADD_ATTN_MASKED;
    if (!p->bias.data || p->hides & GRADD_ATTN_HIDES_BIAS) return (REAL)p->fill + vanishing;
    if (i && !p->bias.row) return before;
    return (REAL)p->fill + NAME(largest_bias)(p, block, i) + vanishing;
}

/* Marks the rare queries by their largest scores; returns whether there are any new ones. */
static bool NAME(find_rare)(const gradd_attn_t *p, const attn_block_t *block,
                            NAME(workspace_t) * w) {
    bool found = false;
    REAL limit = 0;
    for (int64_t i = 0; i < block->n && p->mask.data; i++) {
        limit = NAME(rare_limit)(p, block, i, limit);
        if (w->bits.dead[i] || w->bits.rare[i] || w->max[i] > limit) continue;
        attn_bits_mark(&w->bits, p, i);
        found = true;
    }
    return found;
}

/* This block's part of the statistics: largest scores, then n_q further on their logarithms. */
static REAL *NAME(stats_at)(const gradd_attn_t *p, const attn_block_t *block) {
    if (!p->stats) return NULL;
    return (REAL *)p->stats + (block->b * p->heads + block->h) * 2 * p->n_q + block->first;
}

static void NAME(forward_block)(const gradd_attn_t *p, const attn_block_t *block,
                                NAME(workspace_t) * w) {
    const int64_t e = NAME(padded)(p->d_v);
    NAME(begin)(p, block, NAME(left)(p, &p->q, block, p->d, w, w->q), w);
    NAME(forward_tiles)(p, block, w);
    if (NAME(find_rare)(p, block, w)) NAME(forward_tiles)(p, block, w);
    REAL *stats = NAME(stats_at)(p, block);
    for (int64_t i = 0; i < block->n; i++) {
        const bool zero = w->bits.dead[i] && p->zero;
        const REAL keep = p->drop.active ? (REAL)p->drop.scale : 1;
        w->factor[i] = zero ? 0 : keep / w->sum[i];
        if (!stats) continue;
        stats[i] = zero && !p->sunk ? 0 : w->max[i];
        stats[i + p->n_q] = zero ? 0 : (REAL)log((double)w->sum[i]);
    }
    NAME(scale_rows)(w->out, e, block->n, e, w->factor);
    NAME(put_rows)(p, &p->y, block, p->d_v, w->out);
}

/* Gradients of attention for one block of 64 queries, written once for f32 and f64.
 *
 * Included after attention_block.h with the same macros. With P the probabilities, dropped ones P':
 *
 *     dV = P'^T dY      dP = (dY V^T) dropped      delta = sum(dY Y) per query
 *     dS = P (dP - delta)      dQ = scale dS K      dK = scale dS^T Q
 */

/* The scope of one call: a block of queries against the keys [from, to). */
typedef struct NAME(span_s) {
    attn_block_t block;
    int64_t from, to;
    int what;
    operand_t q, dy;
    bool started; /* dq holds something */
} NAME(span_t);

/* The sums that belong to keys, and their stride. */
static REAL *NAME(key_sums)(const gradd_attn_side_t *s, REAL *room, const attn_block_t *keys,
                            int64_t cols, int64_t *ld) {
    if (!s->data) return NULL;
    *ld = room ? NAME(padded)(cols) : s->row;
    return room ? room + keys->first * *ld : (REAL *)s->data + NAME(row_at)(s, keys);
}

/* sums[keys] += tile rows; tile is [keys][queries], rows are those of the queries. */
static void NAME(add_to_keys)(const NAME(span_t) * s, const attn_block_t *keys, const REAL *tile,
                              operand_t rows, int64_t cols, const NAME(workspace_t) * w, REAL *sums,
                              int64_t ld) {
    const operand_t left = NAME(tile_left)(tile, false, keys->n, s->block.n, w);
    NAME(multiply)(w, keys->n, NAME(padded)(cols), s->block.n, left, rows, true, sums, ld);
}

/* Probabilities of a tile; w->x keeps the capped scores if the cap's gradient needs them. */
static REAL *NAME(tile_probabilities)(const gradd_attn_t *p, const NAME(span_t) * s,
                                      const attn_block_t *keys, bool masked,
                                      NAME(workspace_t) * w) {
    REAL *x = w->x;
    if (p->softcap != 0) {
        memcpy(w->p, w->x, sizeof(REAL) * (size_t)(keys->n * TILE));
        x = w->p;
    }
    NAME(limit)(p, &s->block, keys, masked, w, x);
    NAME(probabilities)(x, x, keys->n, NAME(lanes)(&s->block), w->max, w->sum);
    return x;
}

/* The remaining gradients at a floor, in queries where hidden keys have a share. */
static void NAME(pass_floor)(const gradd_attn_t *p, const attn_block_t *block,
                             const attn_block_t *keys, NAME(workspace_t) * w) {
    const gradd_attn_extra_t *e = &p->bias;
    const int64_t at =
        block->b * e->batch + block->h * e->head + block->first * e->row + keys->first * e->col;
    const REAL *bias = e->data;
    for (int64_t i = 0; i < block->n; i++)
        for (int64_t j = 0; j < keys->n && w->bits.shown[i] != ~0ull; j++) {
            if (w->bits.shown[i] >> j & 1) continue;
            const bool below = bias && bias[at + i * e->row + j * e->col] < (REAL)p->fill;
            w->z[j * TILE + i] *= below ? (REAL)0 : (REAL)0.5;
        }
}

/* w->z = gradient of the scaled products q k, times scale */
static void NAME(tile_dscores)(const gradd_attn_t *p, const NAME(span_t) * s,
                               const attn_block_t *keys, const REAL *prob, NAME(workspace_t) * w) {
    const int64_t lanes = NAME(lanes)(&s->block);
    const bool dbias = p->dbias && s->what & BY_QUERY;
    if (p->drop.active) {
        NAME(select)(w->z, w->z, keys->n, lanes, w->bits.kept, 0);
        if (PAIRED(w)) NAME(times)(w->z, keys->n, lanes, (REAL)p->drop.scale);
    }
    NAME(soften_grad)(w->z, prob, keys->n, lanes, w->delta);
    const bool special = attn_bits_special(&w->bits), floor = p->hides & GRADD_ATTN_FLOOR;
    if (special && floor) NAME(pass_floor)(p, &s->block, keys, w);
    if (dbias) NAME(add_dbias)(p, &s->block, keys, w);
    if (special && !floor && p->hides & GRADD_ATTN_HIDES_SCORE)
        NAME(select)(w->z, w->z, keys->n, lanes, w->bits.shown, 0);
    if (p->softcap != 0) NAME(cap_grad)(w->z, w->x, keys->n, lanes, (REAL)p->softcap);
    NAME(times)(w->z, keys->n, lanes, (REAL)p->scale);
}

/* dv of a tile: of dropped probabilities, which need a tile of their own */
static void NAME(tile_dv)(const gradd_attn_t *p, const NAME(span_t) * s, const attn_block_t *keys,
                          const REAL *prob, NAME(workspace_t) * w) {
    int64_t ld = 0;
    REAL *dv = NAME(key_sums)(&p->dv, w->dv, keys, p->d_v, &ld);
    if (!dv || !(s->what & BY_KEY)) return;
    if (p->drop.active) {
        const int64_t lanes = NAME(lanes)(&s->block);
        NAME(select)(w->z, prob, keys->n, lanes, w->bits.kept, 0);
        NAME(times)(w->z, keys->n, lanes, (REAL)p->drop.scale);
        prob = w->z;
    }
    NAME(add_to_keys)(s, keys, prob, s->dy, p->d_v, w, dv, ld);
}

static void NAME(backward_tile)(const gradd_attn_t *p, NAME(span_t) * s, int64_t first,
                                NAME(workspace_t) * w) {
    const attn_block_t *block = &s->block, keys = NAME(keys_at)(p, block, first);
    const attn_cover_t cover = attn_bits_tile(&w->bits, p, block, first, keys.n);
    int64_t ld = 0;
    if (cover == ATTN_COVER_NONE) return;
    const operand_t k = NAME(right)(p, &p->k, &keys, p->d, w, w->k);
    NAME(scores)(p, block, &keys, NAME(left_too)(&p->k, &keys, w, k), w);
    const REAL *prob = NAME(tile_probabilities)(p, s, &keys, cover == ATTN_COVER_SOME, w);
    if (p->drop.active) attn_bits_drop(&w->bits, p, block, first, keys.n);
    NAME(tile_dv)(p, s, &keys, prob, w);
    if (!p->dq.data && !p->dk.data && !p->dbias) return;
    const int64_t lanes = NAME(lanes)(block), d = NAME(padded)(p->d);
    const operand_t v = NAME(left)(p, &p->v, &keys, p->d_v, w, w->v);
    NAME(multiply)(w, keys.n, lanes, p->d_v, v, (operand_t){w->dyt, 0, TILE}, false, w->z, TILE);
    NAME(tile_dscores)(p, s, &keys, prob, w);
    REAL *dk = NAME(key_sums)(&p->dk, w->dk, &keys, p->d, &ld);
    if (dk && s->what & BY_KEY) NAME(add_to_keys)(s, &keys, w->z, s->q, p->d, w, dk, ld);
    if (!p->dq.data || !(s->what & BY_QUERY)) return;
    const operand_t left = NAME(tile_left)(w->z, true, keys.n, block->n, w);
    NAME(multiply)(w, block->n, d, keys.n, left, k, s->started, w->dq, d);
    s->started = true;
}

/* w->delta */
static void NAME(deltas)(const gradd_attn_t *p, const NAME(span_t) * s, NAME(workspace_t) * w) {
    const attn_block_t *block = &s->block;
    if (PAIRED(w)) {
        attn_pairs_dots((attn_rows_bf16_t){NAME(rows_bf16)(&p->y, block), p->y.row},
                        (attn_rows_bf16_t){NAME(rows_bf16)(&p->dy, block), p->dy.row}, block->n,
                        p->d_v, (float *)(void *)w->delta);
        return;
    }
    NAME(rows_t) y = NAME(rows)(p, &p->y, block, p->d_v, false, w->y);
    NAME(row_dots)(y.at, y.ld, s->dy.at, s->dy.sum, block->n, p->d_v, w->delta);
}

static void NAME(backward_block)(const gradd_attn_t *p, NAME(span_t) * s, NAME(workspace_t) * w) {
    const attn_block_t *block = &s->block;
    const REAL *stats = NAME(stats_at)(p, block);
    s->q = NAME(right)(p, &p->q, block, p->d, w, w->q);
    s->dy = NAME(right)(p, &p->dy, block, p->d_v, w, w->dy);
    NAME(begin)(p, block, NAME(left_too)(&p->q, block, w, s->q), w);
    NAME(turn_left)(NAME(left_too)(&p->dy, block, w, s->dy), block->n, p->d_v,
                    p->drop.active ? (REAL)p->drop.scale : 1, w, w->dyt);
    NAME(deltas)(p, s, w);
    for (int64_t i = 0; i < TILE; i++) {
        w->max[i] = i < block->n ? stats[i] : 0;
        w->sum[i] = i < block->n ? stats[i + p->n_q] : 0; /* logarithms here */
        if (i >= block->n) w->delta[i] = 0;
    }
    NAME(find_rare)(p, block, w);
    if (w->bits.from > s->from) s->from = w->bits.from / TILE * TILE;
    if (w->bits.to < s->to) s->to = w->bits.to;
    for (int64_t first = s->from; first < s->to; first += TILE)
        NAME(backward_tile)(p, s, first, w);
    if (!p->dq.data || !(s->what & BY_QUERY)) return;
    if (!s->started) memset(w->dq, 0, sizeof(REAL) * (size_t)(block->n * NAME(padded)(p->d)));
    NAME(put_rows)(p, &p->dq, block, p->d, w->dq);
}

/* ---- sums of keys ---------------------------------------------------------------------------- */

static void NAME(clear_keys)(const gradd_attn_side_t *s, REAL *room, const attn_block_t *keys,
                             int64_t cols) {
    int64_t ld = 0;
    REAL *sums = NAME(key_sums)(s, room, keys, cols, &ld);
    for (int64_t j = 0; sums && j < keys->n; j++)
        memset(sums + j * ld, 0, sizeof(REAL) * (size_t)NAME(padded)(cols));
}

static void NAME(put_keys)(const gradd_attn_t *p, const gradd_attn_side_t *s, const REAL *room,
                           const attn_block_t *keys, int64_t cols) {
    if (s->data && room) NAME(put_rows)(p, s, keys, cols, room + keys->first * NAME(padded)(cols));
}

/* All queries of the heads that share one head of keys, against the keys of `keys`. */
static void NAME(backward_keys)(const gradd_attn_t *p, const attn_block_t *keys, int what,
                                NAME(workspace_t) * w) {
    const int64_t group = p->heads / p->kv_heads;
    NAME(clear_keys)(&p->dk, w->dk, keys, p->d);
    NAME(clear_keys)(&p->dv, w->dv, keys, p->d_v);
    for (int64_t h = keys->h * group; h < (keys->h + 1) * group; h++)
        for (int64_t first = 0; first < p->n_q; first += TILE) {
            const int64_t n = p->n_q - first < TILE ? p->n_q - first : TILE;
            NAME(span_t)
            s = {
                .block = {keys->b, h, first, n},
                .from = keys->first,
                .to = keys->first + keys->n,
                .what = what
            };
            NAME(backward_block)(p, &s, w);
        }
    NAME(put_keys)(p, &p->dk, w->dk, keys, p->d);
    NAME(put_keys)(p, &p->dv, w->dv, keys, p->d_v);
}

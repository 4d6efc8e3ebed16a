/* The blocked product for operands of type IN and results of type OUT, calculated in T; READ,
 * READ_C and WRITE convert, IS_PLAIN says that there is nothing to convert, and NAME(x) is a name
 * for these types. Included by gemm_blocked.c, once for each kind, and by nothing else. */

enum { NAME(lanes) = GRADD_PANEL_BYTES / sizeof(T) }; /* columns of a panel */

typedef struct NAME(buffers_s) {
    T a[ROWS * DEPTH], b[DEPTH * COLS], c[ROWS * COLS];
} NAME(buffers) __attribute__((aligned(64)));

/* A block of C, rows by some panels: where its operands are, for `depth` steps of the sums. */
typedef struct NAME(block_s) {
    const T *a[MOST_ROWS]; /* each row */
    const T *b;            /* the first panel */
    T *c;
    int64_t a_step, b_step, b_next; /* from step to step; from panel to panel */
    int64_t c_step, depth;
    bool add; /* to what C holds */
} NAME(block);

/* C += A B in registers: MR rows, PANELS panels. Each element of C is one chain of multiply-adds
 * over the steps, so its bits depend neither on the length of vectors nor on the block. */
#define MICRO(name, BYTES, MR, PANELS, TARGET)                                                     \
    GRADD_FUSED TARGET static void name(const NAME(block) * p) {                                   \
        GRADD_FUSED_BLOCK                                                                          \
        typedef T vec_t __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));        \
        enum { EACH = (BYTES) / sizeof(T), VECS = GRADD_PANEL_BYTES / (BYTES) * (PANELS) };        \
        enum { PER_PANEL = GRADD_PANEL_BYTES / (BYTES) };                                          \
        vec_t sum[MR][VECS], row[VECS];                                                            \
        const T *a[MR], *b = p->b;                                                                 \
        const int64_t a_step = p->a_step, b_step = p->b_step, b_next = p->b_next;                  \
        int64_t at = 0;                                                                            \
        for (int i = 0; i < MR; i++)                                                               \
            a[i] = p->a[i];                                                                        \
        for (int i = 0; i < MR; i++)                                                               \
            for (int v = 0; v < VECS; v++)                                                         \
                sum[i][v] =                                                                        \
                    p->add ? *(const vec_t *)(p->c + i * p->c_step + v * EACH) : (vec_t){0};       \
        for (int64_t l = 0; l < p->depth; l++, at += a_step, b += b_step) {                        \
            _Pragma("GCC unroll 8") for (int v = 0; v < VECS; v++) row[v] =                        \
                *(const vec_t *)(b + v / PER_PANEL * b_next + v % PER_PANEL * EACH);               \
            _Pragma("GCC unroll 8") for (int i = 0; i < MR; i++) {                                 \
                const T x = a[i][at];                                                              \
                _Pragma("GCC unroll 8") for (int v = 0; v < VECS; v++) sum[i][v] += x * row[v];    \
            }                                                                                      \
        }                                                                                          \
        for (int i = 0; i < MR; i++)                                                               \
            for (int v = 0; v < VECS; v++)                                                         \
                *(vec_t *)(p->c + i * p->c_step + v * EACH) = sum[i][v];                           \
    }
MICRO(NAME(micro_narrow), GRADD_VECTOR_BYTES, NARROW_ROWS, 1, )
#if GRADD_WIDE_BYTES == 64
MICRO(NAME(micro_wide), GRADD_WIDE_BYTES, WIDE_ROWS, 1, GRADD_WIDE)
MICRO(NAME(micro_pair), GRADD_WIDE_BYTES, WIDE_ROWS, 2, GRADD_WIDE)
#endif
#undef MICRO

/* ---- operands in the order in which they are read -------------------------------------------- */

#if IS_PLAIN
/* Lanes that lie along the steps, four of them by four steps at a time; returns how many lanes. */
static int64_t NAME(turn)(const T *x, const panel_t *p, T *out) {
    typedef T quad_t __attribute__((vector_size(4 * sizeof(T)), aligned(sizeof(T)), may_alias));
    const int64_t row_step = p->lane_step, depth = p->depth, width = p->width;
    const int64_t whole = depth / 4 * 4, lanes = p->n / 4 * 4;
    for (int64_t i = 0; i < lanes; i += 4) {
        const T *y = x + i * row_step;
        T *z = out + i;
        for (int64_t l = 0; l < whole; l += 4) {
            const quad_t a = *(const quad_t *)(y + l);
            const quad_t b = *(const quad_t *)(y + row_step + l);
            const quad_t c = *(const quad_t *)(y + 2 * row_step + l);
            const quad_t d = *(const quad_t *)(y + 3 * row_step + l);
            const quad_t ab = __builtin_shufflevector(a, b, 0, 4, 1, 5);
            const quad_t cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
            const quad_t ab2 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
            const quad_t cd2 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
            *(quad_t *)(z + l * width) = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
            *(quad_t *)(z + (l + 1) * width) = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
            *(quad_t *)(z + (l + 2) * width) = __builtin_shufflevector(ab2, cd2, 0, 1, 4, 5);
            *(quad_t *)(z + (l + 3) * width) = __builtin_shufflevector(ab2, cd2, 2, 3, 6, 7);
        }
        for (int64_t l = whole; l < depth; l++)
            for (int64_t j = 0; j < 4; j++)
                z[l * width + j] = y[j * row_step + l];
    }
    return lanes;
}

static inline __attribute__((always_inline)) void
NAME(copy)(const T *x, int64_t l_step, int64_t depth, const int64_t width, T *out) {
    for (int64_t l = 0; l < depth; l++)
        memcpy(out + l * width, x + l * l_step, (size_t)width * sizeof(T));
}
#endif

/* One panel: out[step][lane], p->n of whose p->width lanes are there, then zeros. */
static void NAME(pack)(const IN *x, const panel_t *p, T *out) {
    const int64_t n = p->n, width = p->width, depth = p->depth;
    int64_t done = 0;
#if IS_PLAIN
    if (n == width && p->lane_step == 1) {
        if (width == NAME(lanes))
            NAME(copy)(x, p->l_step, depth, NAME(lanes), out);
        else if (width == WIDE_ROWS)
            NAME(copy)(x, p->l_step, depth, WIDE_ROWS, out);
        else
            NAME(copy)(x, p->l_step, depth, NARROW_ROWS, out);
        return;
    }
    if (p->l_step == 1) done = NAME(turn)(x, p, out);
    if (done == width) return;
#endif
    for (int64_t l = 0; l < depth; l++) {
        for (int64_t i = done; i < n; i++)
            out[l * width + i] = READ(x[i * p->lane_step + l * p->l_step]);
        for (int64_t i = n; i < width; i++)
            out[l * width + i] = 0;
    }
}

/* ---- tiles ----------------------------------------------------------------------------------- */

typedef struct NAME(operands_s) {
    const IN *a, *b, *bias; /* of one matrix of the batch; bias: NULL = none */
    OUT *c;
} NAME(operands);

/* What a block has summed up, as the result wants it. */
static void NAME(store)(const gradd_gemm_t *g, const T *restrict sums, int64_t rows, int64_t cols,
                        const IN *restrict bias, OUT *restrict c) {
    const T alpha = (T)g->alpha;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) {
            T value = alpha * sums[i * COLS + j];
            if (bias) value += READ(bias[j]);
            if (g->accumulate) value += READ_C(c[i * g->n + j]);
            c[i * g->n + j] = WRITE(value);
        }
}

static void NAME(run_block)(const NAME(block) * block, int panels, bool wide) {
#if GRADD_WIDE_BYTES == 64
    if (wide) {
        (panels == 2 ? NAME(micro_pair) : NAME(micro_wide))(block);
        return;
    }
#endif
    (void)panels, (void)wide;
    NAME(micro_narrow)(block);
}

/* A stretch of the steps, from l on, of a tile of `rows` rows and `cols` columns at `o`. */
static void NAME(stretch)(const gradd_gemm_t *g, const NAME(operands) * o, const tile_t *t,
                          int64_t l, NAME(buffers) * workspace) {
    const int64_t lanes = NAME(lanes), left = g->k - l, depth = smaller(left, DEPTH);
    const IN *a = o->a + l * g->a_k, *b = o->b + l * g->b_k;
    const bool last = left <= DEPTH;
    const bool as_is = IS_PLAIN && g->alpha == 1 && !o->bias && !g->accumulate;
    NAME(block) block = {.depth = depth, .add = l > 0};
    for (int64_t i = 0; !t->a_is_read && i < t->rows; i += t->mr) {
        const panel_t p = {smaller(t->rows - i, t->mr), t->mr, depth, g->a_m, g->a_k};
        NAME(pack)(a + i * g->a_m, &p, workspace->a + i * depth);
    }
    for (int64_t j = t->whole; j < t->cols; j += lanes) {
        const panel_t p = {smaller(t->cols - j, lanes), lanes, depth, g->b_n, g->b_k};
        NAME(pack)(b + j * g->b_n, &p, workspace->b + (j - t->whole) * depth);
    }
    for (int64_t j = 0, panels; j < t->cols; j += panels * lanes) {
        const bool read = j < t->whole;
        panels = t->wide && j + lanes < (read ? t->whole : t->cols) ? 2 : 1;
        const int64_t n = smaller(t->cols - j, panels * lanes);
        block.b = read ? (const T *)(b + j) : workspace->b + (j - t->whole) * depth;
        block.b_step = read ? g->b_k : lanes;
        block.b_next = read ? lanes : lanes * depth;
        block.a_step = t->a_is_read ? 1 : t->mr;
        for (int64_t i = 0; i < t->rows; i += t->mr) {
            const int64_t m = smaller(t->rows - i, t->mr);
            const bool in_place = as_is && m == t->mr && n == panels * lanes;
            for (int64_t r = 0; r < t->mr; r++) /* what is behind the last row is not stored */
                block.a[r] = t->a_is_read ? (const T *)(a + (i + (r < m ? r : m - 1)) * g->a_m)
                                          : workspace->a + i * depth + r;
            block.c = in_place ? (T *)(o->c + i * g->n + j) : workspace->c + i * COLS + j;
            block.c_step = in_place ? g->n : COLS;
            NAME(run_block)(&block, (int)panels, t->wide);
            if (last && !in_place)
                NAME(store)(g, block.c, m, n, o->bias ? o->bias + j : NULL, o->c + i * g->n + j);
        }
    }
}

static void NAME(tile)(const gradd_gemm_t *g, const NAME(operands) * o, int64_t row, int64_t col,
                       NAME(buffers) * workspace) {
    const NAME(operands) at = {o->a + row * g->a_m, o->b + col * g->b_n,
                               o->bias ? o->bias + col : NULL, o->c + row * g->n + col};
    tile_t t = {
        .wide = is_wide(), .rows = smaller(g->m - row, ROWS), .cols = smaller(g->n - col, COLS)};
    t.mr = t.wide ? WIDE_ROWS : NARROW_ROWS;
    t.a_is_read = IS_PLAIN && g->a_k == 1;
    /* A copy pays if it is read several times. */
    if (IS_PLAIN && g->b_n == 1 && t.rows <= 2 * t.mr) t.whole = t.cols / NAME(lanes) * NAME(lanes);
    for (int64_t l = 0; !l || l < g->k; l += DEPTH) /* without steps C is zeros */
        NAME(stretch)(g, &at, &t, l, workspace);
}

static gradd_status_t NAME(blocked)(const gradd_gemm_t *g, const NAME(operands) * o,
                                    NAME(buffers) * workspace) {
    const int64_t across = (g->n + COLS - 1) / COLS;
    const int64_t tiles = tiles_of(g);
    const int64_t total = tiles * gradd_gemm_batches(g);
    const int threads = workers(g);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t t = 0; t < total; t++) {
        int64_t a_at, b_at, batch = t / tiles, tile = t % tiles;
        gradd_gemm_offsets(g, batch, &a_at, &b_at);
        const NAME(operands) at = {o->a + a_at, o->b + b_at, o->bias, o->c + batch * g->m * g->n};
        NAME(tile)(g, &at, tile / across * ROWS, tile % across * COLS,
                   &workspace[omp_get_thread_num()]);
    }
    return GRADD_OK;
}

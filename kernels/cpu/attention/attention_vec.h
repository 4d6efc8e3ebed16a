/* The steps of attention that are written with vectors: products and transpositions of tiles.
 *
 * Included by attention_tile.h with VEC_BYTES (length of a vector), VEC(x) (name of a function) and
 * VEC_TARGET (its processor) defined, once per type and length; undefines them. */
#define VEC_LANES  (LANES * VEC_BYTES / GRADD_PANEL_BYTES)
#define VEC_INLINE VEC_TARGET static inline __attribute__((always_inline))

GRADD_PANEL(VEC(panel), REAL, VEC_BYTES, VEC_TARGET)

GRADD_FUSED VEC_TARGET static void VEC(product)(const attn_product_t *p, const REAL *a,
                                                const REAL *b, REAL *c) {
    const gradd_panel_t panel = {p->k, p->a_m, p->a_k, p->ldb, p->ldc, p->add};
    for (int64_t j = 0; j < p->n; j += LANES, b += LANES, c += LANES) {
        int64_t i = 0;
        for (; i + 6 <= p->m; i += 6)
            VEC(panel)(&panel, 6, a + i * p->a_m, b, c + i * p->ldc);
        const REAL *x = a + i * p->a_m;
        REAL *z = c + i * p->ldc;
        switch (p->m - i) {
        case 5:
            VEC(panel)(&panel, 5, x, b, z);
            break;
        case 4:
            VEC(panel)(&panel, 4, x, b, z);
            break;
        case 3:
            VEC(panel)(&panel, 3, x, b, z);
            break;
        case 2:
            VEC(panel)(&panel, 2, x, b, z);
            break;
        case 1:
            VEC(panel)(&panel, 1, x, b, z);
            break;
        default:
            break;
        }
    }
}

typedef REAL VEC(vec) __attribute__((vector_size(VEC_BYTES), aligned(sizeof(REAL)), may_alias));

#define TWO(F, i, bit)   F(i, bit), F(i + 1, bit)
#define FOUR(F, i, bit)  TWO(F, i, bit), TWO(F, i + 2, bit)
#define EIGHT(F, i, bit) FOUR(F, i, bit), FOUR(F, i + 4, bit)
#if VEC_LANES == 16
#define EACH_LANE(F, bit) EIGHT(F, 0, bit), EIGHT(F, 8, bit)
#elif VEC_LANES == 8
#define EACH_LANE(F, bit) EIGHT(F, 0, bit)
#elif VEC_LANES == 4
#define EACH_LANE(F, bit) FOUR(F, 0, bit)
#else
#define EACH_LANE(F, bit) TWO(F, 0, bit)
#endif

/* Swaps the off-diagonal squares of every 2 bit x 2 bit square of a matrix. */
#define LOWER(e, bit) ((e) & (bit) ? VEC_LANES + (e) - (bit) : (e))
#define UPPER(e, bit) ((e) & (bit) ? VEC_LANES + (e) : (e) + (bit))
#define SWAP(bit)                                                                                  \
    _Pragma("GCC unroll 16") for (int i = 0; i < VEC_LANES; i++) if (!(i & (bit))) {               \
        const VEC(vec) a = rows[i], b = rows[i + (bit)];                                           \
        rows[i] = __builtin_shufflevector(a, b, EACH_LANE(LOWER, bit));                            \
        rows[i + (bit)] = __builtin_shufflevector(a, b, EACH_LANE(UPPER, bit));                    \
    }

VEC_INLINE void VEC(transpose)(VEC(vec) * rows) {
    SWAP(1);
#if VEC_LANES >= 4
    SWAP(2);
#endif
#if VEC_LANES >= 8
    SWAP(4);
#endif
#if VEC_LANES >= 16
    SWAP(8);
#endif
}

/* to[c][i] = from[i][c], or = scale from[i][c], or += scale from[i][c]. */
VEC_INLINE void VEC(flip)(const flip_t how, const REAL *from, int64_t ld, int64_t rows,
                          int64_t cols, REAL scale, REAL *to, int64_t ld_to) {
    const int64_t whole_rows = rows / VEC_LANES * VEC_LANES;
    const int64_t whole_cols = cols / VEC_LANES * VEC_LANES;
    VEC(vec) square[VEC_LANES];
    for (int64_t i = 0; i < whole_rows; i += VEC_LANES)
        for (int64_t c = 0; c < whole_cols; c += VEC_LANES) {
            _Pragma("GCC unroll 16") for (int k = 0; k < VEC_LANES; k++) square[k] =
                *(const VEC(vec) *)(from + (i + k) * ld + c);
            VEC(transpose)(square);
            _Pragma("GCC unroll 16") for (int k = 0; k < VEC_LANES; k++) {
                VEC(vec) *at = (VEC(vec) *)(to + (c + k) * ld_to + i);
                if (how != FLIP_MOVE) square[k] = scale * square[k];
                if (how == FLIP_ADD) square[k] = *at + square[k];
                *at = square[k];
            }
        }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = i < whole_rows ? whole_cols : 0; c < cols; c++) {
            const REAL y = how == FLIP_MOVE ? from[i * ld + c] : scale * from[i * ld + c];
            to[c * ld_to + i] = how == FLIP_ADD ? to[c * ld_to + i] + y : y;
        }
}

VEC_TARGET static void VEC(turn)(const REAL *x, int64_t ld, int64_t n, int64_t cols, REAL scale,
                                 REAL *out) {
    VEC(flip)(FLIP_SCALE, x, ld, n, cols, scale, out, TILE);
}

VEC_TARGET static void VEC(turn_bits)(const REAL *x, int64_t ld, int64_t n, int64_t cols,
                                      REAL *out) {
    VEC(flip)(FLIP_MOVE, x, ld, n, cols, 1, out, TILE);
}

VEC_TARGET static void VEC(add_turned)(const REAL *x, int64_t ld, int64_t n, int64_t cols,
                                       REAL *out, int64_t ld_out) {
    VEC(flip)(FLIP_ADD, x, ld, n, cols, 1, out, ld_out);
}

#undef SWAP
#undef LOWER
#undef UPPER
#undef EACH_LANE
#undef EIGHT
#undef FOUR
#undef TWO
#undef VEC_LANES
#undef VEC_INLINE
#undef VEC_BYTES
#undef VEC
#undef VEC_TARGET

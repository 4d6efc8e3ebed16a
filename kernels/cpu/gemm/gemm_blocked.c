/* Our own matrix product: blocked for the caches, packed, threaded over tiles of C.
 *
 * A tile of ROWS x COLS of C is computed by one thread from start to end: for each stretch of DEPTH
 * along k, both operands are packed into panels (padded with zeros at the edges, so that strides
 * and remainders end there) and a register block of MR x NR is updated by fused multiply-adds. The
 * order of the sums depends on nothing but the shape, so the bits do not depend on the thread
 * count. bf16 and f16 operands are widened while they are packed, and the tile is rounded once. */
#include "kernels/cpu/gemm/gemm_impl.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/panel.h"
#include "kernels/describe/dispatch.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 96, COLS = 128, DEPTH = 256, MR = GRADD_PANEL_ROWS };

static int64_t tiles_of(const gradd_gemm_t *g) {
    return (g->m + ROWS - 1) / ROWS * ((g->n + COLS - 1) / COLS);
}

/* Threads that work, each with buffers of its own. */
static int workers(const gradd_gemm_t *g) {
    const int64_t total = tiles_of(g) * gradd_gemm_batches(g);
    if (total < 2 || total * g->k < 64) return 1;
    return g->threads ? g->threads : omp_get_max_threads();
}

/* One register tile of C += A B, operands packed. */
#define MICRO(name, panel, T, TARGET)                                                              \
    GRADD_FUSED TARGET static void name(const T *a, const T *b, T *c, int64_t depth) {             \
        const int64_t lanes = GRADD_PANEL_BYTES / sizeof(T);                                       \
        const gradd_panel_t p = {depth, 1, MR, lanes, COLS, true};                                 \
        panel(&p, MR, a, b, c);                                                                    \
    }

/* T is the type of the calculation, IN that of the operands and the bias, OUT the result; READ and
 * WRITE convert. NR elements of T are one 512-bit vector, or several of those that there are. */
#define BLOCKED(S, T, NR, IN, OUT, READ, READ_C, WRITE)                                            \
    typedef struct buffers_##S##_s {                                                               \
        T a[ROWS * DEPTH], b[DEPTH * COLS], c[ROWS * COLS];                                        \
    } buffers_##S __attribute__((aligned(64)));                                                    \
                                                                                                   \
    GRADD_PANEL(panel_narrow_##S, T, GRADD_VECTOR_BYTES, )                                         \
    GRADD_PANEL(panel_wide_##S, T, GRADD_WIDE_BYTES, GRADD_WIDE)                                   \
    MICRO(micro_narrow_##S, panel_narrow_##S, T, )                                                 \
    MICRO(micro_wide_##S, panel_wide_##S, T, GRADD_WIDE)                                           \
                                                                                                   \
    /* panels of `width` lanes: out[panel][l][lane]; lane_step and l_step walk the source */       \
    static void pack_##S(const IN *x, int64_t lanes, int64_t depth, int64_t lane_step,             \
                         int64_t l_step, int64_t width, T *out) {                                  \
        for (int64_t from = 0; from < lanes; from += width, out += width * depth) {                \
            const int64_t n = lanes - from < width ? lanes - from : width;                         \
            const IN *y = x + from * lane_step;                                                    \
            for (int64_t l = 0; l < depth; l++) {                                                  \
                for (int64_t i = 0; i < n; i++)                                                    \
                    out[l * width + i] = READ(y[i * lane_step + l * l_step]);                      \
                for (int64_t i = n; i < width; i++)                                                \
                    out[l * width + i] = 0;                                                        \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    static void store_##S(const gradd_gemm_t *g, const T *tile, int64_t rows, int64_t cols,        \
                          const IN *bias, OUT *c) {                                                \
        const T alpha = (T)g->alpha;                                                               \
        for (int64_t i = 0; i < rows; i++)                                                         \
            for (int64_t j = 0; j < cols; j++) {                                                   \
                T value = alpha * tile[i * COLS + j];                                              \
                if (bias) value += READ(bias[j]);                                                  \
                if (g->accumulate) value += READ_C(c[i * g->n + j]);                               \
                c[i * g->n + j] = WRITE(value);                                                    \
            }                                                                                      \
    }                                                                                              \
                                                                                                   \
    static void tile_##S(const gradd_gemm_t *g, const IN *a, const IN *b, const IN *bias, OUT *c,  \
                         int64_t row, int64_t col, buffers_##S *workspace) {                       \
        const int64_t rows = g->m - row < ROWS ? g->m - row : ROWS;                                \
        const int64_t cols = g->n - col < COLS ? g->n - col : COLS;                                \
        memset(workspace->c, 0, sizeof workspace->c);                                              \
        for (int64_t l = 0; l < g->k; l += DEPTH) {                                                \
            const int64_t depth = g->k - l < DEPTH ? g->k - l : DEPTH;                             \
            pack_##S(a + row * g->a_m + l * g->a_k, rows, depth, g->a_m, g->a_k, MR,               \
                     workspace->a);                                                                \
            pack_##S(b + l * g->b_k + col * g->b_n, cols, depth, g->b_n, g->b_k, NR,               \
                     workspace->b);                                                                \
            for (int64_t j = 0; j < cols; j += NR)                                                 \
                for (int64_t i = 0; i < rows; i += MR)                                             \
                    (GRADD_IS_WIDE() ? micro_wide_##S : micro_narrow_##S)(                         \
                        workspace->a + i * depth, workspace->b + j * depth,                        \
                        workspace->c + i * COLS + j, depth);                                       \
        }                                                                                          \
        store_##S(g, workspace->c, rows, cols, bias ? bias + col : NULL, c + row * g->n + col);    \
    }                                                                                              \
                                                                                                   \
    static gradd_status_t blocked_##S(const gradd_gemm_t *g, const IN *a, const IN *b,             \
                                      const IN *bias, OUT *c, buffers_##S *workspace) {            \
        const int64_t across = (g->n + COLS - 1) / COLS;                                           \
        const int64_t tiles = tiles_of(g);                                                         \
        const int64_t total = tiles * gradd_gemm_batches(g);                                       \
        const int threads = workers(g);                                                            \
        _Pragma("omp parallel for schedule(static) num_threads(threads)") for (int64_t t = 0;      \
                                                                               t < total; t++) {   \
            int64_t a_at, b_at, batch = t / tiles, tile = t % tiles;                               \
            gradd_gemm_offsets(g, batch, &a_at, &b_at);                                            \
            tile_##S(g, a + a_at, b + b_at, bias, c + batch * g->m * g->n, tile / across * ROWS,   \
                     tile % across * COLS, &workspace[omp_get_thread_num()]);                      \
        }                                                                                          \
        return GRADD_OK;                                                                           \
    }

BLOCKED(f32, float, 16, float, float, , , )
BLOCKED(f64, double, 8, double, double, , , )
BLOCKED(bf16, float, 16, gradd_bf16_t, gradd_bf16_t, gradd_bf16_f32, gradd_bf16_f32, gradd_f32_bf16)
BLOCKED(bf16_f32, float, 16, gradd_bf16_t, float, gradd_bf16_f32, , )
BLOCKED(f16, float, 16, gradd_f16_t, gradd_f16_t, gradd_f16_f32, gradd_f16_f32, gradd_f32_f16)
BLOCKED(f16_f32, float, 16, gradd_f16_t, float, gradd_f16_f32, , )

size_t gradd_gemm_blocked_workspace(const gradd_gemm_t *description) {
    gradd_gemm_t g = *description;
    gradd_gemm_simplify(&g);
    const size_t each = gradd_dtype_is_f64(g.dtype) ? sizeof(buffers_f64) : sizeof(buffers_f32);
    return each * (size_t)workers(&g);
}

gradd_status_t gradd_gemm_blocked(const gradd_gemm_t *description, const void *a, const void *b,
                                  const void *bias, void *c, void *workspace) {
    gradd_gemm_t g = *description;
    gradd_gemm_simplify(&g);
    if (!g.has_bias) bias = NULL;
    if (g.dtype == GRADD_DT_F32) return blocked_f32(&g, a, b, bias, c, workspace);
    if (gradd_dtype_is_f64(g.dtype)) return blocked_f64(&g, a, b, bias, c, workspace);
    if (!gradd_dtype_is_half(g.dtype))
        return GRADD_FAIL(UNSUPPORTED, "no blocked product of %s", gradd_dtype_name(g.dtype));
    const bool f16 = g.dtype == GRADD_DT_F16;
    if (gradd_gemm_result(&g) == GRADD_DT_F32)
        return f16 ? blocked_f16_f32(&g, a, b, bias, c, workspace)
                   : blocked_bf16_f32(&g, a, b, bias, c, workspace);
    return f16 ? blocked_f16(&g, a, b, bias, c, workspace)
               : blocked_bf16(&g, a, b, bias, c, workspace);
}

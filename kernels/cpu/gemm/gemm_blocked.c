/* Our own matrix product: blocked for the caches, threaded over tiles of C.
 *
 * A tile of ROWS x COLS of C is computed by one thread from start to end: for each stretch of DEPTH
 * along k, blocks of some rows and one or two panels of columns are updated in registers by fused
 * multiply-adds. Operands that do not lie as a block reads them are packed first, padded with zeros
 * at the edges. The order of the sums depends on nothing but the shape, so the bits depend neither
 * on the thread count nor on the vectors of the machine. bf16 and f16 operands are widened while
 * they are packed, and a block is rounded once. */
#include "kernels/cpu/gemm/gemm_impl.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/panel.h"
#include "kernels/describe/dispatch.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

/* Rows of a block: so many that its sums fill the registers. With vectors of 512 bits a block has
 * two panels of columns where it can: then it loads less than it multiplies. */
enum { ROWS = 96, COLS = 128, DEPTH = 256, NARROW_ROWS = 6, WIDE_ROWS = 8, MOST_ROWS = WIDE_ROWS };

/* How a tile is computed. */
typedef struct tile_s {
    int64_t rows, cols, mr; /* rows of a block */
    int64_t whole;          /* columns whose panels are read where they are, not packed */
    bool a_is_read;         /* where it is */
    bool wide;
} tile_t;

/* Lanes that are packed beside each other, and the steps of what they are read from. */
typedef struct panel_s {
    int64_t n, width, depth, lane_step, l_step;
} panel_t;

static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static bool is_wide(void) {
    return GRADD_WIDE_BYTES == 64 && (GRADD_VECTOR_BYTES == 64 || GRADD_IS_WIDE());
}

static int64_t tiles_of(const gradd_gemm_t *g) {
    return (g->m + ROWS - 1) / ROWS * ((g->n + COLS - 1) / COLS);
}

/* Threads that work, each with buffers of its own. */
static int workers(const gradd_gemm_t *g) {
    const int64_t total = tiles_of(g) * gradd_gemm_batches(g);
    if (total < 2 || total * g->k < 64) return 1;
    return g->threads ? g->threads : omp_get_max_threads();
}

#define IS_PLAIN  1
#define READ(x)   (x)
#define READ_C(x) (x)
#define WRITE(x)  (x)
#define T         float
#define IN        float
#define OUT       float
#define NAME(x)   x##_f32
#include "kernels/cpu/gemm/gemm_blocked_of.h"
#undef T
#undef IN
#undef OUT
#undef NAME
#define T       double
#define IN      double
#define OUT     double
#define NAME(x) x##_f64
#include "kernels/cpu/gemm/gemm_blocked_of.h"
#undef IS_PLAIN
#undef READ
#undef READ_C
#undef WRITE
#undef T
#undef IN
#undef OUT
#undef NAME

/* Halves: sums in f32, results in the type of the operands or in f32. */
#define IS_PLAIN  0
#define T         float
#define READ(x)   gradd_bf16_f32(x)
#define IN        gradd_bf16_t
#define OUT       gradd_bf16_t
#define READ_C(x) gradd_bf16_f32(x)
#define WRITE(x)  gradd_f32_bf16(x)
#define NAME(x)   x##_bf16
#include "kernels/cpu/gemm/gemm_blocked_of.h"
#undef OUT
#undef READ_C
#undef WRITE
#undef NAME
#define OUT       float
#define READ_C(x) (x)
#define WRITE(x)  (x)
#define NAME(x)   x##_bf16_f32
#include "kernels/cpu/gemm/gemm_blocked_of.h"
#undef READ
#undef IN
#undef NAME
#define READ(x) gradd_f16_f32(x)
#define IN      gradd_f16_t
#define NAME(x) x##_f16_f32
#include "kernels/cpu/gemm/gemm_blocked_of.h"
#undef OUT
#undef READ_C
#undef WRITE
#undef NAME
#define OUT       gradd_f16_t
#define READ_C(x) gradd_f16_f32(x)
#define WRITE(x)  gradd_f32_f16(x)
#define NAME(x)   x##_f16
#include "kernels/cpu/gemm/gemm_blocked_of.h"

size_t gradd_gemm_blocked_workspace(const gradd_gemm_t *description) {
    gradd_gemm_t g = *description;
    gradd_gemm_simplify(&g);
    const size_t each = gradd_dtype_is_f64(g.dtype) ? sizeof(buffers_f64) : sizeof(buffers_f32);
    return each * (size_t)workers(&g);
}

#define BLOCKED(kind) blocked_##kind(&g, &(const operands_##kind){a, b, bias, c}, workspace)

gradd_status_t gradd_gemm_blocked(const gradd_gemm_t *description, const void *a, const void *b,
                                  const void *bias, void *c, void *workspace) {
    gradd_gemm_t g = *description;
    gradd_gemm_simplify(&g);
    if (!g.has_bias) bias = NULL;
    if (g.dtype == GRADD_DT_F32) return BLOCKED(f32);
    if (gradd_dtype_is_f64(g.dtype)) return BLOCKED(f64);
    if (!gradd_dtype_is_half(g.dtype))
        return GRADD_FAIL(UNSUPPORTED, "no blocked product of %s", gradd_dtype_name(g.dtype));
    const bool f16 = g.dtype == GRADD_DT_F16;
    if (gradd_gemm_result(&g) == GRADD_DT_F32) return f16 ? BLOCKED(f16_f32) : BLOCKED(bf16_f32);
    return f16 ? BLOCKED(f16) : BLOCKED(bf16);
}

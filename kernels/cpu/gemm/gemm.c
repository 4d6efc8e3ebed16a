/* Matrix products: simplification, choice of the implementation, and the plain definition. See
 * gemm.h. */
#include "kernels/cpu/gemm/gemm.h"

#include "kernels/cpu/gemm/gemm_impl.h"
#include "kernels/cpu/half.h"
#include "kernels/describe/dispatch.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#define TO_BF16(x) gradd_f32_bf16((float)(x))
#define TO_F16(x)  gradd_f32_f16((float)(x))
#define PLAIN_PRODUCT(T, R, ACC, READ, READ_C, WRITE)                                              \
    for (int64_t at = 0; at < batches * g->m; at++) {                                              \
        int64_t a_at, b_at;                                                                        \
        gradd_gemm_offsets(g, at / g->m, &a_at, &b_at);                                            \
        const T *x = (const T *)a + a_at + at % g->m * g->a_m, *y = (const T *)b + b_at;           \
        R *z = (R *)c + at * g->n;                                                                 \
        for (int64_t j = 0; j < g->n; j++) {                                                       \
            ACC sum = 0;                                                                           \
            for (int64_t l = 0; l < g->k; l++)                                                     \
                sum += (ACC)READ(x[l * g->a_k]) * (ACC)READ(y[l * g->b_k + j * g->b_n]);           \
            if (g->alpha != 1) sum = (ACC)(g->alpha * (double)sum);                                \
            if (g->has_bias) sum += (ACC)READ(((const T *)bias)[j]);                               \
            if (g->accumulate) sum += (ACC)READ_C(z[j]);                                           \
            z[j] = WRITE((ACC)sum);                                                                \
        }                                                                                          \
    }

gradd_status_t gradd_gemm_ref(const gradd_gemm_t *g, const void *a, const void *b, const void *bias,
                              void *c) {
    const int64_t batches = gradd_gemm_batches(g);
    switch (gradd_dtype_is_built(g->dtype) ? g->dtype : GRADD_DT_NONE) {
    case GRADD_DT_F32:
        PLAIN_PRODUCT(float, float, double, , , (float)) return GRADD_OK;
    case GRADD_DT_F64:
        PLAIN_PRODUCT(double, double, double, , , ) return GRADD_OK;
    case GRADD_DT_BF16:
        if (gradd_gemm_result(g) == GRADD_DT_F32)
            PLAIN_PRODUCT(gradd_bf16_t, float, double, gradd_bf16_f32, , (float))
        else
            PLAIN_PRODUCT(gradd_bf16_t, gradd_bf16_t, double, gradd_bf16_f32, gradd_bf16_f32,
                          TO_BF16)
        return GRADD_OK;
    case GRADD_DT_F16:
        if (gradd_gemm_result(g) == GRADD_DT_F32)
            PLAIN_PRODUCT(gradd_f16_t, float, double, gradd_f16_f32, , (float))
        else
            PLAIN_PRODUCT(gradd_f16_t, gradd_f16_t, double, gradd_f16_f32, gradd_f16_f32, TO_F16)
        return GRADD_OK;
    case GRADD_DT_I32:
        PLAIN_PRODUCT(int32_t, int32_t, uint64_t, , , (int32_t)) return GRADD_OK;
    case GRADD_DT_I64:
        PLAIN_PRODUCT(int64_t, int64_t, uint64_t, , , (int64_t)) return GRADD_OK;
    default:
        return GRADD_FAIL(UNSUPPORTED, "no matrix product of %s", gradd_dtype_name(g->dtype));
    }
}

/* ---- products that are ready ----------------------------------------------------------------- */

typedef enum way_e {
    NOTHING, /* to write */
    PLAIN,
    BLOCKED,
    WHOLE, /* one primitive */
    SPLIT, /* one after the other, along k */
    SINGLY /* one per matrix: oneDNN has none for the whole batch */
} way_t;

typedef struct product_s {
    gradd_gemm_t g; /* simplified */
    way_t way;
    gradd_primitive_t *primitive; /* Owned */
    gradd_split_t *split;         /* Owned */
} product_t;

/* Parts are matrices of the batch, or tiles of the result: `down` times `across` of them, each in
 * steps along k. */
typedef struct gemm_ready_s {
    int tiles, across, steps;         /* 1 = the whole, as of[0][0] */
    int64_t a_down, b_down, c_down;   /* bytes from a part to the one below it, or behind it, */
    int64_t b_across, c_across, bias; /* and to the one beside it */
    product_t of[2][2]; /* [1]: of the last row, or column, of parts, where it has fewer rows */
} gemm_ready_t;

static bool is_fast(gradd_dtype_t dtype) {
    if (dtype == GRADD_DT_BF16) return gradd_gemm_bf16_native();
    return dtype == GRADD_DT_F32 && !strncmp(gradd_gemm_library(), "oneDNN", 6);
}

/* One that is made in parts is split along k wherever that takes no memory: nothing is copied twice
 * for it, as for tiles. */
static bool is_split(const gradd_gemm_t *g) {
    if (g->parts < 2) return gradd_split_pays(g);
    return gradd_split_fits(g) && gradd_gemm_result(g) == GRADD_DT_F32;
}

static gradd_status_t find_way(product_t *p) {
    p->way = NOTHING;
    if (!gradd_gemm_batches(&p->g) || !p->g.m || !p->g.n) return GRADD_OK;
    p->way = PLAIN;
    if (!p->g.k || !gradd_dtype_is_float(p->g.dtype)) return GRADD_OK;
    p->way = BLOCKED;
    if (!is_fast(p->g.dtype)) return GRADD_OK;
    if (is_split(&p->g)) GRADD_TRY(gradd_split_create(&p->g, &p->split));
    if (p->split) p->way = SPLIT;
    if (p->split) return GRADD_OK;
    GRADD_TRY(gradd_primitive_create(&p->g, &p->primitive));
    if (p->primitive) {
        p->way = WHOLE;
    } else if (p->g.batch_rank) {
        gradd_gemm_t single = p->g;
        single.batch_rank = 0;
        gradd_gemm_simplify(&single);
        GRADD_TRY(gradd_primitive_create(&single, &p->primitive));
        if (p->primitive) p->way = SINGLY;
    }
    return GRADD_OK;
}

static gradd_status_t product_init(product_t *p, const gradd_gemm_t *g) {
    p->g = *g;
    gradd_gemm_simplify(&p->g);
    return find_way(p);
}

/* Adds what it holds; the workspace serves one at a time. */
static void count_bytes(const product_t *p, gradd_prepared_t *out) {
    size_t workspace = 0;
    if (p->way == BLOCKED) workspace = gradd_gemm_blocked_workspace(&p->g);
    if (p->split) workspace = gradd_split_workspace(p->split, &p->g);
    if (p->split) out->bytes += gradd_split_bytes(p->split);
    if (p->primitive) workspace = gradd_primitive_workspace(p->primitive);
    if (p->primitive) out->bytes += GRADD_PRIMITIVE_BYTES;
    if (workspace > out->workspace) out->workspace = workspace;
}

static void product_finish(product_t *p) {
    gradd_primitive_destroy(p->primitive);
    gradd_split_destroy(p->split);
}

/* Parts have this many rows and columns, or a multiple: then the implementations have full tiles.
 */
#define PART_ROWS 64

/* A side of n rows or columns in about so many parts: the length of each but the last. */
static int64_t part_of(int64_t n, int parts) {
    const int64_t each = (n + parts - 1) / parts;
    return (each + PART_ROWS - 1) / PART_ROWS * PART_ROWS;
}

static int64_t count_parts(int64_t n, int64_t each) {
    return (n + each - 1) / each;
}

/* Tiles that lie one below the other where so many of them lie side by side. */
static int count_down(int tiles, int across) {
    const int down = (2 * tiles + across) / (2 * across);
    return down ? down : 1;
}

/* What it takes to copy a row of tiles' right operand once more, where a column's left one takes 1:
 * plain products copy both into an order of their own, primitives read the left one as it is. */
static double copy_cost(const gradd_gemm_t *g) {
    return gradd_sgemm_fits(g) ? 1 : 3;
}

/* How many tiles lie side by side, so that least is copied again and again. Columns need a product
 * that leaves out those beside it. */
static int find_across(const gradd_gemm_t *g, int tiles) {
    int found = 1;
    double least = INFINITY;
    if (!is_fast(g->dtype)) return 1;
    if (g->a_k != 1 && !gradd_sgemm_fits(g)) return 1;
    for (int across = 1; across <= tiles; across++) {
        const double columns = (double)count_parts(g->n, part_of(g->n, across));
        const double rows = (double)count_parts(g->m, part_of(g->m, count_down(tiles, across)));
        const double cost = columns * (double)g->m + copy_cost(g) * rows * (double)g->n;
        if (columns * rows < tiles * 0.85 || cost >= least) continue;
        least = cost;
        found = across;
    }
    return found;
}

/* Prepares the products of tiles of m rows and n columns, and those of what is left. */
static gradd_status_t prepare_tiles(gemm_ready_t *r, const gradd_gemm_t *g, int64_t m, int64_t n) {
    const int64_t rows[] = {m < g->m ? m : g->m, m < g->m ? g->m % m : 0};
    const int64_t columns[] = {n < g->n ? n : g->n, n < g->n ? g->n % n : 0};
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) {
            gradd_gemm_t part = *g;
            part.m = rows[i], part.n = columns[j];
            if (r->across > 1) part.c_m = g->n;
            if (part.m && part.n) GRADD_TRY(product_init(&r->of[i][j], &part));
        }
    return GRADD_OK;
}

static gradd_status_t cut_tiles(gemm_ready_t *r, const gradd_gemm_t *g, int tiles, int across) {
    const int64_t size = (int64_t)gradd_dtype_bytes(g->dtype);
    const int64_t c_size = (int64_t)gradd_dtype_bytes(gradd_gemm_result(g));
    const int64_t m = part_of(g->m, count_down(tiles, across));
    const int64_t n = across > 1 ? part_of(g->n, across) : g->n;
    r->across = (int)count_parts(g->n, n);
    r->tiles = (int)count_parts(g->m, m) * r->across;
    r->a_down = size * m * g->a_m;
    r->b_across = size * n * g->b_n;
    r->c_down = c_size * m * g->n;
    r->c_across = c_size * n;
    r->bias = size * n;
    return prepare_tiles(r, g, m, n);
}

static gradd_status_t cut_batch(gemm_ready_t *r, const gradd_gemm_t *g) {
    const int64_t size = (int64_t)gradd_dtype_bytes(g->dtype), n = g->batch[0];
    const int64_t each = (n + g->parts - 1) / g->parts;
    gradd_gemm_t part = *g;
    part.batch[0] = each < n ? each : n;
    r->tiles = (int)count_parts(n, each);
    r->across = r->steps = 1;
    r->a_down = size * each * g->a_batch[0];
    r->b_down = size * each * g->b_batch[0];
    r->c_down =
        (int64_t)gradd_dtype_bytes(gradd_gemm_result(g)) * g->m * g->n * gradd_gemm_batches(&part);
    GRADD_TRY(product_init(&r->of[0][0], &part));
    part.batch[0] = n % each;
    return part.batch[0] ? product_init(&r->of[1][0], &part) : GRADD_OK;
}

static void finish_products(gemm_ready_t *r) {
    for (int i = 0; i < 4; i++)
        product_finish(&r->of[i / 2][i % 2]);
}

/* Tiles of a way that knows no columns are rows. */
static gradd_status_t cut_result(gemm_ready_t *r, const gradd_gemm_t *g, int tiles) {
    const int across = find_across(g, tiles);
    GRADD_TRY(cut_tiles(r, g, tiles, across));
    bool fine = true;
    for (int i = 0; i < 4; i++) {
        const product_t *p = &r->of[i / 2][i % 2];
        fine = fine && (!p->g.m || p->way == WHOLE || p->way == SPLIT);
    }
    if (r->across == 1 || fine) return GRADD_OK;
    finish_products(r);
    *r = (gemm_ready_t){0};
    return cut_tiles(r, g, tiles, 1);
}

/* Processors take nearly twice the time of the planner's model. Steps of plain products cost next
 * to nothing, so these are made in parts that are as short as the planner wants them. */
static int count_wanted(const gradd_gemm_t *g) {
    return is_fast(g->dtype) && gradd_sgemm_fits(g) && is_split(g) ? g->parts * 7 / 4 : g->parts;
}

/* g has more than one part. */
static gradd_status_t cut(gemm_ready_t *r, const gradd_gemm_t *g) {
    if (g->batch_rank) return cut_batch(r, g);
    const int parts = count_wanted(g);
    const int pieces = is_fast(g->dtype) && is_split(g) ? gradd_split_pieces(g) : 1;
    GRADD_TRY(cut_result(r, g, (parts + pieces - 1) / pieces));
    const int steps = (parts + r->tiles - 1) / r->tiles, most = r->of[0][0].split ? pieces : 1;
    /* each of so many pieces at most: 11 in 10 steps would make one of them twice as long */
    const int each = steps < most ? most / steps : 1;
    r->steps = (most + each - 1) / each;
    return GRADD_OK;
}

static void finish(gemm_ready_t *r) {
    finish_products(r);
    free(r);
}

gradd_status_t gradd_gemm_prepare(const gradd_gemm_t *description, gradd_prepared_t *out) {
    gradd_gemm_t g = *description;
    if (g.has_bias && g.alpha != 1) return GRADD_FAIL(INTERNAL, "bias with alpha %g", g.alpha);
    gemm_ready_t *r = calloc(1, sizeof *r);
    if (!r) return GRADD_FAIL(NOMEM, "matrix product");
    gradd_gemm_simplify(&g);
    if (!g.threads) g.threads = omp_get_max_threads();
    r->tiles = r->across = r->steps = 1;
    const bool cuts = g.parts > 1 && gradd_gemm_batches(&g) && g.m;
    gradd_status_t status = cuts ? cut(r, &g) : product_init(&r->of[0][0], &g);
    if (status) {
        finish(r);
        return status;
    }
    *out = (gradd_prepared_t){.state = r, .bytes = sizeof *r, .parts = r->tiles * r->steps};
    for (int i = 0; i < 4; i++)
        count_bytes(&r->of[i / 2][i % 2], out);
    return GRADD_OK;
}

void gradd_gemm_unprepare(gradd_prepared_t *prepared) {
    finish(prepared->state);
}

static gradd_status_t one_by_one(const product_t *p, const gradd_gemm_operands_t *o) {
    const gradd_gemm_t *g = &p->g;
    const int64_t size = (int64_t)gradd_dtype_bytes(g->dtype);
    const int64_t step = g->m * g->n * (int64_t)gradd_dtype_bytes(gradd_gemm_result(g));
    for (int64_t i = 0, n = gradd_gemm_batches(g); i < n; i++) {
        int64_t a_at, b_at;
        gradd_gemm_offsets(g, i, &a_at, &b_at);
        GRADD_TRY(gradd_primitive_compute(p->primitive, (const char *)o->a + a_at * size,
                                          (const char *)o->b + b_at * size, o->bias,
                                          (char *)o->c + i * step, o->workspace));
    }
    return GRADD_OK;
}

/* A step of it, of so many; one that is not split is made in the last. */
static gradd_status_t compute(const product_t *p, const gradd_gemm_operands_t *o, int step,
                              int steps) {
    if (p->way != SPLIT && step + 1 < steps) return GRADD_OK;
    switch (p->way) {
    case NOTHING:
        return GRADD_OK;
    case PLAIN:
        return gradd_gemm_ref(&p->g, o->a, o->b, o->bias, o->c);
    case BLOCKED:
        return gradd_gemm_blocked(&p->g, o->a, o->b, o->bias, o->c, o->workspace);
    case WHOLE:
        return gradd_primitive_compute(p->primitive, o->a, o->b, o->bias, o->c, o->workspace);
    case SPLIT:
        return gradd_split_compute(p->split, &p->g, o, step, steps);
    case SINGLY:
        return one_by_one(p, o);
    }
    return GRADD_FAIL(INTERNAL, "matrix product");
}

gradd_status_t gradd_gemm_part(const void *state, int part, const gradd_gemm_operands_t *o) {
    const gemm_ready_t *r = state;
    const int tile = part / r->steps, i = tile / r->across, j = tile % r->across;
    const bool last_row = (i + 1) * r->across == r->tiles, last_column = j + 1 == r->across;
    const gradd_gemm_operands_t at = {(const char *)o->a + i * r->a_down,
                                      (const char *)o->b + i * r->b_down + j * r->b_across,
                                      o->bias ? (const char *)o->bias + j * r->bias : NULL,
                                      (char *)o->c + i * r->c_down + j * r->c_across, o->workspace};
    const product_t *row = r->of[last_row && r->of[1][0].g.m];
    return compute(&row[last_column && row[1].g.m], &at, part % r->steps, r->steps);
}

gradd_status_t gradd_gemm(const void *state, const void *a, const void *b, const void *bias,
                          void *c, void *workspace) {
    const gemm_ready_t *r = state;
    const gradd_gemm_operands_t o = {a, b, bias, c, workspace};
    for (int part = 0; part < r->tiles * r->steps; part++)
        GRADD_TRY(gradd_gemm_part(state, part, &o));
    return GRADD_OK;
}

bool gradd_gemm_accepts(const gradd_infer_t *c) {
    return is_fast(c->in[0].type.dtype);
}

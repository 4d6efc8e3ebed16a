/* Broadcasting engine of elementwise operators. See map.h.
 *
 * Work is cut into units: one innermost stretch, or a block of it when stretches are long. Each
 * thread takes one contiguous range of units, finds its position by division once and then counts
 * like an odometer. */
#include "kernels/cpu/map.h"

#include <omp.h>

#include "kernels/cpu/half.h"

enum {
    BLOCK = 8192,
    PIECE = 512 /* elements of 16 bits that are converted at once: all buffers stay in L1 */
};

typedef struct map_layout_s {
    gradd_row_fn row;
    /* Bit k: operand k is bf16 or f16 and the function wants f32; bit n_in: the result. */
    uint32_t wide;
    gradd_dtype_t half_in[GRADD_MAP_MAX_IN], half_out;
    const double *p;
    int n_in, rank; /* rank of the outer loop */
    char *out;
    const char *in[GRADD_MAP_MAX_IN];
    int64_t size_out, size_in[GRADD_MAP_MAX_IN];    /* element bytes */
    int64_t inner, step[GRADD_MAP_MAX_IN];          /* elements of a stretch; 0 or 1 */
    int64_t dims[GRADD_MAX_RANK];                   /* outer, outermost first */
    int64_t jump[GRADD_MAX_RANK][GRADD_MAP_MAX_IN]; /* bytes per outer index */
    int64_t block, blocks;                          /* elements per unit, units per stretch */
} map_layout_t;

/* The function for a dtype, NULL if there is none. */
static gradd_row_fn pick(const gradd_row_functions_t *rows, gradd_dtype_t dtype) {
    switch (dtype) {
    case GRADD_DT_F32:
        return rows->f32;
    case GRADD_DT_F64:
        return rows->f64;
    case GRADD_DT_I32:
        return rows->i32;
    case GRADD_DT_I64:
        return rows->i64;
    case GRADD_DT_BF16:
    case GRADD_DT_F16:
        return rows->half ? rows->half : rows->f32;
    case GRADD_DT_BOOL:
        return rows->boolean;
    default:
        return NULL;
    }
}

/* Element strides of an operand along the dimensions of out; 0 where it is broadcast. */
static void strides_of(const gradd_type_t *in, const gradd_type_t *out, int64_t *stride) {
    int64_t s = 1;
    for (int i = out->rank - 1; i >= 0; i--) {
        int k = i - (out->rank - in->rank);
        int64_t d = k >= 0 ? in->dims[k] : 1;
        stride[i] = d == 1 ? 0 : s;
        s *= d;
    }
}

/* Fills inner, step, dims and jump: merges neighbours that every operand walks without a gap. */
static void merge(map_layout_t *m, const gradd_view_t *out, const gradd_view_t *in) {
    int64_t stride[GRADD_MAP_MAX_IN][GRADD_MAX_RANK], size[GRADD_MAX_RANK];
    int64_t merged[GRADD_MAX_RANK][GRADD_MAP_MAX_IN];
    int n = 0; /* merged dimensions, innermost first */
    for (int k = 0; k < m->n_in; k++)
        strides_of(&in[k].type, &out->type, stride[k]);
    for (int i = out->type.rank - 1; i >= 0; i--) {
        if (out->type.dims[i] == 1) continue;
        bool joins = n > 0;
        for (int k = 0; joins && k < m->n_in; k++)
            joins = stride[k][i] == merged[n - 1][k] * size[n - 1];
        if (joins) {
            size[n - 1] *= out->type.dims[i];
            continue;
        }
        size[n] = out->type.dims[i];
        for (int k = 0; k < m->n_in; k++)
            merged[n][k] = stride[k][i];
        n++;
    }
    m->inner = n ? size[0] : 1;
    for (int k = 0; k < m->n_in; k++)
        m->step[k] = n ? merged[0][k] : 0;
    m->rank = n > 1 ? n - 1 : 0;
    for (int i = 0; i < m->rank; i++) {
        m->dims[i] = size[n - 1 - i];
        for (int k = 0; k < m->n_in; k++)
            m->jump[i][k] = merged[n - 1 - i][k] * m->size_in[k];
    }
}

/* The function on n elements that are partly bf16 or f16. A result that takes the place of an
 * operand is written after that piece was widened. */
static void compute_pieces(const map_layout_t *m, int64_t n, char *out, const void *const *in) {
    float operand[GRADD_MAP_MAX_IN][PIECE] __attribute__((aligned(64)));
    float result[PIECE] __attribute__((aligned(64)));
    const bool rounds = m->wide >> m->n_in & 1;
    const void *at[GRADD_MAP_MAX_IN];
    for (int64_t from = 0; from < n; from += PIECE) {
        const int64_t count = n - from < PIECE ? n - from : PIECE;
        char *to = out + from * m->size_out;
        for (int k = 0; k < m->n_in; k++) {
            at[k] = (const char *)in[k] + from * m->step[k] * m->size_in[k];
            if (!(m->wide >> k & 1)) continue;
            gradd_half_widen(operand[k], at[k], m->half_in[k], m->step[k] ? count : 1);
            at[k] = operand[k];
        }
        m->row(count, rounds ? (void *)result : to, at, m->step, m->p);
        if (rounds) gradd_half_narrow(to, result, m->half_out, count);
    }
}

static void compute_units(const map_layout_t *m, int64_t from, int64_t to) {
    int64_t index[GRADD_MAX_RANK], stretch = from / m->blocks, block = from % m->blocks;
    const char *base[GRADD_MAP_MAX_IN];
    for (int k = 0; k < m->n_in; k++)
        base[k] = m->in[k];
    for (int64_t i = m->rank - 1, rest = stretch; i >= 0; i--) {
        index[i] = rest % m->dims[i];
        rest /= m->dims[i];
        for (int k = 0; k < m->n_in; k++)
            base[k] += index[i] * m->jump[i][k];
    }
    for (int64_t unit = from; unit < to; unit++) {
        int64_t first = block * m->block;
        int64_t n = m->inner - first < m->block ? m->inner - first : m->block;
        const void *in[GRADD_MAP_MAX_IN];
        for (int k = 0; k < m->n_in; k++)
            in[k] = base[k] + first * m->step[k] * m->size_in[k];
        char *out = m->out + (stretch * m->inner + first) * m->size_out;
        if (GRADD_HAS_HALVES && m->wide)
            compute_pieces(m, n, out, in);
        else
            m->row(n, out, in, m->step, m->p);
        if (++block < m->blocks) continue;
        block = 0;
        stretch++;
        for (int i = m->rank - 1; i >= 0; i--) {
            for (int k = 0; k < m->n_in; k++)
                base[k] += m->jump[i][k];
            if (++index[i] < m->dims[i]) break;
            for (int k = 0; k < m->n_in; k++)
                base[k] -= m->dims[i] * m->jump[i][k];
            index[i] = 0;
        }
    }
}

static void prepare(map_layout_t *m, const gradd_view_t *out, const gradd_view_t *in, bool widen) {
    m->out = out->data;
    m->size_out = (int64_t)gradd_dtype_bytes(out->type.dtype);
    for (int k = 0; k < m->n_in; k++) {
        m->in[k] = in[k].data;
        m->size_in[k] = (int64_t)gradd_dtype_bytes(in[k].type.dtype);
        m->half_in[k] = in[k].type.dtype;
        if (widen && gradd_dtype_is_half(in[k].type.dtype)) m->wide |= 1u << k;
    }
    m->half_out = out->type.dtype;
    if (widen && gradd_dtype_is_half(out->type.dtype)) m->wide |= 1u << m->n_in;
    merge(m, out, in);
}

static gradd_status_t map(map_layout_t *m, const gradd_view_t *out, const gradd_view_t *in,
                          bool widen) {
    int64_t count = gradd_type_count(&out->type);
    if (!count) return GRADD_OK;
    prepare(m, out, in, widen);
    m->block = m->inner < 2 * BLOCK ? m->inner : BLOCK;
    m->blocks = (m->inner + m->block - 1) / m->block;
    int64_t units = count / m->inner * m->blocks;
    if (count < GRADD_PARALLEL_MIN || units < 2) {
        compute_units(m, 0, units);
        return GRADD_OK;
    }
#pragma omp parallel
    {
        int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
        compute_units(m, units * me / threads, units * (me + 1) / threads);
    }
    return GRADD_OK;
}

/* One element at a time, with a division per dimension. */
static void map_plainly(const map_layout_t *m, const gradd_view_t *out, const gradd_view_t *in,
                        bool widen) {
    int64_t stride[GRADD_MAP_MAX_IN][GRADD_MAX_RANK], count = gradd_type_count(&out->type);
    for (int k = 0; k < m->n_in; k++)
        strides_of(&in[k].type, &out->type, stride[k]);
    for (int64_t e = 0; e < count; e++) {
        const void *at[GRADD_MAP_MAX_IN];
        float wide[GRADD_MAP_MAX_IN], result;
        char *to = (char *)out->data + e * (int64_t)gradd_dtype_bytes(out->type.dtype);
        const bool rounds = widen && gradd_dtype_is_half(out->type.dtype);
        for (int k = 0; k < m->n_in; k++) {
            int64_t offset = 0, rest = e;
            for (int i = out->type.rank - 1; i >= 0; i--) {
                offset += rest % out->type.dims[i] * stride[k][i];
                rest /= out->type.dims[i];
            }
            at[k] =
                (const char *)in[k].data + offset * (int64_t)gradd_dtype_bytes(in[k].type.dtype);
            if (!widen || !gradd_dtype_is_half(in[k].type.dtype)) continue;
            wide[k] = gradd_half_f32(at[k], in[k].type.dtype);
            at[k] = &wide[k];
        }
        m->row(1, rounds ? (void *)&result : to, at, m->step, m->p);
        if (rounds) gradd_half_put(to, out->type.dtype, result);
    }
}

gradd_status_t gradd_map_rows(const gradd_row_functions_t *rows, const gradd_view_t *out,
                              const gradd_view_t *in, int n_in, const double *p, bool ref) {
    const gradd_dtype_t dtype = in[rows->decides].type.dtype;
    map_layout_t m = {.row = pick(rows, dtype), .p = p, .n_in = n_in};
    if (!m.row)
        return GRADD_FAIL(UNSUPPORTED, "element type %s is not supported", gradd_dtype_name(dtype));
    if (n_in > GRADD_MAP_MAX_IN) return GRADD_FAIL(INTERNAL, "map of %d operands", n_in);
    const bool widen = m.row != rows->half;
    if (!ref) return map(&m, out, in, widen);
    map_plainly(&m, out, in, widen);
    return GRADD_OK;
}

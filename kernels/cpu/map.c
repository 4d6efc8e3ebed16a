/* Broadcasting engine of elementwise operators. See map.h.
 *
 * Work is cut into units: one innermost run, or a block of it when runs are long. Each thread takes
 * one contiguous range of units, finds its position by division once and then counts like an
 * odometer. */
#include "kernels/cpu/map.h"

#include <omp.h>

enum { BLOCK = 8192 };

typedef struct map_plan_s {
    gradd_row_fn row;
    const double *p;
    int n_in, rank; /* rank of the outer loop */
    char *out;
    const char *in[GRADD_MAP_MAX_IN];
    int64_t size_out, size_in[GRADD_MAP_MAX_IN];    /* element bytes */
    int64_t inner, step[GRADD_MAP_MAX_IN];          /* elements of a run; 0 or 1 */
    int64_t dims[GRADD_MAX_RANK];                   /* outer, outermost first */
    int64_t jump[GRADD_MAX_RANK][GRADD_MAP_MAX_IN]; /* bytes per outer index */
    int64_t block, blocks;                          /* elements per unit, units per run */
} map_plan_t;

gradd_row_fn gradd_rows_pick(const gradd_rows_t *rows, gradd_dtype_t dtype) {
    switch (dtype) {
    case GRADD_DT_F32:
        return rows->f32;
    case GRADD_DT_F64:
        return rows->f64;
    case GRADD_DT_I32:
        return rows->i32;
    case GRADD_DT_I64:
        return rows->i64;
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
static void merge(map_plan_t *m, const gradd_view_t *out, const gradd_view_t *in) {
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

static void run_units(const map_plan_t *m, int64_t from, int64_t to) {
    int64_t index[GRADD_MAX_RANK], run = from / m->blocks, block = from % m->blocks;
    const char *base[GRADD_MAP_MAX_IN];
    for (int k = 0; k < m->n_in; k++)
        base[k] = m->in[k];
    for (int64_t i = m->rank - 1, rest = run; i >= 0; i--) {
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
        m->row(n, m->out + (run * m->inner + first) * m->size_out, in, m->step, m->p);
        if (++block < m->blocks) continue;
        block = 0;
        run++;
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

static void prepare(map_plan_t *m, gradd_row_fn row, const gradd_view_t *out,
                    const gradd_view_t *in, int n_in, const double *p) {
    *m = (map_plan_t){.row = row, .p = p, .n_in = n_in, .out = out->data};
    m->size_out = (int64_t)gradd_dtype_bytes(out->type.dtype);
    for (int k = 0; k < n_in; k++) {
        m->in[k] = in[k].data;
        m->size_in[k] = (int64_t)gradd_dtype_bytes(in[k].type.dtype);
    }
    merge(m, out, in);
}

gradd_status_t gradd_map(gradd_row_fn row, const gradd_view_t *out, const gradd_view_t *in,
                         int n_in, const double *p) {
    map_plan_t m;
    int64_t count = gradd_type_count(&out->type);
    if (!count) return GRADD_OK;
    if (n_in > GRADD_MAP_MAX_IN) return GRADD_FAIL(INTERNAL, "map of %d operands", n_in);
    prepare(&m, row, out, in, n_in, p);
    m.block = m.inner < 2 * BLOCK ? m.inner : BLOCK;
    m.blocks = (m.inner + m.block - 1) / m.block;
    int64_t units = count / m.inner * m.blocks;
    if (count < GRADD_PARALLEL_MIN || units < 2) {
        run_units(&m, 0, units);
        return GRADD_OK;
    }
#pragma omp parallel
    {
        int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
        run_units(&m, units * me / threads, units * (me + 1) / threads);
    }
    return GRADD_OK;
}

gradd_status_t gradd_map_ref(gradd_row_fn row, const gradd_view_t *out, const gradd_view_t *in,
                             int n_in, const double *p) {
    static const int64_t step[GRADD_MAP_MAX_IN];
    int64_t stride[GRADD_MAP_MAX_IN][GRADD_MAX_RANK], count = gradd_type_count(&out->type);
    for (int k = 0; k < n_in; k++)
        strides_of(&in[k].type, &out->type, stride[k]);
    for (int64_t e = 0; e < count; e++) {
        const void *at[GRADD_MAP_MAX_IN];
        for (int k = 0; k < n_in; k++) {
            int64_t offset = 0, rest = e;
            for (int i = out->type.rank - 1; i >= 0; i--) {
                offset += rest % out->type.dims[i] * stride[k][i];
                rest /= out->type.dims[i];
            }
            at[k] =
                (const char *)in[k].data + offset * (int64_t)gradd_dtype_bytes(in[k].type.dtype);
        }
        row(1, (char *)out->data + e * (int64_t)gradd_dtype_bytes(out->type.dtype), at, step, p);
    }
    return GRADD_OK;
}

gradd_status_t gradd_map_rows(const gradd_rows_t *rows, int pick, const gradd_view_t *out,
                              const gradd_view_t *in, int n_in, const double *p, bool ref) {
    gradd_row_fn row = gradd_rows_pick(rows, in[pick].type.dtype);
    if (!row)
        return GRADD_FAIL(UNSUPPORTED, "element type %s is not supported",
                          gradd_dtype_name(in[pick].type.dtype));
    return (ref ? gradd_map_ref : gradd_map)(row, out, in, n_in, p);
}

/* Pad: x grows (or, with a negative pad, shrinks) on both sides of some axes.
 *
 * y[o] = x[o - begin] inside; outside a constant, the nearest element ("edge"), the mirror image
 * ("reflect", without repeating the border) or the opposite side ("wrap"). pads and axes must be
 * known when the graph is compiled. Gradient: of the constant mode, Pad with the negated pads; of
 * the others PadGrad, an internal operator that adds every dy[o] to the dx element it came from.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/contract/op.h"
#include "kernels/cpu/copy.h"
#include "kernels/describe/cost.h"
#include "kernels/describe/dispatch.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

#define MAX_PAD ((int64_t)1 << 48) /* sums of sizes and pads stay far from overflow */

gradd_status_t gradd_pads_read(const gradd_view_t *in, int n_in, gradd_pads_t *p) {
    int rank = in[0].type.rank, n, n_axes = rank;
    int64_t pads[2 * GRADD_MAX_RANK], axes[GRADD_MAX_RANK];
    gradd_infer_t c = {.n_in = n_in, .in = in};
    GRADD_TRY(gradd_known_i64s(&c, 1, pads, 2 * GRADD_MAX_RANK, &n));
    bool given = n_in > 3 && in[3].type.dtype != GRADD_DT_NONE;
    if (given) GRADD_TRY(gradd_known_i64s(&c, 3, axes, GRADD_MAX_RANK, &n_axes));
    if (n != 2 * n_axes)
        return GRADD_FAIL(GRAPH, "pads has %d entries, expected %d", n, 2 * n_axes);
    memset(p, 0, sizeof *p);
    for (int i = 0; i < n_axes; i++) {
        int axis;
        GRADD_TRY(gradd_axis(given ? axes[i] : i, rank, false, &axis));
        p->begin[axis] = pads[i], p->end[axis] = pads[n_axes + i];
        if (p->begin[axis] > MAX_PAD || p->begin[axis] < -MAX_PAD || p->end[axis] > MAX_PAD ||
            p->end[axis] < -MAX_PAD)
            return GRADD_FAIL(LIMIT, "axis %d is padded by %lld and %lld", axis, (long long)pads[i],
                              (long long)pads[n_axes + i]);
    }
    return GRADD_OK;
}

static bool is_constant(gradd_attrs_t attrs) {
    return !strcmp(gradd_attr_string(attrs, "mode", "constant"), "constant");
}

/* ---- kernels --------------------------------------------------------------------------------- */

/* One table per axis: offset in elements of x for each position of y. */
static void fill_maps(char mode, const gradd_type_t *x, const gradd_type_t *y, const int64_t *begin,
                      int64_t *map, int64_t **out_maps) {
    int64_t stride[GRADD_MAX_RANK];
    gradd_copy_strides(x, stride);
    for (int a = 0; a < x->rank; a++) {
        out_maps[a] = map;
        for (int64_t o = 0; o < y->dims[a]; o++)
            *map++ = stride[a] * gradd_pad_source(mode, o - begin[a], x->dims[a]);
    }
}

/* Advances the indices of all axes but the last; returns the offset in x of the new row. */
static int64_t next_row(int64_t *at, const gradd_type_t *y, int64_t *const *maps) {
    int64_t base = 0;
    for (int a = y->rank - 2; a >= 0; a--) {
        if (++at[a] < y->dims[a]) break;
        at[a] = 0;
    }
    for (int a = 0; a < y->rank - 1; a++)
        base += maps[a][at[a]];
    return base;
}

static int64_t first_row(const gradd_type_t *y, int64_t *const *maps) {
    int64_t base = 0;
    for (int a = 0; a < y->rank - 1; a++)
        base += maps[a][0];
    return base;
}

static gradd_status_t pad_mapped(const gradd_launch_t *r, const gradd_pads_t *p) {
    const gradd_type_t *x = &r->in[0].type, *y = &r->out[0].type;
    int64_t *maps[GRADD_MAX_RANK], at[GRADD_MAX_RANK] = {0}, n = gradd_type_count(y);
    char mode = gradd_attr_string(r->attrs, "mode", "")[0];
    if (n == 0) return GRADD_OK;
    fill_maps(mode, x, y, p->begin, r->workspace, maps);
    int64_t row = y->dims[y->rank - 1], base = first_row(y, maps);
    const int64_t *map = maps[y->rank - 1];
    GRADD_SWITCH_BYTES(gradd_dtype_bytes(x->dtype), T, {
        T *to = r->out[0].data;
        const T *from = r->in[0].data;
        for (int64_t i = 0; i < n; i += row, base = next_row(at, y, maps))
            for (int64_t k = 0; k < row; k++)
                to[i + k] = from[base + map[k]];
    });
    return GRADD_OK;
}

static gradd_status_t pad_constant(const gradd_launch_t *r, const gradd_pads_t *p,
                                   gradd_copy_fn_t copy) {
    static const int64_t zero;
    const gradd_type_t *x = &r->in[0].type, *y = &r->out[0].type;
    size_t bytes = gradd_dtype_bytes(x->dtype);
    bool given = r->n_in > 2 && r->in[2].type.dtype != GRADD_DT_NONE;
    gradd_copy_t all = {.rank = 1, .dims = {gradd_type_count(y)}, .to = {1}, .from = {0}};
    copy(&all, bytes, r->out[0].data, given ? r->in[2].data : &zero);
    gradd_copy_t job = {.rank = x->rank};
    int64_t to = 0, from = 0;
    gradd_copy_strides(y, job.to);
    gradd_copy_strides(x, job.from);
    for (int i = 0; i < x->rank; i++) {
        int64_t cut_begin = p->begin[i] < 0 ? -p->begin[i] : 0;
        int64_t cut_end = p->end[i] < 0 ? -p->end[i] : 0;
        job.dims[i] = x->dims[i] - cut_begin - cut_end;
        if (job.dims[i] <= 0) return GRADD_OK;
        from += cut_begin * job.from[i];
        to += (p->begin[i] + cut_begin) * job.to[i];
    }
    copy(&job, bytes, (char *)r->out[0].data + to * (int64_t)bytes,
         (const char *)r->in[0].data + from * (int64_t)bytes);
    return GRADD_OK;
}

static gradd_status_t compute_pad(const gradd_launch_t *r) {
    gradd_pads_t p;
    GRADD_TRY(gradd_pads_read(r->in, r->n_in, &p));
    if (is_constant(r->attrs)) return pad_constant(r, &p, gradd_copy_strided);
    return pad_mapped(r, &p);
}

static gradd_status_t ref_pad(const gradd_launch_t *r) {
    gradd_pads_t p;
    GRADD_TRY(gradd_pads_read(r->in, r->n_in, &p));
    if (is_constant(r->attrs)) return pad_constant(r, &p, gradd_copy_plain);
    return pad_mapped(r, &p);
}

/* Serial: several y elements share one x element, and the order of a sum must not change. */
static gradd_status_t compute_pad_grad(const gradd_launch_t *r) {
    const gradd_type_t *y = &r->in[0].type, *x = &r->out[0].type;
    int64_t *maps[GRADD_MAX_RANK], at[GRADD_MAX_RANK] = {0}, n = gradd_type_count(y);
    char mode = gradd_attr_string(r->attrs, "mode", "")[0];
    gradd_copy_zero(r->out[0].data, (size_t)gradd_type_bytes(x));
    if (n == 0) return GRADD_OK;
    fill_maps(mode, x, y, gradd_attr_find(r->attrs, "begins")->ints, r->workspace, maps);
    int64_t row = y->dims[y->rank - 1], base = first_row(y, maps);
    const int64_t *map = maps[y->rank - 1];
    GRADD_SWITCH_FLOAT(y->dtype, T, {
        T *dx = r->out[0].data;
        const T *dy = r->in[0].data;
        for (int64_t i = 0; i < n; i += row, base = next_row(at, y, maps))
            for (int64_t k = 0; k < row; k++)
                dx[base + map[k]] += dy[i + k];
    });
    return GRADD_OK;
}

/* ---- shape rules ----------------------------------------------------------------------------- */

static gradd_status_t check_mode(gradd_attrs_t attrs) {
    static const char *const modes[] = {"constant", "edge", "reflect", "wrap"};
    const char *mode = gradd_attr_string(attrs, "mode", "constant");
    for (int i = 0; i < 4; i++)
        if (!strcmp(mode, modes[i])) return GRADD_OK;
    return GRADD_FAIL(UNSUPPORTED, "pad mode '%s'", mode);
}

static gradd_status_t infer_pad(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[0].type;
    gradd_pads_t p;
    GRADD_TRY(check_mode(c->attrs));
    GRADD_TRY(gradd_pads_read(c->in, c->n_in, &p));
    if (c->n_in > 2 && c->in[2].type.dtype != GRADD_DT_NONE &&
        (c->in[2].type.dtype != x->dtype || gradd_type_count(&c->in[2].type) != 1))
        return GRADD_FAIL(GRAPH, "constant_value must be one element of the input's type");
    gradd_type_t out = *x;
    for (int i = 0; i < x->rank; i++) {
        if (__builtin_add_overflow(x->dims[i], p.begin[i], &out.dims[i]) ||
            __builtin_add_overflow(out.dims[i], p.end[i], &out.dims[i]) || out.dims[i] < 0)
            return GRADD_FAIL(GRAPH, "axis %d of %lld cannot be padded by %lld and %lld", i,
                              (long long)x->dims[i], (long long)p.begin[i], (long long)p.end[i]);
        if (!is_constant(c->attrs) && x->dims[i] == 0 && out.dims[i])
            return GRADD_FAIL(GRAPH, "axis %d is empty: nothing to repeat", i);
    }
    if (!is_constant(c->attrs) && x->rank == 0)
        return GRADD_FAIL(UNSUPPORTED, "a scalar can only be padded by a constant");
    c->out[0] = out;
    return GRADD_OK;
}

static size_t map_bytes(const gradd_type_t *y) {
    int64_t n = 0;
    for (int i = 0; i < y->rank; i++)
        n += y->dims[i];
    return (size_t)n * sizeof(int64_t);
}

static size_t workspace_pad(const gradd_infer_t *c) {
    return is_constant(c->attrs) ? 0 : map_bytes(&c->out[0]);
}

static gradd_status_t infer_pad_grad(gradd_infer_t *c) {
    const gradd_type_t *dy = &c->in[0].type;
    const gradd_attr_t *dims = gradd_attr_find(c->attrs, "dims");
    const gradd_attr_t *begins = gradd_attr_find(c->attrs, "begins");
    GRADD_TRY(check_mode(c->attrs));
    if (dims->n != (size_t)dy->rank || begins->n != dims->n || !dy->rank)
        return GRADD_FAIL(GRAPH, "dims and begins must have %d entries", dy->rank);
    c->out[0] = (gradd_type_t){.dtype = dy->dtype, .rank = dy->rank};
    memcpy(c->out[0].dims, dims->ints, sizeof dims->ints[0] * dims->n);
    return GRADD_OK;
}

static size_t workspace_pad_grad(const gradd_infer_t *c) {
    return map_bytes(&c->in[0].type);
}

/* ---- gradient rule --------------------------------------------------------------------------- */

static gradd_val_t total(gradd_builder_t *b, gradd_val_t x) {
    gradd_attr_t keep = gradd_make_int("keepdims", 0);
    return gradd_emit_attrs(b, "ReduceSum", &x, 1, &keep, 1);
}

static gradd_status_t grad_pad(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    gradd_view_t in[4] = {{.data = NULL}};
    gradd_pads_t p;
    for (int i = 0; i < g->n_in; i++) {
        if (g->in[i] == GRADD_NONE) continue;
        in[i].type = *gradd_val_type(b, g->in[i]);
        if (i) in[i].data = (void *)b->data(b, g->in[i]);
    }
    GRADD_TRY(gradd_pads_read(in, g->n_in, &p));
    int rank = in[0].type.rank;
    if (!is_constant(g->attrs)) {
        const char *mode = gradd_attr_string(g->attrs, "mode", "");
        gradd_attr_t attrs[3] = {gradd_make_ints("dims", in[0].type.dims, (size_t)rank),
                                 gradd_make_ints("begins", p.begin, (size_t)rank),
                                 gradd_make_string("mode", mode)};
        if (g->need[0]) g->din[0] = gradd_emit_attrs(b, "PadGrad", g->dout, 1, attrs, 3);
        return b->status;
    }
    int64_t back[2 * GRADD_MAX_RANK];
    for (int i = 0; i < rank; i++)
        back[i] = -p.begin[i], back[rank + i] = -p.end[i];
    gradd_val_t dx = GRADD_EMIT(b, "Pad", g->dout[0], gradd_const_i64s(b, back, 2 * rank));
    if (g->need[0]) g->din[0] = dx;
    if (g->n_in > 2 && g->need[2]) {
        /* what did not come from x came from the constant */
        gradd_val_t rest = GRADD_EMIT(b, "Sub", total(b, g->dout[0]), total(b, dx));
        g->din[2] = gradd_reshape_as(b, rest, g->in[2]);
    }
    return b->status;
}

/* ---- expansion ------------------------------------------------------------------------------- */

/* Along an axis: v[o] added to element o - begin of n, as the mode has it. */
static gradd_status_t fold_axis(gradd_expand_t *e, int axis, int64_t begin, int64_t n,
                                gradd_val_t *v) {
    gradd_builder_t *b = e->b;
    gradd_type_t type = *gradd_val_type(b, *v);
    const char mode = gradd_attr_string(e->attrs, "mode", "")[0];
    const int64_t count = type.dims[axis];
    int64_t *place = malloc(sizeof *place * (size_t)(count + 1));
    if (!place) return GRADD_FAIL(NOMEM, "no memory for %lld places", (long long)count);
    for (int64_t o = 0; o < count; o++)
        place[o] = gradd_pad_source(mode, o - begin, n);
    gradd_val_t in[2] = {*v, b->constant(b, &(gradd_type_t){GRADD_DT_I64, 1, {count}}, place)};
    free(place);
    type.dims[axis] = n;
    const gradd_attr_t attrs[2] = {gradd_make_ints("dims", type.dims, (size_t)type.rank),
                                   gradd_make_int("axis", axis)};
    *v = gradd_emit_attrs(b, "GatherGrad", in, 2, attrs, 2);
    return b->status;
}

static gradd_status_t expand_pad_grad(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    const gradd_attr_t *dims = gradd_attr_find(e->attrs, "dims");
    const gradd_attr_t *begins = gradd_attr_find(e->attrs, "begins");
    const gradd_type_t dy = *gradd_val_type(b, e->in[0]);
    gradd_val_t v = gradd_wide(b, e->in[0]);
    for (int i = 0; i < dy.rank; i++)
        if (dims->ints[i] != dy.dims[i] || begins->ints[i])
            GRADD_TRY(fold_axis(e, i, begins->ints[i], dims->ints[i], &v));
    e->out[0] = gradd_cast(b, v, dy.dtype);
    return b->status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

GRADD_OPS(
    pad,
    GRADD_OP("Pad", "", 11, (2, 4), (1, 1),
             .types = {0xffffffffu, GRADD_T_INDEX, 0xffffffffu, GRADD_T_INDEX},
             .attrs = GRADD_ATTR_LIST({"mode", GRADD_ATTR_STRING, false}), .infer = infer_pad,
             .grad = grad_pad, .ref = GRADD_REF(ref_pad),
             .cases = GRADD_CASES({.text = "f32[2,3] i64[4]={0,1,2,0}"},
                                  {.text = "f32[2,3] i64[4]={1,-1,0,2} f32[]"},
                                  {.text = "f32[2,5] i64[4]={0,-2,0,-1}"},
                                  {.text = "i64[2,3] i64[2]={0,1} i64[]={-100} i64[1]={1}"},
                                  {.text = "f32[2,3] i64[2]={1,1} - i64[1]={-1}"},
                                  {.text = "f32[3,4] i64[4]={2,1,1,3} | mode=\"reflect\""},
                                  {.text = "f32[3,4] i64[4]={2,-1,1,5} | mode=\"edge\""},
                                  {.text = "f32[3] i64[2]={4,2} | mode=\"wrap\""},
                                  {.text = "f32[0,2] i64[4]={1,0,1,0}"},
                                  {.text = "bool[2,2] i64[4]={1,0,0,1} bool[]={1}"},
                                  {.text = "f32[2,3,4,2] i64[8]={0,1,0,0,0,2,0,0} f32[]"},
                                  {.text = "f32[3,8,16] i64[6]={1,0,0,0,0,0} f32[]",
                                   .grad_tol = -1},
                                  {.text = "i64[2,70,30] i64[6]={0,-3,2,0,70,4} i64[]={7}"},
                                  {.text = "f32[] i64[0]={}"},
                                  {.text = "i64[40,50] i64[4]={30,0,1,95} | mode=\"reflect\""},
                                  {.text = "i64[1,2] i64[4]={3,5,4,2} | mode=\"reflect\""},
                                  {.text = "bool[7,5] i64[4]={-2,11,8,-1} | mode=\"wrap\""})),
    GRADD_OP(
        "PadGrad", "com.gradd", 1, (1, 1), (1, 1), .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD,
        .types = {GRADD_T_FLOAT},
        .attrs = GRADD_ATTR_LIST({"dims", GRADD_ATTR_INTS, true}, {"begins", GRADD_ATTR_INTS, true},
                                 {"mode", GRADD_ATTR_STRING, true}),
        .infer = infer_pad_grad, .expand = GRADD_EXPANSION(expand_pad_grad),
        .ref = GRADD_REF(compute_pad_grad),
        .cases = GRADD_CASES({.text = "f32[5,6] | dims=[3,4] begins=[1,2] mode=\"reflect\""},
                             {.text = "f32[4] | dims=[2] begins=[1] mode=\"edge\""},
                             {.text = "f32[4] | dims=[2] begins=[1] mode=\"wrap\""},
                             {.text = "f32[9,3,11] | dims=[3,3,2] begins=[2,0,4] mode=\"reflect\""},
                             {.text = "f32[9,3,11] | dims=[3,3,2] begins=[2,0,4] mode=\"wrap\""},
                             {.text = "f32[9,2,11] | dims=[3,3,2] begins=[2,-1,4] mode=\"edge\""},
                             {.text = "f32[6,5] | dims=[1,1] begins=[2,4] mode=\"reflect\""},
                             {.text = "f32[90,110] | dims=[80,60] begins=[3,20] mode=\"reflect\""},
                             {.text = "f32[0,3] | dims=[2,3] begins=[-1,0] mode=\"edge\""})));

GRADD_KERNELS(cpu, pad,
              GRADD_KERNEL("Pad", "loop", .compute = compute_pad, .workspace = workspace_pad,
                           .cost = gradd_cost_move),
              GRADD_KERNEL("PadGrad", "loop", .types = {GRADD_T_F32_F64},
                           .compute = compute_pad_grad, .workspace = workspace_pad_grad,
                           .cost = gradd_cost_move));

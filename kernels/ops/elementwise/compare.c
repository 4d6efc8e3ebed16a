/* Comparisons, logic and selection, with numpy broadcasting.
 *
 * Math: z = a < b, a and b, isnan(a), c ? a : b. Results are bool (one byte, 0 or 1), except Where.
 * Nothing is saved for backward; Where routes the gradient by its condition. */
#include "kernels/contract/kernel.h"
#include "kernels/cpu/map.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

/* ---- kernels -------------------------------------------------------------------------------- */

/* The reference of a comparison must not widen i64, and of a float need not. */
#define COMPARE(name, E)                                                                           \
    GRADD_ROW2(name, f32, uint8_t, float, double, E)                                               \
    GRADD_ROW2(name, f64, uint8_t, double, double, E)                                              \
    GRADD_ROW2(name, i32, uint8_t, int32_t, int32_t, E)                                            \
    GRADD_ROW2(name, i64, uint8_t, int64_t, int64_t, E)                                            \
    GRADD_ROW2(name, boolean, uint8_t, uint8_t, uint8_t, E)                                        \
    static const gradd_row_functions_t name##_rows = {.f32 = row_##name##_f32,                     \
                                                      .f64 = row_##name##_f64,                     \
                                                      .i32 = row_##name##_i32,                     \
                                                      .i64 = row_##name##_i64,                     \
                                                      .boolean = row_##name##_boolean};            \
    static const gradd_row_functions_t name##_refs = {.f32 = ref_##name##_f32,                     \
                                                      .f64 = ref_##name##_f64,                     \
                                                      .i32 = ref_##name##_i32,                     \
                                                      .i64 = ref_##name##_i64,                     \
                                                      .boolean = ref_##name##_boolean};            \
    GRADD_MAP_COMPUTE(name)
#define LOGIC(name, E)                                                                             \
    GRADD_ROW2(name, boolean, uint8_t, uint8_t, uint8_t, E)                                        \
    static const gradd_row_functions_t name##_rows = {.boolean = row_##name##_boolean};            \
    static const gradd_row_functions_t name##_refs = {.boolean = ref_##name##_boolean};            \
    GRADD_MAP_COMPUTE(name)

COMPARE(equal, E_EQUAL)
COMPARE(less, E_LESS)
COMPARE(less_equal, E_LESS_EQ)
COMPARE(greater, E_GREATER)
COMPARE(greater_equal, E_GREATER_EQ)
LOGIC(and, E_AND)
LOGIC(or, E_OR)
LOGIC(xor, E_XOR)

GRADD_ROW1(not, boolean, uint8_t, uint8_t, uint8_t, E_NOT)
static const gradd_row_functions_t not_rows = {.boolean = row_not_boolean};
static const gradd_row_functions_t not_refs = {.boolean = ref_not_boolean};
GRADD_MAP_COMPUTE(not)

GRADD_ROW1(isnan, f32, uint8_t, float, double, E_ISNAN)
GRADD_ROW1(isnan, f64, uint8_t, double, double, E_ISNAN)
GRADD_TABLE_FLOAT(isnan)
GRADD_MAP_COMPUTE(isnan)

GRADD_ROW1(signbit, f32, uint8_t, float, double, E_SIGNBIT)
GRADD_ROW1(signbit, f64, uint8_t, double, double, E_SIGNBIT)
GRADD_TABLE_FLOAT(signbit)
GRADD_MAP_COMPUTE(signbit)

#define ISINF_ROW(S, T)                                                                            \
    static void row_isinf_##S(int64_t n, void *out, const void *const *in, const int64_t *step,    \
                              const double *p) {                                                   \
        (void)step;                                                                                \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const double a = (double)((const T *)in[0])[i];                                        \
            ((uint8_t *)out)[i] = E_ISINF(v);                                                      \
        }                                                                                          \
    }
ISINF_ROW(f32, float)
ISINF_ROW(f64, double)
static const gradd_row_functions_t isinf_rows = {.f32 = row_isinf_f32, .f64 = row_isinf_f64};

static gradd_status_t compute_isinf(const gradd_launch_t *r) {
    double p[2] = {(double)gradd_attr_int(r->attrs, "detect_negative", 1),
                   (double)gradd_attr_int(r->attrs, "detect_positive", 1)};
    return gradd_map_rows(&isinf_rows, r->out, r->in, 1, p, false);
}

/* Selection moves bytes: one function per element size. A fixed condition is a copy of a stretch.
 */
#define WHERE_LOOP(x_at, y_at)                                                                     \
    {                                                                                              \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) z[i] = c[i] ? x_at : y_at;             \
    }
#define WHERE_ROW(name, T)                                                                         \
    GRADD_MULTIARCH static void row_where_##name(int64_t n, void *out, const void *const *in,      \
                                                 const int64_t *step, const double *p) {           \
        T *z = out;                                                                                \
        const uint8_t *c = in[0];                                                                  \
        const T *x = in[1], *y = in[2], x0 = *x, y0 = *y;                                          \
        (void)p;                                                                                   \
        if (!step[0]) {                                                                            \
            /* Read once: a client that changes it must not make x walk as y does. */              \
            const bool first = *(const volatile uint8_t *)c != 0;                                  \
            const T *from = first ? x : y;                                                         \
            const int64_t walk = first ? step[1] : step[2];                                        \
            for (int64_t i = 0; i < n; i++)                                                        \
                z[i] = from[i * walk];                                                             \
        } else if (step[1] && step[2])                                                             \
            WHERE_LOOP(x[i], y[i])                                                                 \
        else if (step[1])                                                                          \
            WHERE_LOOP(x[i], y0)                                                                   \
        else if (step[2])                                                                          \
            WHERE_LOOP(x0, y[i])                                                                   \
        else                                                                                       \
            WHERE_LOOP(x0, y0)                                                                     \
    }                                                                                              \
    static void ref_where_##name(int64_t n, void *out, const void *const *in, const int64_t *step, \
                                 const double *p) {                                                \
        (void)n, (void)step, (void)p;                                                              \
        *(T *)out = *(const T *)in[*(const uint8_t *)in[0] ? 1 : 2];                               \
    }
WHERE_ROW(8, uint8_t)
WHERE_ROW(16, uint16_t)
WHERE_ROW(32, uint32_t)
WHERE_ROW(64, uint64_t)
static const gradd_row_functions_t where_rows = {.f32 = row_where_32,
                                                 .f64 = row_where_64,
                                                 .i32 = row_where_32,
                                                 .i64 = row_where_64,
                                                 .boolean = row_where_8,
                                                 .half = row_where_16,
                                                 .decides = 1};
static const gradd_row_functions_t where_refs = {.f32 = ref_where_32,
                                                 .f64 = ref_where_64,
                                                 .i32 = ref_where_32,
                                                 .i64 = ref_where_64,
                                                 .boolean = ref_where_8,
                                                 .half = ref_where_16,
                                                 .decides = 1};
GRADD_MAP_COMPUTE(where)

/* ---- shape rules ---------------------------------------------------------------------------- */

static gradd_status_t infer_compare(gradd_infer_t *c) {
    GRADD_TRY(gradd_infer_broadcast(c));
    c->out[0].dtype = GRADD_DT_BOOL;
    return GRADD_OK;
}

static gradd_status_t infer_test(gradd_infer_t *c) {
    c->out[0] = c->in[0].type;
    c->out[0].dtype = GRADD_DT_BOOL;
    return GRADD_OK;
}

static gradd_status_t infer_where(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[1].type, *y = &c->in[2].type;
    if (x->dtype != y->dtype)
        return GRADD_FAIL(GRAPH, "inputs 1 and 2 differ in element type: %s and %s",
                          gradd_dtype_name(x->dtype), gradd_dtype_name(y->dtype));
    gradd_type_t both = *x;
    GRADD_TRY(gradd_broadcast(x, y, &both));
    c->out[0].dtype = x->dtype;
    return gradd_broadcast(&c->in[0].type, &both, &c->out[0]);
}

/* ---- gradient rules ------------------------------------------------------------------------- */

static gradd_status_t grad_where(gradd_grad_t *g) {
    gradd_val_t zero = gradd_const_scalar(g->b, gradd_val_type(g->b, g->in[1])->dtype, 0);
    for (int i = 1; i < 3; i++) {
        if (!g->need[i]) continue;
        gradd_val_t d = GRADD_EMIT(g->b, "Where", g->in[0], i == 1 ? g->dout[0] : zero,
                                   i == 1 ? zero : g->dout[0]);
        g->din[i] = gradd_reduce_to(g->b, d, g->in[i]);
    }
    return g->b->status;
}

/* ---- cases and rows ------------------------------------------------------------------------- */

#define TIES "f32[6]={1,2,nan,inf,-inf,0} f32[6]={1,3,nan,inf,inf,-1}"
#define CASES_COMPARE                                                                              \
    GRADD_CASES({.text = "f32[2,3,4] f32[3,1]"}, {.text = TIES}, {.text = "i64[3,4] i64[4]"},      \
                {.text = "i32[5] i32[]={2}"},                                                      \
                {.text = "i64[2]={9007199254740993,1} "                                            \
                         "i64[2]={9007199254740992,1}"},                                           \
                {.text = "f32[211,173] f32[211,1]"}, {.text = "f32[0] f32[1]"},                    \
                {.text = "i64[1,5] i64[5,1]"})
#define CASES_LOGIC                                                                                \
    GRADD_CASES({.text = "bool[3,4] bool[4]"}, {.text = "bool[2,1,3] bool[4,1]"},                  \
                {.text = "bool[] bool[5]"}, {.text = "bool[211,173] bool[]={1}"})

GRADD_OPS(
    compare,
    GRADD_OP("Equal", "", 11, (2, 2), (1, 1), .flags = GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_ALL}, .infer = infer_compare, .rowwise = gradd_rowwise_map,
             .ref = GRADD_REF(compute_equal_ref), .cases = CASES_COMPARE),
    GRADD_OP("Less", "", 9, (2, 2), (1, 1), .flags = GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_NUM}, .infer = infer_compare, .rowwise = gradd_rowwise_map,
             .ref = GRADD_REF(compute_less_ref), .cases = CASES_COMPARE),
    GRADD_OP("LessOrEqual", "", 12, (2, 2), (1, 1), .flags = GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_NUM}, .infer = infer_compare, .rowwise = gradd_rowwise_map,
             .ref = GRADD_REF(compute_less_equal_ref), .cases = CASES_COMPARE),
    GRADD_OP("Greater", "", 9, (2, 2), (1, 1), .flags = GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_NUM}, .infer = infer_compare, .rowwise = gradd_rowwise_map,
             .ref = GRADD_REF(compute_greater_ref), .cases = CASES_COMPARE),
    GRADD_OP("GreaterOrEqual", "", 12, (2, 2), (1, 1), .flags = GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_NUM}, .infer = infer_compare, .rowwise = gradd_rowwise_map,
             .ref = GRADD_REF(compute_greater_equal_ref), .cases = CASES_COMPARE),
    GRADD_OP("And", "", 7, (2, 2), (1, 1), .flags = GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_BOOL}, .infer = infer_compare, .rowwise = gradd_rowwise_map,
             .ref = GRADD_REF(compute_and_ref), .cases = CASES_LOGIC),
    GRADD_OP("Or", "", 7, (2, 2), (1, 1), .flags = GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_BOOL}, .infer = infer_compare, .rowwise = gradd_rowwise_map,
             .ref = GRADD_REF(compute_or_ref), .cases = CASES_LOGIC),
    GRADD_OP("Xor", "", 7, (2, 2), (1, 1), .flags = GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_BOOL}, .infer = infer_compare, .rowwise = gradd_rowwise_map,
             .ref = GRADD_REF(compute_xor_ref), .cases = CASES_LOGIC),
    GRADD_OP("Not", "", 1, (1, 1), (1, 1), .flags = GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_BOOL}, .infer = infer_test, .rowwise = gradd_rowwise_map,
             .ref = GRADD_REF(compute_not_ref),
             .cases = GRADD_CASES({.text = "bool[3,4]"}, {.text = "bool[]"},
                                  {.text = "bool[211,173]"})),
    GRADD_OP("IsNaN", "", 9, (1, 1), (1, 1), .flags = GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_FLOAT}, .infer = infer_test, .rowwise = gradd_rowwise_map,
             .ref = GRADD_REF(compute_isnan_ref),
             .cases = GRADD_CASES({.text = "f32[5]={1,nan,inf,-inf,nan}"}, {.text = "f32[2,3]"},
                                  {.text = "f32[0]"})),
    GRADD_OP("SignBit", "com.gradd", 1, (1, 1), (1, 1), .flags = GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_FLOAT}, .infer = infer_test, .rowwise = gradd_rowwise_map,
             .ref = GRADD_REF(compute_signbit_ref),
             .cases = GRADD_CASES({.text = "f32[6]={0,-0.0,1,-1,inf,-inf}"}, {.text = "f32[2,3]"},
                                  {.text = "f32[0]"})),
    GRADD_OP("IsInf", "", 10, (1, 1), (1, 1), .flags = GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_FLOAT}, .infer = infer_test, .rowwise = gradd_rowwise_map,
             .ref = GRADD_REF(compute_isinf),
             .attrs = GRADD_ATTR_LIST({"detect_negative", GRADD_ATTR_INT, false},
                                      {"detect_positive", GRADD_ATTR_INT, false}),
             .cases = GRADD_CASES({.text = "f32[5]={1,nan,inf,-inf,nan}"},
                                  {.text = "f32[3]={1,inf,-inf} | detect_negative=0"},
                                  {.text = "f32[3]={1,inf,-inf} | detect_positive=0"})),
    GRADD_OP("Where", "", 9, (3, 3), (1, 1), .flags = GRADD_OP_CHEAP,
             .types = {GRADD_T_BOOL, GRADD_T_ALL}, .infer = infer_where,
             .rowwise = gradd_rowwise_map, .grad = grad_where, .ref = GRADD_REF(compute_where_ref),
             .cases = GRADD_CASES(
                 {.text = "bool[2,3] f32[2,3] f32[2,3]"},
                 {.text = "bool[2,1,4,4] f32[2,3,4,4] f32[]={-inf}", .grad_tol = -1},
                 {.text = "bool[2,1,4,4] f32[2,3,4,4] f32[]"}, {.text = "bool[4] f32[] f32[3,4]"},
                 {.text = "bool[3,1] f32[] f32[1]"}, {.text = "bool[2,1] f32[1,3] f32[2,3]"},
                 {.text = "bool[] f32[3] f32[]"}, {.text = "bool[5] i64[5] i64[]={-100}"},
                 {.text = "bool[5] i32[5] i32[1]"}, {.text = "bool[2,3] bool[3] bool[2,1]"},
                 {.text = "bool[0] f32[1] f32[]"},
                 {.text = "bool[211,173] f32[211,173] f32[]={0}"})));

GRADD_KERNELS(
    cpu, compare, GRADD_KERNEL("Equal", "loop", .types = {GRADD_T_ANY}, .compute = compute_equal),
    GRADD_KERNEL("Less", "loop", .types = {GRADD_T_ANY}, .compute = compute_less),
    GRADD_KERNEL("LessOrEqual", "loop", .types = {GRADD_T_ANY}, .compute = compute_less_equal),
    GRADD_KERNEL("Greater", "loop", .types = {GRADD_T_ANY}, .compute = compute_greater),
    GRADD_KERNEL("GreaterOrEqual", "loop", .types = {GRADD_T_ANY},
                 .compute = compute_greater_equal),
    GRADD_KERNEL("And", "loop", .types = {GRADD_T_ANY}, .inplace = 3, .compute = compute_and),
    GRADD_KERNEL("Or", "loop", .types = {GRADD_T_ANY}, .inplace = 3, .compute = compute_or),
    GRADD_KERNEL("Xor", "loop", .types = {GRADD_T_ANY}, .inplace = 3, .compute = compute_xor),
    GRADD_KERNEL("Not", "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_not),
    GRADD_KERNEL("IsNaN", "loop", .types = {GRADD_T_ANY}, .compute = compute_isnan),
    GRADD_KERNEL("SignBit", "loop", .types = {GRADD_T_ANY}, .compute = compute_signbit),
    GRADD_KERNEL("IsInf", "loop", .types = {GRADD_T_ANY}, .compute = compute_isinf),
    GRADD_KERNEL("Where", "loop", .types = {GRADD_T_ANY}, .inplace = 6, .compute = compute_where));

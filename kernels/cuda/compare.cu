/* Comparisons, logic and selection on a GPU. See kernels/ops/elementwise/compare.c and map.h. */
#include "kernels/cuda/map.h"

/* f_<name>: a truth of one or two operands. */
#define TEST1(name, parameters, E)                                                                 \
    struct f_##name {                                                                              \
        parameters template <class A> __device__ uint8_t operator()(A a) const {                   \
            return (uint8_t)(E(v));                                                                \
        }                                                                                          \
    };
#define TEST2(name, E)                                                                             \
    struct f_##name {                                                                              \
        template <class A> __device__ uint8_t operator()(A a, A b) const {                         \
            return (uint8_t)(E(v));                                                                \
        }                                                                                          \
    };
TEST2(equal, E_EQUAL)
TEST2(less, E_LESS)
TEST2(less_equal, E_LESS_EQ)
TEST2(greater, E_GREATER)
TEST2(greater_equal, E_GREATER_EQ)
TEST2(and, E_AND)
TEST2(or, E_OR)
TEST2(xor, E_XOR)
TEST1(not, , E_NOT)
TEST1(isnan, , E_ISNAN)
TEST1(signbit, , E_SIGNBIT)
TEST1(isinf, double p[2];, E_ISINF)

typedef gpu_types<uint8_t> truths;

template <class Types, class F> static gradd_status_t test(const gradd_launch_t *r, F f) {
    return gpu_switch(Types(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        return gpu_map_all<uint8_t, T>(r->op->name, gradd_type_count(&r->out[0].type),
                                       r->out[0].data, {{r->in[0].data}}, f);
    });
}
template <class F, class Types> static gradd_status_t test1(const gradd_launch_t *r) {
    return test<Types>(r, F());
}
template <class F, class Types> static gradd_status_t test2(const gradd_launch_t *r) {
    return gpu_switch(Types(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        return gpu_map<uint8_t, T, T>(r->op->name, r->out[0], r->in, F());
    });
}

static gradd_status_t compute_isinf(const gradd_launch_t *r) {
    return test<gpu_floats>(r, f_isinf{
                                   {(double)gradd_attr_int(r->attrs, "detect_negative", 1),
                                    (double)gradd_attr_int(r->attrs, "detect_positive", 1)}
    });
}

/* Selection moves bits, so types of one size are one. */
struct f_where {
    template <class A> __device__ A operator()(uint8_t c, A x, A y) const {
        return c ? x : y;
    }
};
template <class T> static gradd_status_t where(const gradd_launch_t *r) {
    return gpu_map<T, uint8_t, T, T>("Where", r->out[0], r->in, f_where());
}
static gradd_status_t compute_where(const gradd_launch_t *r) {
    switch (gradd_dtype_bytes(r->in[1].type.dtype)) {
    case 1:
        return where<uint8_t>(r);
    case 2:
        return where<uint16_t>(r);
    case 4:
        return where<uint32_t>(r);
    default:
        return where<uint64_t>(r);
    }
}

#define TEST(op, name, list)                                                                       \
    GRADD_KERNEL(op, "map", .types = {GRADD_T_ANY}, .compute = test1<f_##name, list>)
#define COMPARE(op, name)                                                                          \
    GRADD_KERNEL(op, "map", .types = {GRADD_T_ANY}, .compute = test2<f_##name, gpu_any>)
#define LOGIC(op, name)                                                                            \
    GRADD_KERNEL(op, "map", .types = {GRADD_T_ANY}, .inplace = 3,                                  \
                 .compute = test2<f_##name, truths>)

GRADD_KERNELS(cuda, compare, COMPARE("Equal", equal), COMPARE("Less", less),
              COMPARE("LessOrEqual", less_equal), COMPARE("Greater", greater),
              COMPARE("GreaterOrEqual", greater_equal), LOGIC("And", and), LOGIC("Or", or),
              LOGIC("Xor", xor),
              GRADD_KERNEL("Not", "map", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = test1<f_not, truths>),
              TEST("IsNaN", isnan, gpu_floats), TEST("SignBit", signbit, gpu_floats),
              GRADD_KERNEL("IsInf", "map", .types = {GRADD_T_ANY}, .compute = compute_isinf),
              GRADD_KERNEL("Where", "map", .types = {GRADD_T_ANY}, .inplace = 6,
                           .compute = compute_where));

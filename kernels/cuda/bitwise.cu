/* Operations on the bits of integers on a GPU. See kernels/ops/elementwise/bitwise.c and map.h. */
#include "kernels/cuda/map.h"
#include "kernels/math/bits.h"

#define BITS(name, E)                                                                              \
    struct f_##name {                                                                              \
        template <class A> __device__ A operator()(A a, A b) const {                               \
            return (A)E(v);                                                                        \
        }                                                                                          \
    };
BITS(bit_and, E_AND)
BITS(bit_or, E_OR)
BITS(bit_xor, E_XOR)
BITS(left, E_SHIFT_LEFT)
BITS(right, E_SHIFT_RIGHT)

struct f_invert {
    template <class A> __device__ A operator()(A a) const {
        return (A)E_INVERT(v);
    }
};

#define MAP(title, fn)                                                                             \
    GRADD_KERNEL(title, "map", .types = {GRADD_T_ANY}, .inplace = 1,                               \
                 .compute = gpu_binary<f_##fn, gpu_ints>)

GRADD_KERNELS(cuda, bitwise, MAP("BitwiseAnd", bit_and), MAP("BitwiseOr", bit_or),
              MAP("BitwiseXor", bit_xor), MAP("ShiftLeft", left), MAP("ShiftRight", right),
              GRADD_KERNEL("BitwiseNot", "map", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = gpu_unary<f_invert, gpu_ints>));

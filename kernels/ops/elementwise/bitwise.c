/* Operations on the bits of integers, elementwise with numpy broadcasting.
 *
 * BitwiseAnd, BitwiseOr, BitwiseXor and BitwiseNot are ONNX's. ShiftLeft and ShiftRight of our own
 * domain are torch's: a shift by a negative number, or by all bits, leaves 0, or the sign. There is
 * no gradient. */
#include "kernels/contract/kernel.h"
#include "kernels/cpu/map.h"
#include "kernels/math/bits.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"

#define BINARY(name, E)                                                                            \
    GRADD_ROWS2_INT(name, E)                                                                       \
    static const gradd_row_functions_t name##_rows = {.i32 = row_##name##_i32,                     \
                                                      .i64 = row_##name##_i64};                    \
    static const gradd_row_functions_t name##_refs = {.i32 = ref_##name##_i32,                     \
                                                      .i64 = ref_##name##_i64};                    \
    GRADD_MAP_COMPUTE(name)

BINARY(and, E_AND)
BINARY(or, E_OR)
BINARY(xor, E_XOR)
BINARY(left, E_SHIFT_LEFT)
BINARY(right, E_SHIFT_RIGHT)

GRADD_ROWS1_INT(invert, E_INVERT)
static const gradd_row_functions_t invert_rows = {.i32 = row_invert_i32, .i64 = row_invert_i64};
static const gradd_row_functions_t invert_refs = {.i32 = ref_invert_i32, .i64 = ref_invert_i64};
GRADD_MAP_COMPUTE(invert)

#define BITS(title, domain, since, fn)                                                             \
    GRADD_OP(title, domain, since, (2, 2), (1, 1), .flags = GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,     \
             .types = {GRADD_T_INT}, .infer = gradd_infer_broadcast, .rowwise = gradd_rowwise_map, \
             .ref = GRADD_REF(compute_##fn##_ref),                                                 \
             .cases = GRADD_CASES(                                                                 \
                 {.text = "i64[3,4]:(-9,9) i64[4]:(-9,9)"}, {.text = "i32[5]:(-99,99) i32[]={3}"}, \
                 {.text = "i64[4]={-1,5,-7,9} i64[4]={63,64,-1,2}"},                               \
                 {.text = "i32[4]={-1,5,-7,9} i32[4]={31,32,-1,2}"},                               \
                 {.text = "i64[211,173]:(-9,9) i64[211,1]:(-3,40)"}, {.text = "i64[0,2] i64[2]"}))

GRADD_OPS(bitwise, BITS("BitwiseAnd", "", 18, and), BITS("BitwiseOr", "", 18, or),
          BITS("BitwiseXor", "", 18, xor), BITS("ShiftLeft", "com.gradd", 1, left),
          BITS("ShiftRight", "com.gradd", 1, right),
          GRADD_OP("BitwiseNot", "", 18, (1, 1), (1, 1), .flags = GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
                   .types = {GRADD_T_INT}, .infer = gradd_infer_same, .rowwise = gradd_rowwise_map,
                   .ref = GRADD_REF(compute_invert_ref),
                   .cases = GRADD_CASES({.text = "i64[3,4]:(-9,9)"}, {.text = "i32[5]:(-9,9)"},
                                        {.text = "i64[0]"})));

#define LOOP(title, fn)                                                                            \
    GRADD_KERNEL(title, "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_##fn)

GRADD_KERNELS(cpu, bitwise, LOOP("BitwiseAnd", and), LOOP("BitwiseOr", or), LOOP("BitwiseXor", xor),
              LOOP("ShiftLeft", left), LOOP("ShiftRight", right), LOOP("BitwiseNot", invert));

/* Expressions on the bits of integers, for the loops of all devices. See formulas.h.
 *
 * A shift by a negative number, or by as many bits as there are, leaves 0, or the sign.
 */
#ifndef GRADD_KERNELS_MATH_BITS_H
#define GRADD_KERNELS_MATH_BITS_H

#define GRADD_BITS(x) ((int)(8 * sizeof(x)))

#define E_INVERT(F) (~a)
#define E_SHIFT_LEFT(F)                                                                            \
    (b < 0 || b >= GRADD_BITS(a) ? (__typeof__(a))0 : (__typeof__(a))((uint64_t)a << b))
#define E_SHIFT_RIGHT(F) (a >> (b < 0 || b >= GRADD_BITS(a) ? GRADD_BITS(a) - 1 : (int)b))

#endif

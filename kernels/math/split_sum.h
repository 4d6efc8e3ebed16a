/* Sums in f32 that are kept with 24 bits: 16 where the result in bf16 will lie, 8 elsewhere. */
#ifndef GRADD_KERNELS_MATH_SPLIT_SUM_H
#define GRADD_KERNELS_MATH_SPLIT_SUM_H

#include <stdint.h>

#include "kernels/math/host_device.h"

/* The bits of the sum. */
GRADD_HD uint32_t gradd_parted_join(uint16_t high, uint8_t low) {
    return (uint32_t)high << 16 | (uint32_t)low << 8;
}

/* Rounded to nearest; infinities and NaN stay what they are. high: >> 16, low: >> 8. */
GRADD_HD uint32_t gradd_parted_round(uint32_t bits) {
    return bits + ((bits & 0x7f800000) == 0x7f800000 ? 0 : 0x80);
}

#endif

/* Looks for the first NaN and the first infinity of a tensor. Any thread. */
#ifndef GRADD_KERNELS_CPU_FINITE_H
#define GRADD_KERNELS_CPU_FINITE_H

#include "kernels/contract/backend.h"

gradd_nonfinite_t gradd_cpu_find_nonfinite(const gradd_view_t *v);

#endif

/* Looks for the first NaN and the first infinity of a tensor. Any thread. */
#ifndef GRADD_KERNELS_CPU_SCAN_H
#define GRADD_KERNELS_CPU_SCAN_H

#include "kernels/contract/backend.h"

gradd_scan_t gradd_cpu_scan(const gradd_view_t *v);

#endif

/* One number for the contents of a list of tensors: it tells whether they have been written since.
 *
 * gradd_print_drawn looks at some cache lines of each, always the same ones: a write of all
 * elements, as an optimizer makes, is detected in microseconds, whatever the size. gradd_print_sum
 * looks at every byte, at the speed of memory. Both are functions of the bytes, their sizes and
 * their order alone: not of addresses, of the number of threads or of the process. Neither protects
 * against contents that are crafted to look alike. Engine thread.
 */
#ifndef GRADD_KERNELS_CPU_FINGERPRINT_H
#define GRADD_KERNELS_CPU_FINGERPRINT_H

#include "kernels/contract/backend.h"

uint64_t gradd_print_drawn(const gradd_bytes_t *list, int n);
/* Opens parallel regions. A single changed element always changes it. */
uint64_t gradd_print_sum(const gradd_bytes_t *list, int n);

#endif

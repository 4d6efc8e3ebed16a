/* Algorithms that were measured once, kept for as long as device, driver and library stay the same.
 *
 * Two algorithms differ in the last bits of a product. A step that is done again, by a daemon that
 * was killed, must have the bits that it had: so what is measured is written down before anybody
 * goes by it, and whoever comes later reads it. What cannot be written is not gone by.
 *
 * One text file per device, driver and library in the user's cache folder: a line that says what it
 * is for, and one for each product. The last line of a product counts; a line that is damaged is no
 * line; a file of something else begins anew. Several processes may write: under a lock each first
 * reads what others have added meanwhile.
 *
 * Threading: one thread at a time, the one that prepares kernels.
 */
#ifndef GRADD_KERNELS_CUDA_PRODUCT_KEPT_H
#define GRADD_KERNELS_CUDA_PRODUCT_KEPT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The library's own: an algorithm as bytes. */
typedef struct gpu_kept_s {
    uint64_t data[8];
} gpu_kept_t;

enum { GPU_KEPT_KEY = 256 }; /* bytes of a key, a text without '|' and line ends */

/* What is kept for the key; false: nothing. */
bool gpu_kept_find(const char *key, gpu_kept_t *out);
/* Whether something could be kept now. */
bool gpu_kept_ready(void);
/* Keeps *io for the key, or makes it what another process has kept meanwhile. False: neither. */
bool gpu_kept_add(const char *key, gpu_kept_t *io);

/* For people: which file, and how much is in it; or why there is none. */
const char *gpu_kept_text(void);

/* Operations of a product that is worth being measured; infinite where GRADD_CUDA_TUNE is off, 0
 * where it is "all". */
double gpu_kept_least(void);

/* Forgets what was read, as a process does that begins. */
void gpu_kept_forget(void);

#ifdef __cplusplus
}
#endif
#endif

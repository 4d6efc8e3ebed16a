/* Algorithms that were measured once, kept for as long as device, driver and library stay the same.
 *
 * Two algorithms differ in the last bits of a product. A step that is repeated after the daemon was
 * killed must give the same bits: so a measured choice is written to the file before it is used,
 * and later processes read it from there. A choice that cannot be written is not used.
 *
 * One text file per device, driver and library lies in the user's cache folder: a title line that
 * names these three, then one line per product. The last line of a product counts; damaged lines
 * are ignored; a file with another title is started anew. Several processes may write: under a
 * lock, each one first reads what the others have added meanwhile.
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

/* The entry kept for the key; false: none. */
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

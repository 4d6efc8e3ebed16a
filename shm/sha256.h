/* SHA-256 (FIPS 180-4): names content, such as a graph, by its bytes.
 *
 * Streaming: init, update any number of times, final. The context is a plain value of the caller;
 * nothing is allocated and nothing can fail. Not meant for secrets: no effort against side
 * channels.
 */
#ifndef GRADD_SHM_SHA256_H
#define GRADD_SHM_SHA256_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GRADD_SHA256_BYTES 32

typedef struct gradd_sha256_s {
    uint32_t state[8];
    uint64_t bytes;    /* hashed so far */
    uint8_t block[64]; /* the first bytes % 64 wait here */
} gradd_sha256_t;

void gradd_sha256_init(gradd_sha256_t *hash);
void gradd_sha256_update(gradd_sha256_t *hash, const void *data, size_t bytes);
/* The context must be initialised again before its next use. */
void gradd_sha256_final(gradd_sha256_t *hash, uint8_t out_digest[GRADD_SHA256_BYTES]);

#ifdef __cplusplus
}
#endif
#endif

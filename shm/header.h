/* The header of a segment: its first page says what the segment is.
 *
 * Seals and size say that memory is safe to map, not that it is the memory which was meant. A
 * descriptor is a small number that is reused: a client whose descriptors were closed by other code
 * would, after a restart of the daemon, send whatever file has the number by then, and if its size
 * is the same, the daemon would take it for the parameters. So the page holds the segment's id, its
 * size, and its creator. No tensor lies in it. It is written once, by the client, and read once,
 * when the daemon takes the segment.
 */
#ifndef GRADD_SHM_HEADER_H
#define GRADD_SHM_HEADER_H

#include <stdint.h>

#include "shm/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GRADD_HEADER_MAGIC   0x4745534444415247u /* "GRADDSEG", little-endian */
#define GRADD_HEADER_VERSION 1
#define GRADD_HEADER_BYTES   4096

/* The purpose of a segment: X(name). The number on the wire counts from 1. A base, the last one,
 * has no header: it is the memory of many clients. */
#define GRADD_SEGMENT_PURPOSES(X) X(parameters) X(gradients) X(state) X(ring) X(base)
enum {
    GRADD_SEGMENT_OTHER, /* one without a header */
#define X(name) GRADD_SEGMENT_##name,
    GRADD_SEGMENT_PURPOSES(X)
#undef X
        GRADD_N_SEGMENT_PURPOSES
};

/* As it lies in memory, little-endian; the rest of the page is zero. */
typedef struct gradd_header_s {
    uint64_t magic;
    uint32_t version, header_bytes;
    uint64_t bytes; /* of the segment, this page included */
    uint64_t id;    /* under which it is sent */
    uint64_t owner; /* a number that the client has drawn, the same in all its segments; not 0 */
    uint32_t purpose;
    uint32_t zero;
} gradd_header_t;

const char *gradd_segment_purpose_name(uint32_t purpose); /* "other" for those that are none */

/* Reads the page of a memfd (see gradd_segment_check) and compares it with what the message said.
 * owner: of the client's other segments, 0 = there are none. Fails with SHM; the sentence names the
 * field, the expected and the actual value. */
gradd_status_t gradd_header_read(int fd, uint64_t id, uint64_t bytes, uint64_t owner,
                                 gradd_header_t *out_header);

#ifdef __cplusplus
}
#endif
#endif

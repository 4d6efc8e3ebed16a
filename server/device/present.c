/* Memory that is used for the first time, made present in pieces. See device.h.
 *
 * The machine gives memory page by page, when it is touched: some 64 MiB may take as long as a
 * launch in one part may, several times over on a virtual machine. So a launch with much memory
 * finds all of it there, and what waits runs between two pieces.
 *
 * What is present is known by chunks of addresses, in a table without lists: an entry is the last
 * chunk of its place. A chunk that was forgotten is asked for again, at next to no cost; one that
 * was unmapped and mapped again, unnoticed, is touched in the launch, as small memory is.
 */
#include <stdlib.h>
#include <string.h>

#include "server/device/device.h"

#define CHUNK  ((uintptr_t)2 << 20) /* a huge page */
#define PLACES (1u << 15)           /* 64 GiB that do not push each other out */
#define PIECE  8                    /* chunks: some 10 ms where pages are small and slow */

struct present_s {
    uint32_t chunk[PLACES]; /* its number, or the last 32 bits of it */
};

present_t *present_create(void) {
    return calloc(1, sizeof(present_t));
}

static uint32_t *place(present_t *p, uintptr_t chunk) {
    return &p->chunk[chunk % PLACES];
}

static bool knows(present_t *p, uintptr_t chunk) {
    return *place(p, chunk) == (uint32_t)chunk;
}

bool device_touch(gradd_device_t *d, const void *memory, int64_t bytes, bool written) {
    if (!d->present || !memory || bytes < DEVICE_MUCH) return false;
    const uintptr_t from = (uintptr_t)memory, to = from + (uintptr_t)bytes;
    /* Whole chunks: what is at the ends may be known for a neighbour's sake. */
    uintptr_t first = (from + CHUNK - 1) / CHUNK, end = to / CHUNK;
    while (first < end && knows(d->present, first))
        first++;
    uintptr_t last = first;
    for (; last < end && last < first + PIECE && !knows(d->present, last); last++)
        *place(d->present, last) = (uint32_t)last;
    if (last == first) return false;
    d->backend->touch(d->queue, (void *)(first * CHUNK), (last - first) * CHUNK, written);
    return true;
}

void device_forget(gradd_device_t *d, const void *memory, int64_t bytes) {
    if (!d->present || (memory && bytes < DEVICE_MUCH)) return;
    if (!memory) {
        memset(d->present, 0, sizeof *d->present);
        return;
    }
    const uintptr_t from = (uintptr_t)memory;
    for (uintptr_t c = from / CHUNK; c * CHUNK < from + (uintptr_t)bytes; c++)
        if (knows(d->present, c)) *place(d->present, c) = 0;
}

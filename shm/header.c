/* Reads and checks the header of a segment. See header.h. */
#include "shm/header.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

static const char *const names[GRADD_N_SEGMENT_PURPOSES] = {"other",
#define X(name) #name,
                                                            GRADD_SEGMENT_PURPOSES(X)
#undef X
};

const char *gradd_segment_purpose_name(uint32_t purpose) {
    return names[purpose < GRADD_N_SEGMENT_PURPOSES ? purpose : GRADD_SEGMENT_OTHER];
}

static gradd_status_t expect(const char *field, uint64_t expected, uint64_t got) {
    if (got == expected) return GRADD_OK;
    return GRADD_FAIL(SHM, "header: field '%s': expected %llu, got %llu", field,
                      (unsigned long long)expected, (unsigned long long)got);
}

gradd_status_t gradd_header_read(int fd, uint64_t id, uint64_t bytes, uint64_t owner,
                                 gradd_header_t *out_header) {
    gradd_header_t h = {0};
    const ssize_t n = pread(fd, &h, sizeof h, 0);
    if (n < 0) return GRADD_FAIL(SHM, "header: cannot be read: %s", strerror(errno));
    if (n < (ssize_t)sizeof h || bytes < GRADD_HEADER_BYTES)
        return GRADD_FAIL(SHM, "header: the segment has %llu bytes, a header alone takes %d",
                          (unsigned long long)bytes, GRADD_HEADER_BYTES);
    if (h.magic != GRADD_HEADER_MAGIC)
        return GRADD_FAIL(SHM, "header: field 'magic': expected 0x%llx, got 0x%llx",
                          (unsigned long long)GRADD_HEADER_MAGIC, (unsigned long long)h.magic);
    GRADD_TRY(expect("version", GRADD_HEADER_VERSION, h.version));
    GRADD_TRY(expect("header_bytes", GRADD_HEADER_BYTES, h.header_bytes));
    GRADD_TRY(expect("bytes", bytes, h.bytes));
    GRADD_TRY(expect("id", id, h.id));
    if (!h.owner) return GRADD_FAIL(SHM, "header: field 'owner': expected a number from 1, got 0");
    if (owner) GRADD_TRY(expect("owner", owner, h.owner));
    if (!h.purpose || h.purpose >= GRADD_SEGMENT_base)
        return GRADD_FAIL(SHM, "header: field 'purpose': expected 1 to %d, got %u",
                          GRADD_SEGMENT_base - 1, (unsigned)h.purpose);
    *out_header = h;
    return GRADD_OK;
}

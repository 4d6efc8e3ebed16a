/* libFuzzer target: segment records, tensor descriptors and address ranges, against a small model.
 *
 * The input is a row of operations on one table of segments: descriptors of all kinds with claimed
 * sizes, uses, lookups with arbitrary 64-bit offsets and sizes, tensor descriptors with arbitrary
 * types, and sets of ranges that may overlap. A plain model beside it says what must come out; a
 * lookup that succeeds is touched at both ends, so that a wrong bound is a fault.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "server/verbs/spans.h"
#include "shm/handle.h"
#include "shm/lease.h"
#include "tests/fuzz/target.h"

enum { IDS = 8, MAX_SEGMENTS = 6, MAX_RANGES = 12, KINDS = 6 };
#define MAX_BYTES ((uint64_t)5 * 4096)

typedef struct input_s {
    const uint8_t *at, *end;
} input_t;

/* The expected contents of the table. */
typedef struct mirror_s {
    uint64_t bytes[IDS]; /* 0 = not there */
    int uses[IDS];
    bool closed;
} mirror_t;

static gradd_segment_t good[2]; /* 4096 and 8192 bytes */
static int unsealed, device, ends[2];

static uint64_t take(input_t *in, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes && in->at < in->end; i++)
        value |= (uint64_t)*in->at++ << (8 * i);
    return value;
}

/* Small numbers, sizes near the limits, and anything. */
static uint64_t number(input_t *in) {
    static const uint64_t edges[] = {0,          64,         4032,       4096,
                                     8128,       8192,       1ull << 32, 1ull << 62,
                                     1ull << 63, UINT64_MAX, 1,          UINT64_MAX - 63};
    uint64_t how = take(in, 1);
    if (how < 12) return edges[how];
    if (how < 128) return take(in, 1) * 64;
    if (how < 192) return take(in, 2);
    return take(in, 8);
}

static gradd_status_t checked(gradd_status_t status) {
    REQUIRE(status == GRADD_OK || gradd_error_message()[0]);
    REQUIRE(status != GRADD_E_INTERNAL);
    return status;
}

/* Other memory each time, of the size of the second. */
static int fresh(void) {
    gradd_segment_t segment = GRADD_SEGMENT_INIT;
    REQUIRE(gradd_segment_create("fresh", good[1].bytes, &segment) == GRADD_OK);
    const int fd = dup(segment.fd);
    gradd_segment_finish(&segment);
    return fd;
}

static int descriptor(uint64_t kind) {
    switch (kind) {
    case 0:
        return dup(good[0].fd);
    case 1:
        return fresh();
    case 2:
        return dup(unsealed);
    case 3:
        return dup(device);
    case 4:
        return dup(ends[0]);
    default:
        return -1;
    }
}

static void add(gradd_lease_t *lease, mirror_t *m, input_t *in) {
    uint64_t id = take(in, 1) % IDS, kind = take(in, 1) % KINDS, claim = number(in), sum = 0;
    int count = 0;
    bool twice = false; /* the only one of its size has an id */
    for (int i = 0; i < IDS; i++) {
        twice = twice || (kind == 0 && m->bytes[i] == good[0].bytes);
        count += m->bytes[i] != 0;
        sum += m->bytes[i];
    }
    uint64_t real = kind < 2 ? good[kind].bytes : 0;
    bool fits = real && !twice && claim == real && !m->closed && !m->bytes[id] &&
                count < MAX_SEGMENTS && sum + real <= MAX_BYTES;
    gradd_status_t st = checked(gradd_lease_add(lease, id, descriptor(kind), claim, NULL));
    REQUIRE((st == GRADD_OK) == fits);
    if (fits) m->bytes[id] = real;
    if (fits) m->uses[id] = 0;
}

static void use(gradd_handle_table_t *table, mirror_t *m, input_t *in, int what) {
    uint64_t id = take(in, 1) % IDS;
    bool there = m->bytes[id] && !m->closed;
    if (what == 0) {
        bool gone = there && m->uses[id] == 0;
        REQUIRE((checked(gradd_handle_remove(table, id)) == GRADD_OK) == gone);
        if (gone) m->bytes[id] = 0;
    } else if (what == 1) {
        REQUIRE((checked(gradd_handle_retain(table, id)) == GRADD_OK) == there);
        m->uses[id] += there;
    } else {
        gradd_handle_release(table, id);
        if (m->uses[id] > 0) m->uses[id]--;
        if (m->closed && m->uses[id] == 0) m->bytes[id] = 0;
    }
}

static void touch(const mirror_t *m, uint64_t id, void *address, uint64_t bytes) {
    volatile uint8_t *p = address;
    REQUIRE(bytes <= m->bytes[id]);
    if (!bytes) return;
    p[0] = p[0];
    p[bytes - 1] = p[bytes - 1];
}

static void resolve(gradd_handle_table_t *table, const mirror_t *m, input_t *in) {
    uint64_t id = take(in, 1) % IDS, offset = number(in), bytes = number(in);
    uint64_t align = 1ull << take(in, 1) % 13;
    void *address = NULL;
    bool fits = m->bytes[id] && !m->closed && offset <= m->bytes[id] &&
                bytes <= m->bytes[id] - offset && offset % align == 0;
    gradd_status_t st = checked(gradd_handle_resolve(table, id, offset, bytes, align, &address));
    REQUIRE((st == GRADD_OK) == fits);
    if (fits) touch(m, id, address, bytes);
}

static void tensor(gradd_handle_table_t *table, const mirror_t *m, input_t *in) {
    gradd_tensor_t t = {.segment = take(in, 1) % IDS, .offset = number(in)};
    void *address = NULL;
    t.type.dtype = (gradd_dtype_t)(take(in, 1) % 24);
    t.type.rank = (int)(take(in, 1) % 11) - 1;
    for (int d = 0; d < t.type.rank && d < GRADD_MAX_RANK; d++)
        t.type.dims[d] = (int64_t)number(in);
    gradd_status_t st = checked(gradd_handle_tensor(table, &t, &address));
    if (st != GRADD_OK) return;
    uint64_t bytes = (uint64_t)gradd_type_bytes(&t.type);
    REQUIRE(t.offset % GRADD_TENSOR_ALIGN == 0 && bytes <= m->bytes[t.segment] - t.offset);
    touch(m, t.segment, address, bytes);
}

static bool meet(uint64_t lo, uint64_t n, uint64_t other, uint64_t k) {
    return n && k && lo < other + k && other < lo + n;
}

/* Ranges near each other, compared in all pairs. */
static void ranges(input_t *in) {
    span_t spans[2][MAX_RANGES];
    int n = (int)(take(in, 1) % MAX_RANGES), counts[2] = {0, 0}, a, b;
    bool within[2] = {false, false}, across = false;
    for (int i = 0; i < n; i++) {
        uint64_t lo = 4096 + take(in, 1), bytes = take(in, 1) % 32;
        int side = take(in, 1) & 1;
        for (int s = 0; s < 2; s++)
            for (int k = 0; k < counts[s]; k++) {
                bool both = meet(lo, bytes, spans[s][k].lo, spans[s][k].hi - spans[s][k].lo);
                within[side] |= both && s == side;
                across |= both && s != side;
            }
        spans[side][counts[side]++] = (span_t){lo, lo + bytes, i};
    }
    for (int s = 0; s < 2; s++) {
        counts[s] = spans_sort(spans[s], counts[s]);
        REQUIRE(spans_overlap_self(spans[s], counts[s], &a, &b) == within[s]);
    }
    REQUIRE(spans_overlap(spans[0], counts[0], spans[1], counts[1], &a, &b) == across);
    if (across) REQUIRE(a != b && a >= 0 && a < n && b >= 0 && b < n);
}

static void check_usage(gradd_handle_table_t *table, const mirror_t *m) {
    uint32_t segments, count = 0;
    uint64_t bytes, sum = 0;
    for (int i = 0; i < IDS; i++) {
        count += m->bytes[i] != 0;
        sum += m->bytes[i];
    }
    gradd_handle_usage(table, &segments, &bytes);
    REQUIRE(segments == count && bytes == sum);
}

static void close_all(gradd_lease_t *lease, mirror_t *m) {
    gradd_lease_end(lease);
    m->closed = true;
    for (int i = 0; i < IDS; i++)
        if (!m->uses[i]) m->bytes[i] = 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    input_t in = {data, data + n};
    mirror_t m = {0};
    gradd_peer_t peer = GRADD_PEER_INIT;
    gradd_lease_t *lease;
    gradd_handle_limits_t limits = {MAX_SEGMENTS, MAX_BYTES};
    REQUIRE(gradd_lease_create(&peer, limits, &lease) == GRADD_OK);
    gradd_handle_table_t *table = gradd_lease_table(lease);
    for (int i = 0; i < 64 && in.at < in.end; i++) {
        gradd_error_set("");
        uint64_t what = take(&in, 1) % 24;
        if (what < 6)
            add(lease, &m, &in);
        else if (what < 9)
            use(table, &m, &in, (int)what - 6);
        else if (what < 14)
            resolve(table, &m, &in);
        else if (what < 19)
            tensor(table, &m, &in);
        else if (what < 23)
            ranges(&in);
        else if (take(&in, 1) < 32)
            close_all(lease, &m);
        check_usage(table, &m);
    }
    for (uint64_t id = 0; id < IDS; id++)
        while (m.uses[id]-- > 0)
            gradd_handle_release(table, id);
    gradd_lease_destroy(lease);
    return 0;
}

/* Adds both good segments, looks at them, uses them, and ends. */
static void write_seed(const char *folder) {
    static const uint8_t bytes[] = {0, 0, 0, 3,  1, 0, 1, 1, 5, 10, 0, 1, 2, 6, 15, 0,
                                    0, 1, 3, 12, 2, 7, 0, 8, 0, 6,  1, 7, 1, 8, 1,  20,
                                    4, 0, 8, 1,  4, 8, 2, 8, 8, 3,  9, 9, 1, 9, 23, 0};
    char path[4096];
    snprintf(path, sizeof path, "%s/seed_0", folder);
    FILE *file = fopen(path, "wb");
    REQUIRE(file && fwrite(bytes, 1, sizeof bytes, file) == sizeof bytes && fclose(file) == 0);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    const char *folder = getenv("GRADD_FUZZ_SEEDS");
    if (folder) write_seed(folder);
    if (folder) exit(0);
    REQUIRE(gradd_segment_create("fuzz", 4096, &good[0]) == GRADD_OK);
    REQUIRE(gradd_segment_create("fuzz", 8192, &good[1]) == GRADD_OK);
    unsealed = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    device = open("/dev/null", O_RDWR | O_CLOEXEC);
    REQUIRE(unsealed >= 0 && ftruncate(unsealed, 4096) == 0 && device >= 0 && pipe(ends) == 0);
    return 0;
}

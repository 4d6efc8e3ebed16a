/* Tests of shm/handle: ids, limits, ranges that try to wrap, uses, closing and overlaps. */
#include "tests/test.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "shm/handle.h"

enum { SIZE = 4096, ALIGN = GRADD_TENSOR_ALIGN };

static gradd_handle_table_t *new_table(uint32_t segments, uint64_t bytes) {
    gradd_handle_table_t *table = NULL;
    gradd_handle_limits_t limits = {.segments = segments, .bytes = bytes};
    CHECK_OK(gradd_handle_table_create(limits, &table));
    return table;
}

/* Adds a fresh segment of `bytes` bytes and returns its address. */
static char *add(gradd_handle_table_t *table, uint64_t id, uint64_t bytes) {
    gradd_segment_t segment = GRADD_SEGMENT_INIT;
    CHECK_OK(gradd_segment_create("test", bytes, &segment));
    char *base = segment.base;
    CHECK_OK(gradd_handle_add(table, id, &segment));
    CHECK_EQ_INT(segment.fd, -1);
    return base;
}

static void check_usage(gradd_handle_table_t *table, uint32_t segments, uint64_t bytes) {
    uint32_t got_segments;
    uint64_t got_bytes;
    gradd_handle_usage(table, &got_segments, &got_bytes);
    CHECK_EQ_INT(got_segments, segments);
    CHECK_EQ_INT(got_bytes, bytes);
}

TEST(ids_name_segments) {
    gradd_handle_table_t *table = new_table(0, 0);
    char *bases[20];
    void *p;
    for (uint64_t i = 0; i < 20; i++)
        bases[i] = add(table, i * UINT64_C(0x1234567812345), SIZE);
    for (uint64_t i = 0; i < 20; i++) {
        CHECK_OK(gradd_handle_resolve(table, i * UINT64_C(0x1234567812345), 128, 64, ALIGN, &p));
        CHECK(p == bases[i] + 128);
    }
    CHECK_OK(gradd_handle_remove(table, UINT64_C(0x1234567812345)));
    CHECK_STATUS(GRADD_E_SHM, gradd_handle_remove(table, UINT64_C(0x1234567812345)));
    CHECK_STATUS(GRADD_E_SHM, gradd_handle_resolve(table, UINT64_C(0x1234567812345), 0, 1, 1, &p));
    CHECK_OK(gradd_handle_resolve(table, 2 * UINT64_C(0x1234567812345), 0, 1, 1, &p));
    CHECK(p == bases[2]);
    CHECK_STATUS(GRADD_E_SHM, gradd_handle_resolve(table, 1, 0, 1, 1, &p));
    CHECK_ERROR_HAS("unknown segment 1");
    check_usage(table, 19, 19 * SIZE);
    gradd_handle_table_destroy(table);
}

/* offset, bytes, align -> status. SIZE is 4096. */
TEST(ranges_are_checked_without_wrapping) {
    static const struct {
        uint64_t offset, bytes, align;
        gradd_status_t want;
    } rows[] = {
        {0,                       SIZE,                    64, GRADD_OK      },
        {SIZE,                    0,                       64, GRADD_OK      },
        {SIZE - 64,               64,                      64, GRADD_OK      },
        {0,                       SIZE + 1,                64, GRADD_E_TENSOR},
        {64,                      SIZE - 63,               64, GRADD_E_TENSOR},
        {SIZE,                    1,                       64, GRADD_E_TENSOR},
        {SIZE + 64,               0,                       64, GRADD_E_TENSOR},
        {UINT64_MAX,              1,                       1,  GRADD_E_TENSOR},
        {UINT64_MAX - 63,         64,                      64, GRADD_E_TENSOR},
        {64,                      UINT64_MAX,              64, GRADD_E_TENSOR},
        {64,                      UINT64_MAX - 63,         64, GRADD_E_TENSOR},
        {UINT64_MAX,              UINT64_MAX,              1,  GRADD_E_TENSOR},
        {(uint64_t)INT64_MAX + 1, (uint64_t)INT64_MAX + 1, 1,  GRADD_E_TENSOR},
        {1,                       8,                       64, GRADD_E_TENSOR},
        {32,                      8,                       64, GRADD_E_TENSOR},
        {65,                      8,                       64, GRADD_E_TENSOR},
        {1,                       8,                       1,  GRADD_OK      },
    };
    gradd_handle_table_t *table = new_table(0, 0);
    char *base = add(table, 7, SIZE);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        void *p = NULL;
        CHECK_EQ_INT(
            gradd_handle_resolve(table, 7, rows[i].offset, rows[i].bytes, rows[i].align, &p),
            rows[i].want);
        CHECK(p == (rows[i].want == GRADD_OK ? base + rows[i].offset : NULL));
    }
    gradd_handle_table_destroy(table);
}

static gradd_tensor_t tensor(gradd_dtype_t dtype, uint64_t offset, int rank, int64_t a, int64_t b) {
    gradd_tensor_t t = {.segment = 7, .offset = offset};
    t.type = (gradd_type_t){
        .dtype = dtype, .rank = rank, .dims = {a, b}
    };
    return t;
}

TEST(tensors_are_checked_by_their_type) {
    gradd_handle_table_t *table = new_table(0, 0);
    char *base = add(table, 7, SIZE);
    void *p;
    gradd_tensor_t t = tensor(GRADD_DT_F32, 64, 2, 16, 63);
    CHECK_OK(gradd_handle_tensor(table, &t, &p));
    CHECK(p == base + 64);
    t = tensor(GRADD_DT_F64, 64, 2, 16, 63);
    CHECK_STATUS(GRADD_E_TENSOR, gradd_handle_tensor(table, &t, &p));
    CHECK_ERROR_HAS("8064 bytes at offset 64 of segment 7, which has 4096 bytes");
    t = tensor(GRADD_DT_F32, 4, 1, 1, 0);
    CHECK_STATUS(GRADD_E_TENSOR, gradd_handle_tensor(table, &t, &p));
    CHECK_ERROR_HAS("multiple of 64");
    t = tensor(GRADD_DT_F32, SIZE, 2, 0, 5);
    CHECK_OK(gradd_handle_tensor(table, &t, &p));
    t = tensor(GRADD_DT_F32, 0, 2, INT64_C(1) << 40, INT64_C(1) << 40);
    CHECK_STATUS(GRADD_E_LIMIT, gradd_handle_tensor(table, &t, &p));
    t = tensor(GRADD_DT_F32, 0, 2, -1, 5);
    CHECK(gradd_handle_tensor(table, &t, &p) != GRADD_OK);
    t = tensor(GRADD_DT_F32, 0, GRADD_MAX_RANK + 1, 1, 1);
    CHECK(gradd_handle_tensor(table, &t, &p) != GRADD_OK);
    t = tensor((gradd_dtype_t)99, 0, 1, 1, 0);
    CHECK(gradd_handle_tensor(table, &t, &p) != GRADD_OK);
    gradd_handle_table_destroy(table);
}

TEST(limits_hold) {
    gradd_handle_table_t *table = new_table(3, 5 * SIZE);
    gradd_segment_t extra = GRADD_SEGMENT_INIT;
    add(table, 1, SIZE);
    CHECK_OK(gradd_segment_create("test", SIZE, &extra));
    CHECK_STATUS(GRADD_E_SHM, gradd_handle_add(table, 1, &extra));
    CHECK_ERROR_HAS("exists already");
    CHECK(extra.base != NULL);
    add(table, 2, 3 * SIZE);
    gradd_segment_finish(&extra);
    CHECK_OK(gradd_segment_create("test", SIZE + 1, &extra));
    CHECK_STATUS(GRADD_E_LIMIT, gradd_handle_add(table, 3, &extra));
    CHECK_ERROR_HAS("at most 20480");
    gradd_segment_finish(&extra);
    add(table, 3, SIZE);
    CHECK_OK(gradd_segment_create("test", 1, &extra));
    CHECK_STATUS(GRADD_E_LIMIT, gradd_handle_add(table, 4, &extra));
    CHECK_ERROR_HAS("at most 3 segments");
    CHECK_OK(gradd_handle_remove(table, 2));
    CHECK_OK(gradd_handle_add(table, 4, &extra));
    check_usage(table, 3, 2 * SIZE + 1);
    gradd_handle_table_destroy(table);
}

TEST(a_segment_in_use_stays) {
    gradd_handle_table_t *table = new_table(0, 0);
    char *base = add(table, 7, SIZE);
    add(table, 8, SIZE);
    CHECK_OK(gradd_handle_retain(table, 7));
    CHECK_OK(gradd_handle_retain(table, 7));
    CHECK_STATUS(GRADD_E_STALE, gradd_handle_remove(table, 7));
    CHECK_ERROR_HAS("in use (2 times)");
    gradd_handle_release(table, 7);
    CHECK_STATUS(GRADD_E_STALE, gradd_handle_remove(table, 7));

    gradd_handle_close(table); /* the client dies while one run uses segment 7 */
    check_usage(table, 1, SIZE);
    base[SIZE - 1] = 1; /* still mapped */
    void *p;
    gradd_segment_t extra = GRADD_SEGMENT_INIT;
    CHECK_STATUS(GRADD_E_STALE, gradd_handle_resolve(table, 7, 0, 1, 1, &p));
    CHECK_STATUS(GRADD_E_STALE, gradd_handle_retain(table, 7));
    CHECK_STATUS(GRADD_E_STALE, gradd_handle_add(table, 9, &extra));
    gradd_handle_close(table);
    gradd_handle_release(table, 7);
    check_usage(table, 0, 0);
    gradd_handle_release(table, 7);
    gradd_handle_release(table, 12345);
    gradd_handle_table_destroy(table);
}

/* ---- the I/O thread against the engine thread ---- */

static void *close_soon(void *table) {
    for (volatile int i = 0; i < 20000; i++) {
    }
    gradd_handle_close(table);
    return NULL;
}

TEST(closing_while_another_thread_resolves) {
    for (int round = 0; round < 200; round++) {
        gradd_handle_table_t *table = new_table(0, 0);
        pthread_t thread;
        void *p;
        add(table, 1, SIZE);
        CHECK_EQ_INT(pthread_create(&thread, NULL, close_soon, table), 0);
        while (gradd_handle_retain(table, 1) == GRADD_OK) {
            if (gradd_handle_resolve(table, 1, 0, SIZE, ALIGN, &p) == GRADD_OK)
                memset(p, round, SIZE); /* retained: may not be unmapped under our feet */
            gradd_handle_release(table, 1);
        }
        pthread_join(thread, NULL);
        check_usage(table, 0, 0);
        gradd_handle_table_destroy(table);
    }
}

/* Tests of shm/status: codes, the per-thread message, wrapping and truncation. */
#include "tests/test.h"

#include <pthread.h>
#include <string.h>

TEST(fail_keeps_sentence_and_place) {
    CHECK_STATUS(GRADD_E_LIMIT, GRADD_FAIL(LIMIT, "%d nodes, at most %d", 7, 5));
    CHECK_EQ_STR(gradd_error_message(), "7 nodes, at most 5");
    CHECK(strstr(gradd_error_where(), "test_status.c:"));
}

TEST(wrap_puts_context_in_front) {
    gradd_status_t status = GRADD_FAIL(TENSOR, "axis 5 out of range");
    CHECK_EQ_INT(gradd_wrap(status, "node %d '%s'", 17, "Softmax"), GRADD_E_TENSOR);
    CHECK_EQ_STR(gradd_error_message(), "node 17 'Softmax': axis 5 out of range");
}

TEST(long_messages_are_cut_not_overrun) {
    char text[4 * GRADD_ERROR_BYTES];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = 0;
    (void)GRADD_FAIL(IO, "%s", text);
    CHECK(strlen(gradd_error_message()) < GRADD_ERROR_BYTES);
    for (int i = 0; i < 64; i++)
        (void)gradd_wrap(GRADD_E_IO, "context %d %s", i, text);
    CHECK(strlen(gradd_error_message()) < GRADD_ERROR_BYTES);
    CHECK_ERROR_HAS("context 63");
}

static void *fail_elsewhere(void *unused) {
    (void)GRADD_FAIL(NOMEM, "in the other thread");
    return unused;
}

TEST(each_thread_has_its_own_message) {
    pthread_t thread;
    (void)GRADD_FAIL(IO, "mine");
    CHECK_EQ_INT(pthread_create(&thread, NULL, fail_elsewhere, NULL), 0);
    pthread_join(thread, NULL);
    CHECK_EQ_STR(gradd_error_message(), "mine");
}

TEST(names_cover_every_code) {
    CHECK_EQ_STR(gradd_status_name(GRADD_OK), "OK");
    CHECK_EQ_STR(gradd_status_name(GRADD_E_SHM), "SHM");
    for (int code = 0; code < GRADD_STATUS_COUNT; code++)
        CHECK(gradd_status_name((gradd_status_t)code)[0]);
    CHECK(gradd_status_name((gradd_status_t)999) != NULL);
}

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

TEST(a_failure_knows_its_node) {
    gradd_status_t status = GRADD_FAIL(INDEX, "index 7 of 'ids' is out of range");
    CHECK_EQ_STR(gradd_failure()->node, "");
    CHECK_EQ_INT(gradd_at_node(status, "it's a 'name'"), GRADD_E_INDEX);
    (void)gradd_wrap(status, "node 3 'it'");
    CHECK_EQ_STR(gradd_failure()->node, "it's a 'name'");
    CHECK_EQ_STR(gradd_failure()->text, "node 3 'it': index 7 of 'ids' is out of range");
    CHECK_EQ_INT(gradd_failure()->code, GRADD_E_INDEX);
    (void)gradd_at_node(status, gradd_failure()->node);
    CHECK_EQ_STR(gradd_failure()->node, "it's a 'name'");
    CHECK_EQ_INT(gradd_at_node(GRADD_OK, "other"), GRADD_OK);
    CHECK_EQ_STR(gradd_failure()->node, "it's a 'name'");
}

TEST(a_failure_without_a_usable_name) {
    char name[GRADD_ERROR_NODE_BYTES + 1];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    gradd_status_t status = GRADD_FAIL(INDEX, "first");
    (void)gradd_at_node(status, name + 1);
    CHECK_EQ_STR(gradd_failure()->node, name + 1);
    (void)gradd_at_node(status, name); /* one byte too long: not cut */
    CHECK_EQ_STR(gradd_failure()->node, "");
    (void)gradd_at_node(status, NULL);
    CHECK_EQ_STR(gradd_failure()->node, "");
    (void)gradd_at_node(status, "node");
    (void)GRADD_FAIL(INDEX, "second");
    CHECK_EQ_STR(gradd_failure()->node, "");
    (void)gradd_at_node(status, "node");
    gradd_error_set("third");
    CHECK_EQ_STR(gradd_failure()->node, "");
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

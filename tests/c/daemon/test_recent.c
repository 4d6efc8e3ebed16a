/* The requests that a daemon remembers. */
#include "server/daemon/recent.h"

#include "tests/test.h"

static recent_t recent;

/* Request i came at 10 i us, waited 1 and ran 2. */
static void add(session_t *session, int n) {
    static const command_t row = {.name = "forward"};
    for (int i = 0; i < n; i++) {
        const request_t request = {.command = &row,
                                   .session = session,
                                   .arrived_us = 10 * i,
                                   .started_us = 10 * i + 1,
                                   .ended_us = 10 * i + 3,
                                   .arena_bytes = i};
        recent_add(&recent, &request);
    }
}

static int64_t number(const msgpack_object *map, const char *key) {
    return (int64_t)wire_u64(wire_in(map, key));
}

/* The list as a client gets it; its first and last request. */
static int listed(int64_t since_us, int64_t out_at[2]) {
    wire_out_t out = {0};
    wire_doc_t doc = {0};
    wire_begin(&out);
    wire_key(&out, "done");
    recent_put(&recent, since_us, &out);
    wire_end(&out);
    CHECK_OK(wire_decode_any(out.data, out.bytes, WIRE_MAX_ITEMS, &doc));
    CHECK(out.bytes < WIRE_MAX_REPLY);
    const msgpack_object *done = wire_get(&doc, "done");
    const int n = wire_count(done);
    out_at[0] = out_at[1] = -1;
    if (n > 0) out_at[0] = number(wire_at(done, 0), "at");
    if (n > 0) out_at[1] = number(wire_at(done, n - 1), "at");
    for (int i = 0; i < n; i++) {
        CHECK_EQ_INT(number(wire_at(done, i), "session"), 7);
        CHECK_EQ_INT(number(wire_at(done, i), "queued"), 1);
        CHECK_EQ_INT(number(wire_at(done, i), "ran"), 2);
    }
    wire_doc_finish(&doc);
    wire_out_finish(&out);
    return n;
}

TEST(the_last_requests_are_remembered) {
    session_t session = {.number = 7};
    int64_t at[2];
    recent = (recent_t){0};
    CHECK_EQ_INT(listed(0, at), 0);
    add(&session, RECENT_MOST - 1);
    CHECK_EQ_INT(listed(0, at), RECENT_MOST - 1);
    recent = (recent_t){0};
    add(&session, RECENT_MOST + 5);
    CHECK_EQ_INT(listed(0, at), RECENT_MOST);
    CHECK_EQ_INT(at[0], 50);
    CHECK_EQ_INT(at[1], 10 * (RECENT_MOST + 4));
}

TEST(requests_since_a_time) {
    session_t session = {.number = 7};
    int64_t at[2];
    recent = (recent_t){0};
    add(&session, 10);
    CHECK_EQ_INT(listed(73, at), 3); /* the first of them has ended then */
    CHECK_EQ_INT(at[0], 70);
    CHECK_EQ_INT(listed(74, at), 2);
    CHECK_EQ_INT(listed(INT64_MAX, at), 0);
}

TEST(memory_is_the_most_of_a_request) {
    session_t session = {.number = 7};
    recent = (recent_t){0};
    atomic_store(&session.counts.arena_bytes, 4);
    add(&session, 6);
    CHECK_EQ_INT(recent.requests[1].arena_bytes, 4); /* made by itself */
    CHECK_EQ_INT(recent.requests[5].arena_bytes, 5); /* and given up again */
    CHECK_EQ_INT(recent.requests[5].rest_bytes, 4);
}

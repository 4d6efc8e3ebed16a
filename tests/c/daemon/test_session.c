/* Sessions without a daemon: nonce, token, sequence numbers, limits. The peer is this process.
 */
#include "server/session/session.h"

#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/test.h"

static session_table_t table;

/* A session whose client is this process. */
static session_t *make(int *out_end) {
    int ends[2];
    uint8_t token[SESSION_KEY_BYTES];
    session_t *session;
    gradd_peer_t peer;
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    CHECK_OK(gradd_peer_identify(ends[0], 0, GRADD_LEASE_AUTO, &peer));
    CHECK_OK(session_draw_key(token));
    CHECK_OK(session_create(&table, 7, token, ends[0], &peer, &session));
    CHECK_EQ_INT(session->number, 7);
    CHECK_EQ_INT(session->pid, getpid());
    *out_end = ends[1];
    return session;
}

static gradd_status_t attach(const uint8_t *nonce, uid_t uid, const char *route, session_t **out) {
    const session_caller_t caller = {uid, (const uint8_t *)route, strlen(route)};
    return session_attach(&table, nonce, SESSION_KEY_BYTES, &caller, out);
}

static gradd_status_t authorize(const uint8_t *token, uid_t uid, const char *route) {
    const session_caller_t caller = {uid, (const uint8_t *)route, strlen(route)};
    session_t *session;
    return session_authorize(&table, token, SESSION_KEY_BYTES, &caller, &session);
}

TEST(nonce_is_used_once) {
    int end;
    uint8_t nonce[SESSION_KEY_BYTES], zero[SESSION_KEY_BYTES] = {0};
    session_t *found, *session = make(&end);
    CHECK_STATUS(GRADD_E_SESSION, attach(zero, geteuid(), "r1", &found)); /* before hello */
    CHECK_OK(session_greet(session, "me", 2));
    memcpy(nonce, session->nonce, sizeof nonce);
    CHECK_STATUS(GRADD_E_SESSION, attach(zero, geteuid(), "r1", &found));
    CHECK_STATUS(GRADD_E_SESSION, attach(nonce, geteuid() + 1, "r1", &found));
    const session_caller_t caller = {geteuid(), (const uint8_t *)"r1", 2};
    CHECK_STATUS(GRADD_E_SESSION, session_attach(&table, nonce, 15, &caller, &found));
    CHECK_OK(attach(nonce, geteuid(), "r1", &found));
    CHECK(found == session);
    CHECK_STATUS(GRADD_E_SESSION, attach(nonce, geteuid(), "r2", &found));
    CHECK_STATUS(GRADD_E_SESSION, session_greet(session, "me", 2));
    session_destroy(&table, session);
    close(end);
}

TEST(token_is_bound_to_route_and_uid) {
    int end_a, end_b;
    session_t *found, *a = make(&end_a), *b = make(&end_b);
    uint8_t wrong[SESSION_KEY_BYTES];
    CHECK_OK(session_greet(a, "a", 1));
    CHECK_OK(session_greet(b, "b", 1));
    CHECK_OK(attach(a->nonce, geteuid(), "ra", &found));
    CHECK_STATUS(GRADD_E_SESSION, attach(b->nonce, geteuid(), "ra", &found)); /* route is taken */
    CHECK_OK(attach(b->nonce, geteuid(), "rb", &found));
    CHECK(memcmp(a->token, b->token, SESSION_KEY_BYTES) != 0);
    CHECK_OK(authorize(a->token, geteuid(), "ra"));
    CHECK_STATUS(GRADD_E_SESSION, authorize(a->token, geteuid(), "rb"));
    CHECK_STATUS(GRADD_E_SESSION, authorize(a->token, geteuid() + 1, "ra"));
    CHECK_STATUS(GRADD_E_SESSION, authorize(a->token, geteuid(), "rc"));
    memcpy(wrong, a->token, sizeof wrong);
    wrong[15] ^= 1;
    CHECK_STATUS(GRADD_E_SESSION, authorize(wrong, geteuid(), "ra"));
    session_destroy(&table, a);
    CHECK_STATUS(GRADD_E_SESSION, authorize(wrong, geteuid(), "ra"));
    CHECK_OK(authorize(b->token, geteuid(), "rb"));
    session_destroy(&table, b);
    CHECK_EQ_INT(table.n, 0);
    close(end_a);
    close(end_b);
}

TEST(sequence_numbers) {
    int end;
    session_t *session = make(&end);
    session_order_t order;
    CHECK_OK(session_order(session, 5, &order));
    CHECK_EQ_INT(order, SESSION_RUN);
    CHECK_OK(session_order(session, 5, &order)); /* it was refused, and comes again */
    CHECK_EQ_INT(order, SESSION_RUN);
    session_take(session, 5);
    CHECK_OK(session_order(session, 5, &order));
    CHECK_EQ_INT(order, SESSION_WAIT);
    session_keep_reply(session, 5, "five", 4);
    CHECK_OK(session_order(session, 5, &order));
    CHECK_EQ_INT(order, SESSION_REPEAT);
    CHECK_EQ_INT(session->last_reply_bytes, 4);
    CHECK(memcmp(session->last_reply, "five", 4) == 0);
    CHECK_STATUS(GRADD_E_SESSION, session_order(session, 4, &order));
    CHECK_ERROR_HAS("request 4 comes after request 5");
    CHECK_OK(session_order(session, 9, &order));
    CHECK_EQ_INT(order, SESSION_RUN);
    session->lane.length = SESSION_MAX_WAITING;
    CHECK_STATUS(GRADD_E_LIMIT, session_order(session, 10, &order));
    session->lane.length = 0;
    session_destroy(&table, session);
    close(end);
}

TEST(client_names_cannot_forge_log_lines) {
    int end;
    session_t *session = make(&end);
    CHECK_OK(session_greet(session, "a b\nlevel=error", 15));
    CHECK_EQ_STR(session->client, "a_b_level=error");
    char text[200];
    memset(text, 'x', sizeof text);
    CHECK_OK(session_greet(session, text, sizeof text));
    CHECK_EQ_INT(strlen(session->client), SESSION_CLIENT_BYTES - 1);
    session_destroy(&table, session);
    close(end);
}

TEST(pace_is_a_mean_of_the_last_seconds) {
    session_pace_t pace = {0};
    for (int i = 0; i < 100; i++) { /* half of the time, 4 steps a second */
        pace.engine_us += 250000;
        pace.n_steps += 2;
        session_pace_look(&pace, 500);
    }
    CHECK_NEAR(pace.busy, 0.5, 0.01);
    CHECK_NEAR(pace.steps_per_second, 4, 0.01);
    for (int i = 0; i < 60; i++)
        session_pace_look(&pace, 500);
    CHECK(pace.busy < 0.005 && pace.steps_per_second < 0.05);
    pace.engine_us += 60000000; /* one request of a minute, and no look meanwhile */
    session_pace_look(&pace, 60000);
    CHECK_NEAR(pace.busy, 1, 0.01);
}

TEST(connections_are_limited) {
    int end, pair[2];
    const uint8_t token[SESSION_KEY_BYTES] = {0};
    session_t *session;
    gradd_peer_t peer;
    for (int i = 0; i < SESSION_MAX; i++) {
        session = make(&end);
        CHECK(!session->surplus);
        session->pid = -i; /* as if each came from a process of its own */
    }
    for (int i = 0; i < SESSION_MAX_SURPLUS; i++)
        CHECK(make(&end)->surplus);
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    CHECK_OK(gradd_peer_identify(pair[0], 0, GRADD_LEASE_AUTO, &peer));
    CHECK_STATUS(GRADD_E_LIMIT, session_create(&table, 7, token, pair[0], &peer, &session));
    CHECK_EQ_INT(peer.pidfd, -1);
    while (table.n > 0)
        session_destroy(&table, table.sessions[0]);
    CHECK_EQ_INT(table.n_surplus, 0);
}

TEST(connections_of_a_process_are_limited) {
    int end;
    session_t *first = make(&end);
    for (int i = 1; i < SESSION_MAX_OF_PROCESS; i++)
        CHECK(!make(&end)->surplus);
    CHECK(make(&end)->surplus);
    session_destroy(&table, first);
    CHECK(!make(&end)->surplus); /* one has left */
    while (table.n > 0)
        session_destroy(&table, table.sessions[0]);
}

/* The engine's time among sessions, on a clock of the test's own: equal parts, parts by share, and
 * short requests between long ones.
 */
#include <string.h>

#include "server/session/queue.h"
#include "tests/test.h"

enum { MOST = 17, MINUTE_US = 60000000 };

typedef struct client_s {
    job_t job; /* first: the queue hands it out */
    lane_t lane;
    int64_t step_us, pause_us;  /* of each request, and between two */
    int64_t left_us, ready_us;  /* of the present request; when it comes */
    int64_t had_us, longest_us; /* engine time; from a request to its reply */
    bool waits;                 /* a request is in the queue */
} client_t;

static int64_t now_us;

static int64_t now(void) {
    return now_us;
}

static void arrive(queue_t *queue, client_t *clients, int n) {
    for (int i = 0; i < n; i++) {
        client_t *c = &clients[i];
        if (c->waits || c->ready_us > now_us) continue;
        c->waits = true;
        c->left_us = c->step_us;
        queue_push(queue, &c->lane, &c->job);
    }
}

/* One turn of the engine, with launches of at most `launch_us`. */
static void serve(queue_t *queue, client_t *clients, int n, int64_t launch_us) {
    client_t *c = (client_t *)queue_take(queue);
    if (!c) {
        now_us += 100;
        return;
    }
    do {
        const int64_t took = c->left_us < launch_us ? c->left_us : launch_us;
        now_us += took;
        c->had_us += took;
        c->left_us -= took;
        arrive(queue, clients, n);
    } while (c->left_us && !queue_makes_way(queue));
    if (c->left_us) {
        queue_again(queue, &c->job);
        return;
    }
    queue_finish(queue, &c->job);
    queue_reap(queue);
    const int64_t took = now_us - c->ready_us;
    if (took > c->longest_us) c->longest_us = took;
    c->waits = false;
    c->ready_us = now_us + c->pause_us;
}

/* Two minutes, of which the second counts. */
static void run(client_t *clients, int n, int64_t launch_us) {
    queue_t *queue;
    now_us = MINUTE_US;
    CHECK_OK(queue_create(&queue));
    queue_set_clock(queue, now);
    for (int minute = 0; minute < 2; minute++) {
        for (int i = 0; i < n; i++)
            clients[i].had_us = clients[i].longest_us = 0;
        for (const int64_t end = now_us + MINUTE_US; now_us < end;) {
            arrive(queue, clients, n);
            serve(queue, clients, n, launch_us);
        }
    }
    for (int i = 0; i < n; i++)
        queue_drop(queue, &clients[i].lane);
    queue_destroy(queue);
}

/* Jain's index: 1 if all have had the same. */
static double index_of(const client_t *clients, int n) {
    double sum = 0, squares = 0;
    for (int i = 0; i < n; i++) {
        const double x = (double)clients[i].had_us;
        sum += x;
        squares += x * x;
    }
    return sum * sum / (n * squares);
}

/* Their steps take from 5 to 500 ms. */
static void sixteen(client_t *clients) {
    for (int i = 0; i < 16; i++)
        clients[i] = (client_t){.step_us = 5000 + i * 33000, .pause_us = 200};
}

TEST(equal_sessions_have_equal_time) {
    static client_t clients[MOST];
    static const int64_t launches_us[] = {100, 7000, 20000};
    for (int i = 0; i < 3; i++) {
        sixteen(clients);
        run(clients, 16, launches_us[i]);
        CHECK(index_of(clients, 16) >= 0.98);
    }
}

TEST(shares_are_kept) {
    static client_t clients[4];
    for (int i = 0; i < 4; i++)
        clients[i] = (client_t){.step_us = i % 2 ? 300000 : 45000,
                                .pause_us = 200,
                                .lane.account.share = i < 2 ? 100 : 300};
    run(clients, 4, 3000);
    for (int i = 0; i < 2; i++) {
        const double ratio = (double)clients[i + 2].had_us / (double)clients[i].had_us;
        CHECK(ratio > 2.85 && ratio < 3.15);
    }
}

/* A request of a millisecond every 50 ms, from a seventeenth session. */
TEST(a_short_request_waits_for_one_launch) {
    static client_t clients[MOST];
    sixteen(clients);
    clients[16] = (client_t){.step_us = 1000, .pause_us = 50000};
    run(clients, 17, 20000);
    CHECK(clients[16].longest_us <= 22000);
    CHECK(index_of(clients, 16) >= 0.98);
}

/* The same without a pause has its part of the time, and no more than a slice goes before it. */
TEST(short_requests_without_end_wait_for_slices) {
    static client_t clients[3] = {
        {.step_us = 400000, .pause_us = 200},
        {.step_us = 400000, .pause_us = 200},
        {.step_us = 1000,   .pause_us = 200},
    };
    run(clients, 3, 2000);
    CHECK(clients[2].longest_us <= 2 * FAIR_SLICE_US);
    CHECK(index_of(clients, 2) >= 0.98);
}

/* A share that is set on the way holds from there on: the queue charges by it. */
TEST(a_share_may_change) {
    static client_t clients[2] = {
        {.step_us = 50000, .pause_us = 200},
        {.step_us = 50000, .pause_us = 200}
    };
    queue_t *queue;
    int64_t had_us[2];
    now_us = MINUTE_US;
    CHECK_OK(queue_create(&queue));
    queue_set_clock(queue, now);
    for (int minute = 0; minute < 3; minute++) {
        if (minute == 1) queue_set_share(queue, &clients[1].lane, 300);
        for (int i = 0; i < 2; i++)
            had_us[i] = clients[i].had_us;
        for (const int64_t end = now_us + MINUTE_US; now_us < end;) {
            arrive(queue, clients, 2);
            serve(queue, clients, 2, 5000);
        }
        const double ratio =
            (double)(clients[1].had_us - had_us[1]) / (double)(clients[0].had_us - had_us[0]);
        CHECK(minute ? ratio > 2.85 && ratio < 3.15 : ratio > 0.95 && ratio < 1.05);
    }
    for (int i = 0; i < 2; i++)
        queue_drop(queue, &clients[i].lane);
    queue_destroy(queue);
}

/* Ten seconds behind a word are not made up for. */
TEST(nothing_is_saved_up_behind_a_word) {
    static client_t clients[2] = {
        {.step_us = 20000, .pause_us = 0},
        {.step_us = 20000, .pause_us = 0}
    };
    queue_t *queue;
    uint64_t word = 0;
    now_us = MINUTE_US;
    CHECK_OK(queue_create(&queue));
    queue_set_clock(queue, now);
    for (int i = 0; i < 100; i++) {
        arrive(queue, clients, 2);
        serve(queue, clients, 2, 5000);
    }
    clients[0].job.word = &word;
    clients[0].job.value = 1;
    for (const int64_t end = now_us + 10000000; now_us < end;) {
        arrive(queue, clients, 2);
        serve(queue, clients, 2, 5000);
    }
    word = 1;
    const int64_t before_us = clients[1].had_us;
    for (const int64_t end = now_us + 2000000; now_us < end;) {
        arrive(queue, clients, 2);
        serve(queue, clients, 2, 5000);
    }
    CHECK(clients[1].had_us - before_us >= 900000);
    for (int i = 0; i < 2; i++)
        queue_drop(queue, &clients[i].lane);
    queue_destroy(queue);
}

/* What was away does not take the time of its absence. */
TEST(nothing_is_saved_up) {
    fair_t fair = {0};
    fair_account_t worker = {0}, away = {0};
    fair_join(&fair, &away, 1000000);
    fair_begin(&fair, &away);
    fair_end(&away, 1000000, 60000);
    fair_join(&fair, &worker, 1000000);
    for (int i = 1; i <= 100; i++) {
        fair_begin(&fair, &worker);
        fair_end(&worker, 1000000 + i * FAIR_SLICE_US, FAIR_SLICE_US);
    }
    fair_account_t back = away;
    fair_join(&fair, &back, 1500000); /* after half a second */
    CHECK_EQ_INT(back.charged, fair.least - FAIR_LAG_US);
    fair_join(&fair, &away, 3000000);
    CHECK_EQ_INT(away.charged, fair.least);
    CHECK(away.first && fair_before(&away, &worker));
}

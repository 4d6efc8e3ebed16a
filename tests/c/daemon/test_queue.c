/* The queue between the threads: order, fairness, dropping, waking.
 */
#include "server/session/queue.h"

#include <poll.h>
#include <pthread.h>
#include <string.h>

#include "tests/test.h"

static int64_t clock_us;

/* Each look at the clock takes a millisecond. */
static int64_t tick(void) {
    return clock_us += 1000;
}

TEST(lanes_take_turns) {
    queue_t *queue;
    lane_t lanes[2] = {0};
    job_t jobs[2][3] = {0};
    CHECK_OK(queue_create(&queue));
    queue_set_clock(queue, tick);
    for (int lane = 0; lane < 2; lane++)
        for (int i = 0; i < 3; i++)
            queue_push(queue, &lanes[lane], &jobs[lane][i]);
    for (int i = 0; i < 6; i++) {
        job_t *job = queue_take(queue);
        CHECK(job == &jobs[i % 2][i / 2]);
        queue_finish(queue, job);
    }
    job_t *done = queue_reap(queue);
    for (int i = 0; i < 6; i++, done = done->next)
        CHECK(done == &jobs[i % 2][i / 2]);
    CHECK(done == NULL);
    CHECK_EQ_INT(queue_depth(queue), 0);
    queue_destroy(queue);
}

TEST(one_job_of_a_lane_at_a_time) {
    queue_t *queue;
    lane_t a = {0}, b = {0};
    job_t jobs[3] = {0};
    CHECK_OK(queue_create(&queue));
    queue_push(queue, &a, &jobs[0]);
    queue_push(queue, &a, &jobs[1]);
    CHECK(queue_take(queue) == &jobs[0]);
    queue_push(queue, &b, &jobs[2]);
    CHECK(queue_take(queue) == &jobs[2]); /* a is busy */
    queue_finish(queue, &jobs[0]);
    CHECK(queue_take(queue) == &jobs[1]);
    queue_destroy(queue);
}

TEST(drop_leaves_the_running_one) {
    queue_t *queue;
    lane_t a = {0};
    job_t jobs[4] = {0};
    CHECK_OK(queue_create(&queue));
    for (int i = 0; i < 3; i++)
        queue_push(queue, &a, &jobs[i]);
    CHECK(queue_take(queue) == &jobs[0]);
    job_t *dropped = queue_drop(queue, &a);
    CHECK(dropped == &jobs[1] && dropped->next == &jobs[2] && !dropped->next->next);
    CHECK_EQ_INT(queue_depth(queue), 1);
    queue_push_first(queue, &a, &jobs[3]);
    queue_finish(queue, &jobs[0]);
    CHECK(queue_take(queue) == &jobs[3]);
    CHECK(queue_take(queue) == NULL);
    queue_destroy(queue);
}

/* A job that is not finished stays in front of its lane, which waits for its word. */
TEST(a_job_may_go_on_later) {
    queue_t *queue;
    uint64_t word = 0;
    lane_t a = {0}, b = {0};
    job_t jobs[3] = {0};
    CHECK_OK(queue_create(&queue));
    queue_push(queue, &a, &jobs[0]);
    queue_push(queue, &a, &jobs[1]);
    CHECK(queue_take(queue) == &jobs[0]);
    jobs[0].word = &word;
    jobs[0].value = 2;
    queue_again(queue, &jobs[0]);
    CHECK(queue_waits(queue) && queue_take(queue) == NULL);
    queue_push(queue, &b, &jobs[2]);
    CHECK(queue_take(queue) == &jobs[2]);
    queue_finish(queue, &jobs[2]);
    CHECK_EQ_INT(queue_depth(queue), 3);
    word = 2;
    CHECK(queue_take(queue) == &jobs[0]);
    queue_finish(queue, &jobs[0]);
    CHECK(queue_take(queue) == &jobs[1]);
    queue_again(queue, &jobs[1]);
    job_t *dropped = queue_drop(queue, &a);
    CHECK(dropped == &jobs[1] && !dropped->next);
    CHECK(queue_reap(queue) && !queue_ready(queue));
    CHECK_EQ_INT(queue_depth(queue), 0);
    queue_destroy(queue);
}

/* The lane of a job that waits for its word waits, and no other. */
TEST(a_job_waits_for_its_word) {
    queue_t *queue;
    uint64_t word = 4;
    lane_t a = {0}, b = {0};
    job_t jobs[4] = {
        {.word = &word, .value = 5},
        {0},
        {0},
        {.word = &word, .value = 6}
    };
    CHECK_OK(queue_create(&queue));
    queue_push(queue, &a, &jobs[0]);
    queue_push(queue, &a, &jobs[1]); /* behind it */
    CHECK(!queue_ready(queue) && queue_waits(queue) && queue_take(queue) == NULL);
    queue_push(queue, &b, &jobs[2]);
    CHECK(queue_ready(queue) && !queue_waits(queue));
    CHECK(queue_take(queue) == &jobs[2] && queue_take(queue) == NULL);
    word = 5;
    CHECK(queue_ready(queue));
    CHECK(queue_take(queue) == &jobs[0]);
    queue_finish(queue, &jobs[0]);
    CHECK(queue_take(queue) == &jobs[1]);
    queue_finish(queue, &jobs[1]);
    queue_finish(queue, &jobs[2]);
    queue_push(queue, &b, &jobs[3]);
    CHECK(queue_waits(queue));
    CHECK(queue_drop(queue, &b) == &jobs[3]);
    CHECK(!queue_ready(queue) && !queue_waits(queue));
    queue_push(queue, &b, &jobs[2]); /* nothing is left of the word */
    CHECK(queue_ready(queue) && queue_take(queue) == &jobs[2]);
    queue_destroy(queue);
}

/* What the threads write themselves is not polled for. */
TEST(a_word_that_is_told_needs_no_look) {
    queue_t *queue;
    uint64_t word = 0;
    lane_t a = {0}, b = {0};
    job_t jobs[2] = {
        {.word = &word, .value = 1, .told = true},
        {.word = &word, .value = 2}
    };
    CHECK_OK(queue_create(&queue));
    queue_push(queue, &a, &jobs[0]);
    CHECK(!queue_ready(queue) && !queue_waits(queue));
    queue_push(queue, &b, &jobs[1]);
    CHECK(!queue_ready(queue) && queue_waits(queue));
    word = 1;
    CHECK(queue_ready(queue) && queue_take(queue) == &jobs[0]);
    queue_destroy(queue);
}

TEST(push_first_overtakes_all_lanes) {
    queue_t *queue;
    lane_t lanes[3] = {0};
    job_t jobs[4] = {0};
    CHECK_OK(queue_create(&queue));
    for (int i = 0; i < 3; i++)
        queue_push(queue, &lanes[i], &jobs[i]);
    queue_push_first(queue, &lanes[2], &jobs[3]);
    CHECK(queue_take(queue) == &jobs[3]);
    CHECK(queue_take(queue) == &jobs[0]);
    queue_finish(queue, &jobs[3]);
    CHECK(queue_take(queue) == &jobs[1]);
    CHECK(queue_take(queue) == &jobs[2]);
    queue_destroy(queue);
}

/* What was put aside is dropped with its lane, or stays for the engine to end it. */
TEST(drop_new_leaves_what_was_begun) {
    queue_t *queue;
    lane_t a = {0};
    job_t jobs[3] = {0};
    CHECK_OK(queue_create(&queue));
    for (int i = 0; i < 3; i++)
        queue_push(queue, &a, &jobs[i]);
    CHECK(queue_take(queue) == &jobs[0]);
    queue_again(queue, &jobs[0]);
    job_t *dropped = queue_drop_new(queue, &a);
    CHECK(dropped == &jobs[1] && dropped->next == &jobs[2] && !dropped->next->next);
    CHECK_EQ_INT(queue_depth(queue), 1);
    CHECK(!queue_drop_new(queue, &a));
    CHECK(queue_take(queue) == &jobs[0]);
    queue_again(queue, &jobs[0]);
    CHECK(queue_drop(queue, &a) == &jobs[0] && !queue_ready(queue));
    CHECK_EQ_INT(queue_depth(queue), 0);
    queue_destroy(queue);
}

TEST(a_long_job_makes_way) {
    queue_t *queue;
    lane_t a = {0}, b = {0};
    job_t jobs[3] = {0};
    CHECK_OK(queue_create(&queue));
    queue_set_clock(queue, tick);
    queue_push(queue, &a, &jobs[0]);
    CHECK(queue_take(queue) == &jobs[0]);
    clock_us += 1000000;
    CHECK(!queue_makes_way(queue)); /* for nothing */
    queue_push(queue, &b, &jobs[1]);
    CHECK(queue_makes_way(queue));
    queue_again(queue, &jobs[0]);
    CHECK(queue_take(queue) == &jobs[1]);
    CHECK(!queue_makes_way(queue));
    clock_us += FAIR_SLICE_US;
    CHECK(queue_makes_way(queue));
    queue_again(queue, &jobs[1]); /* it has had less than the other */
    CHECK(queue_take(queue) == &jobs[1]);
    queue_push_first(queue, &a, &jobs[2]); /* memory comes back at once */
    CHECK(queue_makes_way(queue));
    queue_again(queue, &jobs[1]);
    CHECK(queue_take(queue) == &jobs[2]);
    queue_destroy(queue);
}

enum { N_ROUNDS = 20000 };

static void *echo(void *queue) {
    for (int i = 0; i < N_ROUNDS;) {
        job_t *job = queue_take(queue);
        if (!job) continue;
        queue_finish(queue, job);
        i++;
    }
    return NULL;
}

/* No wake-up may be lost, whatever the interleaving of sleep and finish. */
TEST_LIMIT(no_wakeup_is_lost, 60) {
    queue_t *queue;
    lane_t lane = {0};
    job_t job = {0};
    pthread_t thread;
    CHECK_OK(queue_create(&queue));
    CHECK(pthread_create(&thread, NULL, echo, queue) == 0);
    for (int i = 0; i < N_ROUNDS; i++) {
        job_t *done = NULL;
        queue_push(queue, &lane, &job);
        while (!(done = queue_reap(queue))) {
            struct pollfd p = {.fd = queue_fd(queue), .events = POLLIN};
            if (queue_sleep(queue)) CHECK_EQ_INT(poll(&p, 1, 5000), 1);
            queue_wake(queue);
        }
        CHECK(done == &job);
    }
    pthread_join(thread, NULL);
    queue_destroy(queue);
}

TEST(a_held_queue_lets_only_ends_and_begun_jobs_through) {
    queue_t *queue;
    lane_t a = {0}, b = {0};
    job_t jobs[4] = {0};
    CHECK_OK(queue_create(&queue));
    queue_push(queue, &a, &jobs[0]);
    queue_push(queue, &a, &jobs[1]);
    CHECK(queue_take(queue) == &jobs[0]);
    queue_hold(queue, true);
    queue_again(queue, &jobs[0]); /* has begun */
    CHECK(queue_take(queue) == &jobs[0]);
    queue_finish(queue, &jobs[0]);
    queue_push(queue, &b, &jobs[2]);
    CHECK(!queue_ready(queue) && !queue_waits(queue) && !queue_take(queue));
    queue_push_first(queue, &b, &jobs[3]); /* an end of a session */
    CHECK(queue_ready(queue));
    CHECK(queue_take(queue) == &jobs[3]);
    queue_finish(queue, &jobs[3]);
    CHECK(!queue_take(queue));
    queue_hold(queue, false);
    const job_t *next[] = {queue_take(queue), queue_take(queue)};
    const int a_first = next[0] == &jobs[1]; /* or the other lane, if this test was held up above */
    CHECK(next[!a_first] == &jobs[1] && next[a_first] == &jobs[2]);
    queue_destroy(queue);
}

/* Sessions that wait for memory: which one waits in vain, which one goes before another. */
#include "server/session/room.h"

#include "tests/test.h"

enum { N = 3 };

TEST(what_others_hold_may_come_back) {
    const room_place_t places[N] = {
        {.holds = 30, .number = 1},
        {.holds = 50, .number = 2},
        {.wants = 60, .number = 3}
    };
    CHECK_EQ_INT(room_most(places, N, 2, 10), 90);
    CHECK_EQ_INT(room_most(places, N, 0, 10), 60); /* not what it holds itself */
    CHECK_EQ_INT(room_stuck(places, N, 10), -1);
}

/* Each holds what the other wants: the session that came last gives up. */
TEST(of_two_that_wait_for_each_other_the_youngest_ends) {
    room_place_t places[N] = {
        {.holds = 40, .wants = 30, .number = 7},
        {.holds = 40, .wants = 30, .number = 2},
        {.number = 9}
    };
    CHECK_EQ_INT(room_stuck(places, N, 20), 0);
    places[0].wants = 20; /* it finds room, ends, and leaves its own to the other */
    CHECK_EQ_INT(room_stuck(places, N, 20), -1);
    places[0].wants = 30;
    places[2].holds = 10; /* this one does not wait */
    CHECK_EQ_INT(room_stuck(places, N, 20), -1);
}

/* Of those in a circle, not of those that wait behind it for less. */
TEST(only_sessions_in_the_circle_end) {
    room_place_t places[4] = {
        {.holds = 45, .wants = 50, .number = 1},
        {.holds = 45, .wants = 50, .number = 2},
        {.wants = 10, .number = 3},
        {.wants = 5, .number = 4}
    };
    CHECK_EQ_INT(room_stuck(places, 4, 10), 1);
}

TEST(small_runs_leave_room_to_a_large_one) {
    room_place_t places[N] = {
        {.holds = 40, .number = 1, .active = true},
        {.wants = 80, .since_us = 5, .number = 2},
        {.wants = 30, .since_us = 9, .number = 3, .active = true}
    };
    CHECK(room_yields(places, N, 2, 60)); /* 100 are free when the first one has ended */
    places[1].wants = 20;
    CHECK(!room_yields(places, N, 2, 60)); /* there is room for both */
    places[1].wants = 80;
    places[1].since_us = 10;
    CHECK(!room_yields(places, N, 2, 60)); /* that came later */
    places[1].since_us = 5;
    places[0].active = false;
    CHECK(!room_yields(places, N, 2, 60)); /* the first one may never end */
    places[0].active = true;
    places[2].holds = 10;
    CHECK(!room_yields(places, N, 2, 60)); /* its end gives more back */
}

/* Sixteen sessions run for a while each with a tenth of the memory, and one wants nine tenths: it
 * gets them, once those that had begun are done. */
TEST(a_large_run_is_not_kept_out) {
    enum { SMALL = 16, ALL = SMALL + 1, MEMORY = 100 };
    room_place_t places[ALL] = {0};
    int64_t free = MEMORY, ends_at[ALL] = {0}, begun_at = -1;
    for (int i = 0; i < ALL; i++)
        places[i] = (room_place_t){.number = (uint32_t)i + 1, .active = true};
    for (int64_t now = 1; now < 200 && begun_at < 0; now++) {
        for (int i = 0; i < SMALL; i++) {
            if (places[i].holds && ends_at[i] <= now) {
                free += places[i].holds;
                places[i].holds = 0;
                continue; /* the next one comes a moment later */
            }
            if (places[i].holds || free < 10) continue;
            places[i].wants = 10;
            if (!places[i].since_us) places[i].since_us = now;
            if (room_yields(places, ALL, i, free)) continue;
            places[i].wants = places[i].since_us = 0;
            places[i].holds = 10;
            ends_at[i] = now + 7 + i;
            free -= 10;
        }
        if (now < 50) continue;
        if (now == 50) places[SMALL].wants = 90, places[SMALL].since_us = now;
        if (free >= 90) begun_at = now;
    }
    CHECK(begun_at > 50 && begun_at <= 50 + 7 + SMALL);
}

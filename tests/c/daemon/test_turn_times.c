/* Which turns of the event loop are reported, and with which cause. */
#include "server/daemon/turn_times.h"

#include <string.h>

#include "tests/test.h"

#define MS 1000000

static void lap(laps_t *laps, const char *cause, uint32_t session, int64_t ms) {
    laps_cause(laps, cause, session);
    laps_add(laps, ms * MS);
}

TEST(a_slow_turn_names_its_longest_lap) {
    laps_t laps = {0};
    char text[160];
    lap(&laps, "ps", 0, 20);
    lap(&laps, "session end", 7, 90);
    lap(&laps, "tick", 0, 1);
    CHECK(laps_close(&laps, 5000, text, sizeof text));
    CHECK_EQ_STR(text, "ms=111 cause=\"session end\" session=7 cause_ms=90 others=0");
    CHECK(!laps_close(&laps, 9000, text, sizeof text)); /* the next turn begins at nothing */
}

TEST(a_turn_of_the_limit_is_not_slow) {
    laps_t laps = {0};
    char text[160];
    lap(&laps, "ps", 0, LAPS_SLOW_MS);
    CHECK(!laps_close(&laps, 5000, text, sizeof text));
    lap(&laps, "ps", 0, LAPS_SLOW_MS);
    laps_add(&laps, 1);
    CHECK(laps_close(&laps, 5000, text, sizeof text));
}

TEST(many_slow_turns_are_counted) {
    laps_t laps = {0};
    char text[160];
    int told = 0;
    for (int64_t now = 1000; now < 1000 + 3 * LAPS_PAUSE_MS; now += 125) {
        laps_add(&laps, 125 * MS);
        told += laps_close(&laps, now, text, sizeof text);
    }
    CHECK_EQ_INT(told, 3);
    CHECK_EQ_STR(text, "ms=125 cause=\"?\" session=0 cause_ms=125 others=7");
}

/* The clock runs in a lap, and not between turns. */
TEST(a_short_turn_takes_its_time) {
    laps_t laps = {0};
    laps_begin(&laps);
    laps_end(&laps);
    laps_begin(&laps);
    laps_end(&laps);
    CHECK(laps.turn_ns > 0 && laps.turn_ns < (int64_t)60 * 1000 * MS);
    laps_finish(&laps);
    CHECK_EQ_INT(laps.turn_ns, 0);
}

/* Times of the event loop's turns. See turn_times.h. */
#include "server/daemon/turn_times.h"

#include <stdio.h>
#include <time.h>

#include "server/host/log.h"

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void laps_begin(laps_t *laps) {
    laps->began_ns = now_ns();
}

void laps_cause(laps_t *laps, const char *cause, uint32_t session) {
    laps->cause = cause;
    laps->session = session;
}

void laps_add(laps_t *laps, int64_t ns) {
    laps->turn_ns += ns;
    if (ns > laps->longest_ns) {
        laps->longest_ns = ns;
        laps->longest = laps->cause;
        laps->longest_session = laps->session;
    }
    laps_cause(laps, NULL, 0);
}

void laps_end(laps_t *laps) {
    int64_t now = now_ns();
    laps_add(laps, now - laps->began_ns);
    laps->began_ns = now;
}

bool laps_close(laps_t *laps, int64_t now_ms, char *text, size_t bytes) {
    int64_t turn = laps->turn_ns, longest = laps->longest_ns;
    laps->turn_ns = laps->longest_ns = 0;
    if (turn <= LAPS_SLOW_MS * INT64_C(1000000)) return false;
    if (laps->told_ms && now_ms - laps->told_ms < LAPS_PAUSE_MS) {
        laps->n_untold++;
        return false;
    }
    snprintf(text, bytes, "ms=%lld cause=\"%s\" session=%u cause_ms=%lld others=%u",
             (long long)turn / 1000000, laps->longest ? laps->longest : "?", laps->longest_session,
             (long long)longest / 1000000, laps->n_untold);
    laps->told_ms = now_ms;
    laps->n_untold = 0;
    return true;
}

void laps_finish(laps_t *laps) {
    char text[160];
    if (laps_close(laps, now_ns() / 1000000, text, sizeof text))
        log_event(LOG_WARN, "slow_turn", "%s", text);
}

/* Where a turn of the event loop spends its time: a long one delays every client.
 *
 * A turn is a sequence of laps, each with a cause; sleep between two turns belongs to none. A turn
 * above LAPS_SLOW_MS is reported with its longest lap, at most once in LAPS_PAUSE_MS.
 */
#ifndef GRADD_SERVER_DAEMON_TURN_TIMES_H
#define GRADD_SERVER_DAEMON_TURN_TIMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LAPS_SLOW_MS  100
#define LAPS_PAUSE_MS 1000

typedef struct laps_s {
    int64_t began_ns, turn_ns, longest_ns; /* of this lap, of the turn, of its longest lap */
    const char *cause, *longest;           /* Borrowed: literals */
    uint32_t session, longest_session;     /* 0 = none */
    int64_t told_ms;
    unsigned n_untold;
} laps_t;

/* A turn begins, or goes on after it has slept. */
void laps_begin(laps_t *laps);
/* Sets the cause of the present lap. */
void laps_cause(laps_t *laps, const char *cause, uint32_t session);
/* The lap ends, and the next one begins. */
void laps_end(laps_t *laps);
/* The turn ends. Logs "slow_turn" if it is due. */
void laps_finish(laps_t *laps);

/* ---- the parts without a clock ---- */

void laps_add(laps_t *laps, int64_t ns);
/* The turn ends at `now_ms`. True with a text for the log if there is something to tell. */
bool laps_close(laps_t *laps, int64_t now_ms, char *text, size_t bytes);

#endif

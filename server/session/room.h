/* Sessions that wait for memory of runs: which of them waits in vain, and which goes before others.
 *
 * A run that finds no room waits for other sessions to give theirs back. There is no clock, no lock
 * and no memory in here: times and bytes are those of the caller, which asks again whenever some
 * bytes have come back.
 */
#ifndef GRADD_SERVER_SESSION_ROOM_H
#define GRADD_SERVER_SESSION_ROOM_H

#include <stdbool.h>
#include <stdint.h>

#define ROOM_MOST 512 /* sessions, at least as many as there may be */

/* Of one session. */
typedef struct room_place_s {
    int64_t holds;    /* bytes that its runs have */
    int64_t wants;    /* bytes for which it waits; 0 = it does not */
    int64_t since_us; /* it does, or asks just now */
    uint32_t number;  /* of the session: the youngest has the highest */
    bool active;      /* it has computed lately, so it gives back before long */
} room_place_t;

/* The most that places[i] can get: what is free, and what all others hold. */
int64_t room_most(const room_place_t *places, int n, int i, int64_t free);
/* The youngest of those that wait for each other: they would go on waiting although all that do not
 * wait gave everything back. -1: there are none. */
int room_stuck(const room_place_t *places, int n, int64_t free);
/* Whether places[i], which holds nothing and finds room, leaves it to one that has waited for
 * longer: that one gets its bytes when those that are active give theirs back, unless places[i]
 * takes them now. So a large run is not kept out by many small ones. */
bool room_yields(const room_place_t *places, int n, int i, int64_t free);

#endif

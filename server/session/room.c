/* See room.h. */
#include "server/session/room.h"

#include <stddef.h>

int64_t room_most(const room_place_t *places, int n, int i, int64_t free) {
    int64_t most = free;
    for (int k = 0; k < n; k++)
        if (k != i) most += places[k].holds;
    return most;
}

/* Of those that wait and are not in `ends`, one that finds room; -1: none. */
static int next_end(const room_place_t *places, int n, const bool *ends, int64_t free) {
    for (int i = 0; i < n; i++)
        if (!ends[i] && places[i].wants <= free) return i;
    return -1;
}

int room_stuck(const room_place_t *places, int n, int64_t free) {
    bool ends[ROOM_MOST];
    int youngest = -1;
    for (int i = 0; i < n; i++) {
        ends[i] = !places[i].wants;
        if (ends[i]) free += places[i].holds;
    }
    for (int i; (i = next_end(places, n, ends, free)) >= 0;) {
        ends[i] = true;
        free += places[i].holds;
    }
    for (int i = 0; i < n; i++)
        if (!ends[i] && (youngest < 0 || places[i].number > places[youngest].number)) youngest = i;
    return youngest;
}

/* What is free when those that are active have given back, but for two. */
static int64_t soon_free(const room_place_t *places, int n, int a, int b, int64_t free) {
    for (int i = 0; i < n; i++)
        if (i != a && i != b && places[i].active && !places[i].wants) free += places[i].holds;
    return free;
}

bool room_yields(const room_place_t *places, int n, int i, int64_t free) {
    const room_place_t *me = &places[i];
    if (me->holds) return false;
    for (int k = 0; k < n; k++) {
        const room_place_t *other = &places[k];
        if (k == i || !other->wants || other->since_us >= me->since_us) continue;
        if (other->wants > free - me->wants && other->wants <= soon_free(places, n, i, k, free))
            return true;
    }
    return false;
}

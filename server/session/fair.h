/* Which of several lanes is next: the one that has had the least engine time by its share.
 *
 * A lane that comes back is at most FAIR_LAG_US behind the present least, so nothing is saved up
 * while there is nothing to do; one that is new, or was away for a second, begins at the least. One
 * that has had little of the last second goes before the others, once: what waits there is short
 * more often than not.
 *
 * There is no clock and no lock in here: times are those of the caller.
 */
#ifndef GRADD_SERVER_SESSION_FAIR_H
#define GRADD_SERVER_SESSION_FAIR_H

#include <stdbool.h>
#include <stdint.h>

#define FAIR_SLICE_US  20000 /* what runs makes way after so long, when something else waits */
#define FAIR_LAG_US    100000
#define FAIR_LITTLE_US 50000 /* of the last second */
#define FAIR_SHARE     100   /* of a lane of which nothing is said */
#define FAIR_SHARE_MAX 10000

/* Of all lanes. Zeroed: a new one. */
typedef struct fair_s {
    int64_t least; /* what the last lane had been charged that was next by its charge */
} fair_t;

/* Of one lane. Zeroed: a new one. */
typedef struct fair_account_s {
    uint32_t share;   /* in relation to others: twice the share, twice the time; 0 = FAIR_SHARE */
    int64_t charged;  /* engine time by the share: microseconds at FAIR_SHARE */
    int64_t seen_us;  /* when there was something to run, last; 0 = never */
    double recent_us; /* engine time lately: what is a second old counts no more */
    bool first;       /* goes before those that do not */
} fair_account_t;

/* The lane has something to run, and had not. now_us > 0. */
void fair_join(const fair_t *fair, fair_account_t *account, int64_t now_us);
/* Whether a is next rather than b. */
bool fair_before(const fair_account_t *a, const fair_account_t *b);
/* The lane is next. */
void fair_begin(fair_t *fair, fair_account_t *account);
/* It has run for so long, until now. */
void fair_end(fair_account_t *account, int64_t now_us, int64_t ran_us);
/* Whether what has run for so long makes way for the lane that would be next. */
bool fair_makes_way(const fair_account_t *next, int64_t ran_us);

#endif

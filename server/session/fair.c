/* See fair.h. */
#include "server/session/fair.h"

#define SECOND_US 1000000

/* What is recent fades in proportion to the time that has passed. */
static void look(fair_account_t *account, int64_t now_us) {
    const int64_t past = now_us - account->seen_us;
    account->recent_us *= past < SECOND_US ? 1 - (double)past / SECOND_US : 0;
    account->seen_us = now_us;
}

void fair_join(const fair_t *fair, fair_account_t *account, int64_t now_us) {
    const bool is_new = !account->seen_us || now_us - account->seen_us >= SECOND_US;
    const int64_t from = is_new ? fair->least : fair->least - FAIR_LAG_US;
    if (account->charged < from) account->charged = from;
    look(account, now_us);
    account->first = account->recent_us < FAIR_LITTLE_US;
}

bool fair_before(const fair_account_t *a, const fair_account_t *b) {
    return a->first != b->first ? a->first : a->charged < b->charged;
}

void fair_begin(fair_t *fair, fair_account_t *account) {
    if (!account->first && account->charged > fair->least) fair->least = account->charged;
    account->first = false;
}

void fair_end(fair_account_t *account, int64_t now_us, int64_t ran_us) {
    const int64_t share = account->share ? account->share : FAIR_SHARE;
    account->charged += ran_us * FAIR_SHARE / share;
    look(account, now_us);
    account->recent_us += (double)ran_us;
}

bool fair_makes_way(const fair_account_t *next, int64_t ran_us) {
    return next->first || ran_us >= FAIR_SLICE_US;
}

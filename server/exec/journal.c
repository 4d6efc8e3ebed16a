/* See journal.h. */
#include "server/exec/journal.h"

#include <stddef.h>

static gradd_status_t keep(const journal_entry_t *e) {
    return e->keep ? e->keep(e->on) : GRADD_OK;
}

static gradd_status_t fill_and_seal(const journal_entry_t *e) {
    GRADD_TRY(e->fill(e->on));
    GRADD_TRY(keep(e));
    GRADD_TRY(e->seal(e->on));
    return keep(e);
}

gradd_status_t journal_replace(const journal_entry_t *e, bool is_sealed) {
    if (!is_sealed) GRADD_TRY(fill_and_seal(e));
    if (!e->apply) return GRADD_OK;
    GRADD_TRY(e->apply(e->on));
    return keep(e);
}

/* The order in which a redo journal replaces values, whatever interrupts it: the new ones are
 * written beside the old ones, then the journal is sealed, then they are copied over the old ones.
 * Until the seal the old values are whole, from then on the new ones are.
 *
 * In memory that outlives the process the order of instructions is enough (the optimizer's step,
 * step.h). A disk forgets, reorders and tears what it was not told to keep: there `keep` stands
 * between the parts (a state in a file, train/files/lasting.h).
 */
#ifndef GRADD_SERVER_EXEC_JOURNAL_H
#define GRADD_SERVER_EXEC_JOURNAL_H

#include <stdbool.h>

#include "shm/status.h"

/* What is replaced at once. The functions get `on`. */
typedef struct journal_entry_s {
    void *on;
    gradd_status_t (*fill)(void *on);  /* writes the new values beside the old ones */
    gradd_status_t (*seal)(void *on);  /* says that they are there, in one write */
    gradd_status_t (*apply)(void *on); /* copies them; NULL where they count in their place */
    gradd_status_t (*keep)(void *on);  /* what was written stays, before anything after it is; NULL
                                        * where what is written stays */
} journal_entry_t;

/* `is_sealed`: an interrupted process has come so far, and the rest alone is done. Errors: those of
 * the functions; one that fails ends it. */
gradd_status_t journal_replace(const journal_entry_t *entry, bool is_sealed);

#endif

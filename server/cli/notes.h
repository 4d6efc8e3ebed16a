/* Notes of a kept session: what its process has said with its last step. */
#ifndef GRADD_SERVER_CLI_NOTES_H
#define GRADD_SERVER_CLI_NOTES_H

#include "server/host/rundir.h"
#include "server/wire/wire.h"

typedef struct notes_s {
    int64_t steps;  /* of the optimizer that are done */
    uint8_t *bytes; /* Owned: what `doc` points into */
    size_t n_bytes;
    wire_doc_t doc; /* the user's values: a map */
} notes_t;

/* A place of a manifest. */
typedef struct notes_at_s {
    uint64_t segment, offset; /* the segment's id; bytes */
} notes_at_t;

/* Where a manifest has notes. */
typedef struct notes_place_s {
    notes_at_t words, journal;
    bool has_journal;
    uint64_t slot; /* bytes of one of two */
} notes_place_t;

/* Reads the manifest, and the notes in the memory that it names (adapters/python/gradd/keeping.py
 * writes both). Fails with SHM if there are none that are true, or with IO. */
gradd_status_t notes_read(const rundir_t *dir, const char *name, notes_t *out_notes);
/* The two halves of that: what a manifest says, and the notes in the segments that it names, of
 * which the second is that of the journal (-1: there is none). Errors: SHM, NOMEM. */
gradd_status_t notes_find(int manifest, notes_place_t *out);
gradd_status_t notes_take(const int fds[2], const notes_place_t *place, notes_t *out_notes);
void notes_finish(notes_t *notes); /* accepts a zeroed one */

#endif

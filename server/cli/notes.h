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

/* Reads the manifest, and the notes in the memory that it names (adapters/python/gradd/keeping.py
 * writes both). Fails with SHM if there are none that are true, as in the middle of a step of an
 * optimizer of torch, or with IO. */
gradd_status_t notes_read(const rundir_t *dir, const char *name, notes_t *out_notes);
void notes_finish(notes_t *notes); /* accepts a zeroed one */

#endif

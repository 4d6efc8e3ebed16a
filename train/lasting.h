/* A state that lives in a file and survives a loss of power at any instruction.
 *
 * Steps change the state in memory. A commit replaces the state in the file as a whole, by the
 * order of a redo journal (server/exec/journal.h) with barriers between its parts: the values that
 * have changed go to places of the file that the latest commit does not use, behind them a table
 * that says where everything is; then a head names the table. Nothing is copied back: the places
 * take turns. What has not changed, as frozen parameters, stays where it is.
 *
 * The file, little-endian:
 *
 *     0, 4096   two heads, of the commits with even and with odd numbers; the later one counts
 *     8192      values and tables. What a commit writes lies side by side, tensors at multiples of
 *               64; it begins at a multiple of 4096, and shares no 4096 bytes with what is in use
 *
 * Heads and tables carry a hash. Values do not: a disk that says too early that it has kept
 * something is not found out.
 */
#ifndef GRADD_TRAIN_LASTING_H
#define GRADD_TRAIN_LASTING_H

#include "platform/platform.h"
#include "shm/hash.h"
#include "train/state.h"

#define LASTING_PAGE    4096               /* what a disk may spoil around a write */
#define LASTING_FIRST   (2 * LASTING_PAGE) /* where places begin */
#define LASTING_MAGIC   "GRADDSTA"
#define LASTING_VERSION 1
#define LASTING_TABLE   ((uint64_t)1 << 28) /* most bytes of one */

#define LASTING_PROPERTIES 16384 /* most; they are looked up one by one */

/* At offset 0 or 4096. */
typedef struct lasting_head_s {
    char magic[8];
    uint32_t version, bytes; /* of this struct */
    uint64_t number;         /* of the commit, from 1 */
    uint64_t table_at, table_bytes, table_hash;
    uint64_t zeros[1];
    uint64_t hash; /* of what stands before it */
} lasting_head_t;

/* Of heads and tables. */
static inline uint64_t lasting_hash(const void *bytes, size_t n) {
    return gradd_hash_bytes(GRADD_HASH_START, bytes, n);
}

/* Bytes of the file that are in use. */
typedef struct lasting_span_s {
    uint64_t at, end;
    int32_t parameter; /* -1 = the table */
    int32_t piece;     /* 0 = values, then moments */
} lasting_span_t;

/* What a state knows of its file. */
typedef struct lasting_s {
    const gradd_platform_t *on;
    gradd_file_t *file;
    char *path; /* Owned */
    int64_t commit_every;
    double commit_seconds;
    void *map; /* Owned: the file when it was opened, or NULL */
    size_t map_bytes;
    uint64_t number; /* of the latest commit */
    lasting_span_t table_span;
    bool doubtful; /* another may be in the file: nothing in it may be written to */
    /* Used again by each commit. */
    void *table;
    size_t table_room;
    lasting_span_t *spans;
    int span_room;
    /* Of the latest commit. */
    int64_t step, bytes;
    double ended, seconds;
} lasting_t;

/* lasting_open.c. `on`: the machine, which outlives the state. NULL in *out_state: there is no
 * file. Errors: those of gradd_train_open_state. */
gradd_status_t lasting_open(const gradd_platform_t *on, const char *path,
                            const gradd_train_lasting_t *options, gradd_train_state_t **out_state);
/* Writes the state, which is in memory alone, to a new file in place of what is there. */
gradd_status_t lasting_make(const gradd_platform_t *on, const char *path,
                            const gradd_train_lasting_t *options, gradd_train_state_t *state);
/* Accepts NULL. Its parameters are not used any more. */
void lasting_close(lasting_t *lasting);

/* lasting.c: what gradd_train_commit does; to a new file where there is none yet. */
gradd_status_t lasting_commit(gradd_train_state_t *state, lasting_t *lasting);
/* Nothing is committed where there is no file, or where it is not time. */
gradd_status_t lasting_commit_due(gradd_train_state_t *state);
/* Whether the path names the state's file. Accepts NULL. */
bool lasting_is_at(const lasting_t *lasting, const char *path);
/* Memory that commits use again: for a table, and for the spans of all pieces and the table.
 * Errors: NOMEM. */
gradd_status_t lasting_need_table(lasting_t *lasting, size_t bytes);
gradd_status_t lasting_need_spans(lasting_t *lasting, int n_parameters);

/* lasting_table.c: the state without its values. */
size_t lasting_table_bytes(const gradd_train_state_t *state);
/* With the next places of its values. */
void lasting_table_write(const gradd_train_state_t *state, void *to);
/* Adds what the table has to a new state, with places as the table says, and without values.
 * Errors: MODEL (says what is wrong with which parameter), LIMIT, UNSUPPORTED, NOMEM. */
gradd_status_t lasting_table_read(const void *bytes, size_t n, gradd_train_state_t *state);

/* lasting_room.c. Spans of all values, in no order; `out` has room for all pieces of all
 * parameters. Returns how many. */
int lasting_spans(const gradd_train_state_t *state, lasting_span_t *out);
/* Sorts them, and fails with MODEL where two overlap, or where one is not within the file. */
gradd_status_t lasting_check_spans(const gradd_train_state_t *state, lasting_span_t *spans, int n,
                                   uint64_t file_bytes);
/* The first place for so many bytes that shares no page with the spans, which it sorts. */
uint64_t lasting_find_room(lasting_span_t *spans, int n, uint64_t bytes);

#endif

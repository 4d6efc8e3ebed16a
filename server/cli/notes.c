/* See notes.h. */
#include "server/cli/notes.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/cli/owner_command.h"

#define MANIFEST_BYTES (16 << 20)
#define NOTES_BYTES    (64 << 20)
#define HEAD_BYTES     64 /* in front of the two slots, and of each slot */
#define CHUNK_BITS     24 /* of a journal's progress */
#define MAGIC          "GRADNOTE"

enum { WORD_MAGIC, WORD_WRITING, WORD_DONE, WORDS };
enum { SLOT_STEP, SLOT_BYTES };

/* ---- the manifest ---- */

/* [segment, offset, ...] */
static bool read_place(const msgpack_object *at, notes_at_t *out) {
    if (!at || at->type != MSGPACK_OBJECT_ARRAY || wire_count(at) < 2) return false;
    for (int i = 0; i < 2; i++)
        if (wire_at(at, i)->type != MSGPACK_OBJECT_POSITIVE_INTEGER) return false;
    *out = (notes_at_t){wire_at(at, 0)->via.u64, wire_at(at, 1)->via.u64};
    return out->offset <= INT64_MAX / 4;
}

static const msgpack_object *map_in(const msgpack_object *map, const char *key) {
    const msgpack_object *found = map ? wire_in(map, key) : NULL;
    return found && found->type == MSGPACK_OBJECT_MAP ? found : NULL;
}

static gradd_status_t find_places(const msgpack_object *manifest, notes_place_t *out) {
    const msgpack_object *notes = map_in(manifest, "notes");
    const msgpack_object *journal = map_in(map_in(manifest, "optimizer"), "journal");
    const msgpack_object *slot = notes ? wire_in(notes, "slot") : NULL;
    if (!slot || slot->type != MSGPACK_OBJECT_POSITIVE_INTEGER || slot->via.u64 > NOTES_BYTES ||
        !read_place(wire_in(notes, "at"), &out->words))
        return GRADD_FAIL(SHM, "the manifest of the session names no notes");
    out->slot = slot->via.u64;
    out->has_journal = journal && read_place(wire_in(journal, "at"), &out->journal);
    return GRADD_OK;
}

gradd_status_t notes_find(int fd, notes_place_t *out) {
    struct stat info;
    wire_doc_t doc = {0};
    if (fstat(fd, &info) != 0 || info.st_size > MANIFEST_BYTES)
        return GRADD_FAIL(SHM, "the manifest of the session is too long");
    uint8_t *bytes = malloc((size_t)info.st_size + 1);
    if (!bytes) return GRADD_FAIL(NOMEM, "no memory for a manifest");
    const ssize_t n = pread(fd, bytes, (size_t)info.st_size, 0);
    gradd_status_t st = n > 0 ? wire_decode_any(bytes, (size_t)n, WIRE_MAX_ITEMS, &doc)
                              : GRADD_FAIL(SHM, "the manifest of the session is empty");
    if (st == GRADD_OK)
        st = doc.root.type == MSGPACK_OBJECT_MAP ? find_places(&doc.root, out)
                                                 : GRADD_FAIL(SHM, "the manifest is no map");
    wire_doc_finish(&doc);
    free(bytes);
    return st;
}

/* ---- the memory ---- */

static bool read_words(int fd, uint64_t offset, int64_t *words, size_t n) {
    return pread(fd, words, n * sizeof *words, (off_t)offset) == (ssize_t)(n * sizeof *words);
}

static gradd_status_t read_slot(int fd, const notes_place_t *place, int64_t steps, notes_t *notes) {
    const uint64_t at =
        place->words.offset + HEAD_BYTES + (uint64_t)(steps % 2) * (HEAD_BYTES + place->slot);
    int64_t before[2], after[2];
    if (!read_words(fd, at, before, 2) || before[SLOT_STEP] != steps || before[SLOT_BYTES] <= 0 ||
        (uint64_t)before[SLOT_BYTES] > place->slot)
        return GRADD_FAIL(SHM, "there are no notes of step %lld", (long long)steps);
    const size_t n = (size_t)before[SLOT_BYTES];
    notes->bytes = malloc(n);
    if (!notes->bytes) return GRADD_FAIL(NOMEM, "no memory for notes");
    const bool whole = pread(fd, notes->bytes, n, (off_t)(at + HEAD_BYTES)) == (ssize_t)n;
    /* The process that writes them does not wait for us. */
    if (!whole || !read_words(fd, at, after, 2) || memcmp(before, after, sizeof after) != 0)
        return GRADD_FAIL(SHM, "the notes are being written");
    notes->steps = steps;
    notes->n_bytes = n;
    return GRADD_OK;
}

/* The user's values are packed for themselves. */
static gradd_status_t decode(notes_t *notes, size_t bytes) {
    wire_doc_t all = {0};
    GRADD_TRY(wire_decode_any(notes->bytes, bytes, WIRE_MAX_ITEMS, &all));
    const msgpack_object *user =
        all.root.type == MSGPACK_OBJECT_MAP ? wire_in(&all.root, "user") : NULL;
    gradd_status_t st = GRADD_FAIL(SHM, "the notes have no values");
    if (user && user->type == MSGPACK_OBJECT_BIN)
        st = wire_decode_any(user->via.bin.ptr, user->via.bin.size, WIRE_MAX_ITEMS, &notes->doc);
    wire_doc_finish(&all);
    return st;
}

static gradd_status_t count_steps(int fd, const notes_place_t *place, int journal,
                                  int64_t *out_steps) {
    int64_t words[WORDS], progress;
    if (!read_words(fd, place->words.offset, words, WORDS) ||
        memcmp(&words[WORD_MAGIC], MAGIC, sizeof words[0]) != 0)
        return GRADD_FAIL(SHM, "the notes of the session are none");
    *out_steps = words[WORD_DONE];
    if (place->has_journal) {
        if (!read_words(journal, place->journal.offset + sizeof progress, &progress, 1))
            return GRADD_FAIL(SHM, "the session has no journal");
        *out_steps = progress >> CHUNK_BITS;
    }
    /* -1 is that of a slot that is being written. */
    return *out_steps >= 0 ? GRADD_OK
                           : GRADD_FAIL(SHM, "%lld steps are none", (long long)*out_steps);
}

/* Descriptors of the two segments; -1: not found yet. */
static gradd_status_t find_memory(kept_look_t *look, uint32_t n, const notes_place_t *place,
                                  int fds[2]) {
    for (uint64_t at = 1; at <= n; at++) {
        kept_part_t part;
        GRADD_TRY(kept_part(look, at, &part));
        const bool is_words = part.id == place->words.segment;
        const bool is_journal = place->has_journal && part.id == place->journal.segment;
        if (is_words && fds[0] < 0) fds[0] = dup(part.fd);
        if (is_journal && fds[1] < 0) fds[1] = dup(part.fd);
        close(part.fd);
    }
    if (fds[0] < 0 || (place->has_journal && fds[1] < 0))
        return GRADD_FAIL(SHM, "the notes of the session lie in no segment of it");
    return GRADD_OK;
}

static gradd_status_t take(const int fds[2], const notes_place_t *place, notes_t *notes) {
    int64_t steps = 0;
    GRADD_TRY(count_steps(fds[0], place, fds[1], &steps));
    GRADD_TRY(read_slot(fds[0], place, steps, notes));
    return decode(notes, notes->n_bytes);
}

gradd_status_t notes_take(const int fds[2], const notes_place_t *place, notes_t *out_notes) {
    *out_notes = (notes_t){0};
    const gradd_status_t st = take(fds, place, out_notes);
    if (st != GRADD_OK) notes_finish(out_notes);
    return st;
}

static gradd_status_t find(kept_look_t *look, notes_place_t *place, int fds[2]) {
    kept_part_t manifest;
    GRADD_TRY(kept_part(look, 0, &manifest));
    const gradd_status_t st = notes_find(manifest.fd, place);
    close(manifest.fd);
    return st == GRADD_OK ? find_memory(look, manifest.n_segments, place, fds) : st;
}

gradd_status_t notes_read(const rundir_t *dir, const char *name, notes_t *out_notes) {
    static kept_look_t look; /* large */
    int fds[2] = {-1, -1};
    notes_place_t place = {0};
    *out_notes = (notes_t){0};
    GRADD_TRY(kept_open(dir, name, &look));
    gradd_status_t st = find(&look, &place, fds);
    kept_close(&look);
    if (st == GRADD_OK) st = notes_take(fds, &place, out_notes);
    for (int i = 0; i < 2; i++)
        if (fds[i] >= 0) close(fds[i]);
    return st;
}

void notes_finish(notes_t *notes) {
    wire_doc_finish(&notes->doc);
    free(notes->bytes);
    *notes = (notes_t){0};
}

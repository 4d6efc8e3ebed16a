/* The table of a client's segments and the checks on names that come in messages.
 *
 * A table is a small array searched in order: a client has a handful of segments, or, where a model
 * takes many GiB, some hundreds, so a hash would cost more than it saves. All arithmetic on client
 * numbers is written as "is the rest large enough", never as a sum that could wrap.
 */
#include "shm/handle.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct handle_entry_s {
    uint64_t id;
    gradd_segment_t segment; /* Owned */
    uint64_t n_uses;
} handle_entry_t;

struct gradd_handle_table_s {
    pthread_mutex_t lock; /* guards everything below */
    gradd_handle_limits_t limits;
    handle_entry_t *entries; /* Owned, in order of arrival */
    uint32_t n_entries;
    uint32_t capacity;
    uint64_t bytes; /* sum of all entries */
    bool closed;
};

gradd_status_t gradd_handle_table_create(gradd_handle_limits_t limits,
                                         gradd_handle_table_t **out_table) {
    gradd_handle_table_t *table = calloc(1, sizeof *table);
    if (!table) return GRADD_FAIL(NOMEM, "no memory for a table of segments");
    table->limits = limits;
    pthread_mutex_init(&table->lock, NULL);
    *out_table = table;
    return GRADD_OK;
}

void gradd_handle_table_destroy(gradd_handle_table_t *table) {
    if (!table) return;
    for (uint32_t i = 0; i < table->n_entries; i++)
        gradd_segment_finish(&table->entries[i].segment);
    free(table->entries);
    pthread_mutex_destroy(&table->lock);
    free(table);
}

/* ---- under the lock ---- */

static handle_entry_t *find(gradd_handle_table_t *table, uint64_t id) {
    for (uint32_t i = 0; i < table->n_entries; i++)
        if (table->entries[i].id == id) return &table->entries[i];
    return NULL;
}

static gradd_status_t find_open(gradd_handle_table_t *table, uint64_t id,
                                handle_entry_t **out_entry) {
    if (table->closed)
        return GRADD_FAIL(STALE, "the client of segment %llu is gone", (unsigned long long)id);
    *out_entry = find(table, id);
    if (!*out_entry) return GRADD_FAIL(SHM, "unknown segment %llu", (unsigned long long)id);
    return GRADD_OK;
}

/* The caller ends it without the lock: a device takes long to unmap. */
static gradd_segment_t take_out(gradd_handle_table_t *table, handle_entry_t *entry) {
    const handle_entry_t *end = table->entries + table->n_entries;
    const gradd_segment_t taken = entry->segment;
    table->bytes -= taken.bytes;
    memmove(entry, entry + 1, (size_t)(end - entry - 1) * sizeof *entry);
    table->n_entries--;
    return taken;
}

static gradd_status_t grow(gradd_handle_table_t *table) {
    uint32_t capacity = table->capacity ? 2 * table->capacity : 8;
    if (table->n_entries < table->capacity) return GRADD_OK;
    if (capacity < table->capacity) return GRADD_FAIL(LIMIT, "too many segments");
    handle_entry_t *entries = realloc(table->entries, capacity * sizeof *entries);
    if (!entries) return GRADD_FAIL(NOMEM, "no memory for a table of %u segments", capacity);
    table->entries = entries;
    table->capacity = capacity;
    return GRADD_OK;
}

static gradd_status_t check_limits(const gradd_handle_table_t *table, uint64_t bytes) {
    if (table->limits.segments && table->n_entries >= table->limits.segments)
        return GRADD_FAIL(LIMIT, "at most %u segments per session", table->limits.segments);
    if (bytes > UINT64_MAX - table->bytes)
        return GRADD_FAIL(LIMIT, "the sizes of all segments overflow");
    if (table->limits.bytes && table->bytes + bytes > table->limits.bytes)
        return GRADD_FAIL(LIMIT, "%llu bytes in segments, at most %llu per session",
                          (unsigned long long)(table->bytes + bytes),
                          (unsigned long long)table->limits.bytes);
    return GRADD_OK;
}

/* Under two ids, ranges would overlap of which no check knows. */
static gradd_status_t check_new(const gradd_handle_table_t *table, const gradd_segment_t *segment) {
    for (uint32_t i = 0; i < table->n_entries && segment->inode; i++) {
        const handle_entry_t *entry = &table->entries[i];
        if (entry->segment.inode == segment->inode && entry->segment.device == segment->device)
            return GRADD_FAIL(SHM, "its memory is segment %llu already",
                              (unsigned long long)entry->id);
    }
    return GRADD_OK;
}

static gradd_status_t add_locked(gradd_handle_table_t *table, uint64_t id,
                                 gradd_segment_t *segment) {
    if (table->closed) return GRADD_FAIL(STALE, "the client is gone");
    if (find(table, id))
        return GRADD_FAIL(SHM, "segment %llu exists already", (unsigned long long)id);
    GRADD_TRY(check_new(table, segment));
    GRADD_TRY(check_limits(table, segment->bytes));
    GRADD_TRY(grow(table));
    table->entries[table->n_entries++] = (handle_entry_t){.id = id, .segment = *segment};
    table->bytes += segment->bytes;
    *segment = (gradd_segment_t)GRADD_SEGMENT_INIT;
    return GRADD_OK;
}

static gradd_status_t remove_locked(gradd_handle_table_t *table, uint64_t id,
                                    gradd_segment_t *out_segment) {
    handle_entry_t *entry;
    GRADD_TRY(find_open(table, id, &entry));
    if (entry->n_uses)
        return GRADD_FAIL(STALE, "segment %llu is in use (%llu times)", (unsigned long long)id,
                          (unsigned long long)entry->n_uses);
    *out_segment = take_out(table, entry);
    return GRADD_OK;
}

static gradd_status_t resolve_locked(gradd_handle_table_t *table, uint64_t id, uint64_t offset,
                                     uint64_t bytes, uint64_t align, void **out_address) {
    handle_entry_t *entry;
    GRADD_TRY(find_open(table, id, &entry));
    uint64_t size = entry->segment.bytes;
    if (offset > size || bytes > size - offset)
        return GRADD_FAIL(TENSOR, "%llu bytes at offset %llu of segment %llu, which has %llu bytes",
                          (unsigned long long)bytes, (unsigned long long)offset,
                          (unsigned long long)id, (unsigned long long)size);
    if (offset < entry->segment.header_bytes)
        return GRADD_FAIL(TENSOR, "offset %llu of segment %llu lies in its header of %u bytes",
                          (unsigned long long)offset, (unsigned long long)id,
                          (unsigned)entry->segment.header_bytes);
    if (align && offset % align)
        return GRADD_FAIL(TENSOR, "offset %llu of segment %llu is not a multiple of %llu",
                          (unsigned long long)offset, (unsigned long long)id,
                          (unsigned long long)align);
    if (!entry->segment.base)
        return GRADD_FAIL(STALE, "segment %llu is not mapped", (unsigned long long)id);
    *out_address = (char *)entry->segment.base + offset;
    return GRADD_OK;
}

/* ---- the interface: take the lock, do it, leave ---- */

gradd_status_t gradd_handle_add(gradd_handle_table_t *table, uint64_t id,
                                gradd_segment_t *segment) {
    pthread_mutex_lock(&table->lock);
    gradd_status_t status = add_locked(table, id, segment);
    pthread_mutex_unlock(&table->lock);
    return status;
}

gradd_status_t gradd_handle_remove(gradd_handle_table_t *table, uint64_t id) {
    gradd_segment_t removed = GRADD_SEGMENT_INIT;
    pthread_mutex_lock(&table->lock);
    gradd_status_t status = remove_locked(table, id, &removed);
    pthread_mutex_unlock(&table->lock);
    gradd_segment_finish(&removed);
    return status;
}

gradd_status_t gradd_handle_retain(gradd_handle_table_t *table, uint64_t id) {
    handle_entry_t *entry;
    pthread_mutex_lock(&table->lock);
    gradd_status_t status = find_open(table, id, &entry);
    if (status == GRADD_OK) entry->n_uses++;
    pthread_mutex_unlock(&table->lock);
    return status;
}

void gradd_handle_release(gradd_handle_table_t *table, uint64_t id) {
    gradd_segment_t unused = GRADD_SEGMENT_INIT;
    pthread_mutex_lock(&table->lock);
    handle_entry_t *entry = find(table, id);
    if (entry && entry->n_uses) entry->n_uses--;
    if (entry && !entry->n_uses && table->closed) unused = take_out(table, entry);
    pthread_mutex_unlock(&table->lock);
    gradd_segment_finish(&unused);
}

void gradd_handle_close(gradd_handle_table_t *table) {
    bool found;
    do {
        gradd_segment_t unused = GRADD_SEGMENT_INIT;
        pthread_mutex_lock(&table->lock);
        table->closed = true;
        uint32_t i = table->n_entries;
        while (i > 0 && table->entries[i - 1].n_uses)
            i--;
        found = i > 0;
        if (found) unused = take_out(table, &table->entries[i - 1]);
        pthread_mutex_unlock(&table->lock);
        gradd_segment_finish(&unused);
    } while (found);
}

gradd_status_t gradd_handle_resolve(gradd_handle_table_t *table, uint64_t id, uint64_t offset,
                                    uint64_t bytes, uint64_t align, void **out_address) {
    pthread_mutex_lock(&table->lock);
    gradd_status_t status = resolve_locked(table, id, offset, bytes, align, out_address);
    pthread_mutex_unlock(&table->lock);
    return status;
}

gradd_status_t gradd_handle_tensor(gradd_handle_table_t *table, const gradd_tensor_t *tensor,
                                   void **out_address) {
    GRADD_TRY(gradd_type_check(&tensor->type));
    return gradd_handle_resolve(table, tensor->segment, tensor->offset,
                                (uint64_t)gradd_type_bytes(&tensor->type), GRADD_TENSOR_ALIGN,
                                out_address);
}

void gradd_handle_usage(gradd_handle_table_t *table, uint32_t *out_segments, uint64_t *out_bytes) {
    pthread_mutex_lock(&table->lock);
    *out_segments = table->n_entries;
    *out_bytes = table->bytes;
    pthread_mutex_unlock(&table->lock);
}

void gradd_handle_purpose_bytes(gradd_handle_table_t *table,
                                uint64_t out_bytes[GRADD_N_SEGMENT_PURPOSES]) {
    for (int i = 0; i < GRADD_N_SEGMENT_PURPOSES; i++)
        out_bytes[i] = 0;
    pthread_mutex_lock(&table->lock);
    for (uint32_t i = 0; i < table->n_entries; i++)
        out_bytes[table->entries[i].segment.purpose] += table->entries[i].segment.bytes;
    pthread_mutex_unlock(&table->lock);
}

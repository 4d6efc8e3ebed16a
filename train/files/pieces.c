/* See pieces.h. */
#include "train/files/pieces.h"

#include <stdlib.h>
#include <string.h>

#include "platform/platform.h"

enum { BYTES = 2 }; /* wire type of what has a length */

void pieces_finish(pieces_t *pieces) {
    free(pieces->list);
    free(pieces->own);
    *pieces = (pieces_t){0};
}

static void add(pieces_t *pieces, file_piece_t piece) {
    if (piece.n == 0 || pieces->failed) return;
    file_piece_t *last = pieces->n ? &pieces->list[pieces->n - 1] : NULL;
    pieces->bytes += piece.n;
    if (last && !last->data && !piece.data && last->at + last->n == piece.at) {
        last->n += piece.n;
        return;
    }
    if (pieces->n == pieces->room) {
        const int room = pieces->room * 2 + 16;
        file_piece_t *list = realloc(pieces->list, (size_t)room * sizeof *list);
        pieces->failed = !list;
        if (!list) return;
        pieces->list = list;
        pieces->room = room;
    }
    pieces->list[pieces->n++] = piece;
}

void pieces_refer(pieces_t *pieces, const void *data, size_t n) {
    add(pieces, (file_piece_t){.data = data, .n = n});
}

void pieces_copy(pieces_t *pieces, const void *data, size_t n) {
    if (n == 0 || pieces->failed) return;
    if (n > pieces->own_room - pieces->own_n) {
        const size_t room = pieces->own_n + pieces->own_n / 2 + n + 256;
        uint8_t *own = realloc(pieces->own, room);
        pieces->failed = !own;
        if (!own) return;
        pieces->own = own;
        pieces->own_room = room;
    }
    memcpy(pieces->own + pieces->own_n, data, n);
    add(pieces, (file_piece_t){.at = pieces->own_n, .n = n});
    pieces->own_n += n;
}

void pieces_take(pieces_t *pieces, pieces_t *other) {
    for (int i = 0; i < other->n; i++) {
        const file_piece_t *piece = &other->list[i];
        if (piece->data)
            pieces_refer(pieces, piece->data, piece->n);
        else
            pieces_copy(pieces, other->own + piece->at, piece->n);
    }
    pieces->failed = pieces->failed || other->failed;
    pieces_finish(other);
}

static void put_varint(pieces_t *pieces, uint64_t value) {
    uint8_t bytes[10];
    size_t n = 0;
    for (; value > 0x7f; value >>= 7)
        bytes[n++] = (uint8_t)(value | 0x80);
    bytes[n++] = (uint8_t)value;
    pieces_copy(pieces, bytes, n);
}

void pieces_number(pieces_t *pieces, uint32_t id, uint64_t number) {
    put_varint(pieces, (uint64_t)id << 3);
    put_varint(pieces, number);
}

void pieces_head(pieces_t *pieces, uint32_t id, size_t bytes) {
    put_varint(pieces, (uint64_t)id << 3 | BYTES);
    put_varint(pieces, bytes);
}

void pieces_bytes(pieces_t *pieces, uint32_t id, const void *data, size_t n) {
    pieces_head(pieces, id, n);
    pieces_refer(pieces, data, n);
}

gradd_status_t pieces_write(const pieces_t *pieces, const char *path) {
    gradd_file_part_t *parts =
        pieces->failed ? NULL : malloc(((size_t)pieces->n + 1) * sizeof *parts);
    if (!parts) return GRADD_FAIL(NOMEM, "no memory for the parts of '%s'", path);
    gradd_status_t status;
    for (int i = 0; i < pieces->n; i++) {
        const file_piece_t *piece = &pieces->list[i];
        parts[i] =
            (gradd_file_part_t){piece->data ? piece->data : pieces->own + piece->at, piece->n};
    }
    if (pieces->bytes > INT32_MAX)
        status = GRADD_FAIL(LIMIT, "'%s' would have %zu bytes: a model of ONNX ends at 2 GiB", path,
                            pieces->bytes);
    else
        status = gradd_platform.write_file(path, parts, pieces->n);
    free(parts);
    return status;
}

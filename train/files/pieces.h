/* A file in the making: pieces that lie in other memory, and small ones of its own between them. */
#ifndef GRADD_TRAIN_FILES_PIECES_H
#define GRADD_TRAIN_FILES_PIECES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shm/status.h"
#include "train/files/proto.h"

typedef struct file_piece_s {
    const void *data; /* Borrowed; NULL = own bytes from `at` */
    size_t at, n;
} file_piece_t;

typedef struct pieces_s {
    file_piece_t *list; /* Owned */
    int n, room;
    uint8_t *own; /* Owned */
    size_t own_n, own_room;
    size_t bytes; /* of all */
    bool failed;  /* there is no memory: what follows is left out */
} pieces_t;

void pieces_finish(pieces_t *pieces);
/* Bytes that outlive the pieces. */
void pieces_refer(pieces_t *pieces, const void *data, size_t n);
/* Bytes that are copied. */
void pieces_copy(pieces_t *pieces, const void *data, size_t n);
/* All of another; it is empty afterwards. */
void pieces_take(pieces_t *pieces, pieces_t *other);
/* Fields of protobuf: a number; the head of one with so many bytes; one with bytes to refer to. */
void pieces_number(pieces_t *pieces, uint32_t id, uint64_t number);
void pieces_head(pieces_t *pieces, uint32_t id, size_t bytes);
void pieces_bytes(pieces_t *pieces, uint32_t id, const void *data, size_t n);
/* Writes the file. Errors: LIMIT (protobuf ends at 2 GiB), IO, NOMEM. */
gradd_status_t pieces_write(const pieces_t *pieces, const char *path);

#endif

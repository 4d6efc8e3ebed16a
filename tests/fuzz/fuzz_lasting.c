/* libFuzzer target: any bytes as a state in a file. The first byte says what the others are: the
 * whole file, the table of one whose heads are right, or changes of such a table. A state that
 * opens is walked, committed to the same file, and opened again: it is the same.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/target.h"
#include "train/lasting.h"

enum { FILE_BYTES, TABLE_BYTES, EDITS }; /* the first byte; EDITS and all others */
enum { MOST = 1 << 20, VALUES = LASTING_PAGE, TABLE_AT = LASTING_FIRST + VALUES };

/* ---- a file in memory ------------------------------------------------------------------------ */

struct gradd_file_s {
    uint8_t bytes[MOST];
    size_t n;
};

static gradd_file_t the_file;

static gradd_status_t open_file(const char *path, bool fresh, gradd_file_t **out_file) {
    (void)path, (void)fresh;
    *out_file = &the_file;
    return GRADD_OK;
}

static void close_file(gradd_file_t *file, bool remove) {
    (void)file, (void)remove;
}

static gradd_status_t file_bytes(gradd_file_t *file, uint64_t *out_bytes) {
    *out_bytes = file->n;
    return GRADD_OK;
}

static gradd_status_t read_at(gradd_file_t *file, uint64_t at, void *to, size_t n) {
    REQUIRE(at <= file->n && n <= file->n - at);
    memcpy(to, file->bytes + at, n);
    return GRADD_OK;
}

static gradd_status_t write_at(gradd_file_t *file, uint64_t at, const void *from, size_t n) {
    REQUIRE(at <= MOST && n <= MOST - at);
    memcpy(file->bytes + at, from, n);
    if (at + n > file->n) file->n = at + n;
    return GRADD_OK;
}

static gradd_status_t keep(gradd_file_t *file) {
    (void)file;
    return GRADD_OK;
}

/* A copy: what is written to the file later does not show, which is allowed. */
static gradd_status_t map_file(gradd_file_t *file, size_t bytes, void **out_memory) {
    REQUIRE(bytes == file->n);
    *out_memory = malloc(bytes);
    REQUIRE(*out_memory);
    memcpy(*out_memory, file->bytes, bytes);
    return GRADD_OK;
}

static void unmap_file(void *memory, size_t bytes) {
    (void)bytes;
    free(memory);
}

static double seconds(void) {
    return 0;
}

static const gradd_platform_t in_memory = {
    .seconds = seconds,
    .open_file = open_file,
    .close_file = close_file,
    .file_bytes = file_bytes,
    .read_at = read_at,
    .write_at = write_at,
    .keep = keep,
    .map_file = map_file,
    .unmap_file = unmap_file,
};

/* ---- files ----------------------------------------------------------------------------------- */

static void make_file(const uint8_t *table, size_t n) {
    gradd_file_t *f = &the_file;
    memset(f->bytes, 0, LASTING_FIRST);
    memset(f->bytes + LASTING_FIRST, 7, VALUES);
    if (n) memcpy(f->bytes + TABLE_AT, table, n);
    f->n = TABLE_AT + n;
    lasting_head_t head = {.version = LASTING_VERSION,
                           .bytes = sizeof head,
                           .number = 1,
                           .table_at = TABLE_AT,
                           .table_bytes = n,
                           .table_hash = lasting_hash(f->bytes + TABLE_AT, n)};
    memcpy(head.magic, LASTING_MAGIC, sizeof head.magic);
    head.hash = lasting_hash(&head, offsetof(lasting_head_t, hash));
    memcpy(f->bytes + LASTING_PAGE, &head, sizeof head);
}

static gradd_status_t open_it(gradd_train_state_t **out_state) {
    static const gradd_train_lasting_t never = {.commit_every = INT64_MAX};
    gradd_error_set("");
    const gradd_status_t status = lasting_open(&in_memory, "state", &never, out_state);
    REQUIRE(status == GRADD_OK || gradd_error_message()[0]);
    REQUIRE(status == GRADD_OK || status == GRADD_E_MODEL || status == GRADD_E_LIMIT ||
            status == GRADD_E_VERSION || status == GRADD_E_UNSUPPORTED);
    return status;
}

static void compare(const gradd_train_state_t *a, const gradd_train_state_t *b) {
    REQUIRE(a->n_parameters == b->n_parameters && a->n_properties == b->n_properties);
    for (int i = 0; i < a->n_parameters; i++) {
        const train_parameter_t *p = &a->parameters[i], *q = &b->parameters[i];
        REQUIRE(!strcmp(p->name, q->name) && gradd_type_equal(&p->type, &q->type));
        REQUIRE(p->steps == q->steps && p->trainable == q->trainable);
        for (int k = 0; k < STATE_PIECES; k++) {
            const void *x = state_piece(p, k), *y = state_piece(q, k);
            REQUIRE(!x == !y);
            REQUIRE(!x || !memcmp(x, y, (size_t)state_piece_bytes(p, k)));
        }
    }
    for (int i = 0; i < a->n_properties; i++)
        REQUIRE(!strcmp(a->properties[i].name, b->properties[i].name) &&
                !strcmp(a->properties[i].text, b->properties[i].text));
    REQUIRE(a->progress.position == b->progress.position);
}

static gradd_train_state_t *make_state(void) {
    static const float values[6] = {1, 2, 3, 4, 5, 6};
    const gradd_type_t type = {
        .dtype = GRADD_DT_F32, .rank = 2, .dims = {2, 3}
    };
    const gradd_type_t nominal = {.dtype = GRADD_DT_F32, .rank = -1};
    const gradd_train_property_t note = {"note", GRADD_TRAIN_TEXT, 0, 0, "a text"};
    gradd_train_state_t *state;
    REQUIRE(gradd_train_state_create(&state) == GRADD_OK);
    REQUIRE(gradd_train_state_add(state, "frozen", &type, values, false) == GRADD_OK);
    REQUIRE(gradd_train_state_add(state, "w", &type, values, true) == GRADD_OK);
    REQUIRE(gradd_train_state_add(state, "later", &nominal, NULL, true) == GRADD_OK);
    REQUIRE(gradd_train_state_set_moment(state, 1, 0, values) == GRADD_OK);
    REQUIRE(gradd_train_state_set_moment(state, 1, 1, values) == GRADD_OK);
    REQUIRE(gradd_train_state_set_property(state, &note) == GRADD_OK);
    return state;
}

static uint8_t table[4096];
static size_t table_bytes;

static void make_table(void) {
    gradd_train_state_t *state = make_state();
    uint64_t at = LASTING_FIRST;
    for (int i = 0; i < state->n_parameters; i++)
        for (int k = 0; k < STATE_PIECES; k++, at += GRADD_TENSOR_ALIGN)
            state->parameters[i].places.next[k] = state_piece(&state->parameters[i], k) ? at : 0;
    table_bytes = lasting_table_bytes(state);
    REQUIRE(table_bytes <= sizeof table);
    lasting_table_write(state, table);
    gradd_train_state_destroy(state);
}

/* The table with numbers that might be there in the place of others, each named by three bytes:
 * blind changes seldom leave a state that opens. */
static void edit_table(uint8_t *edited, const uint8_t *edits, size_t n) {
    static const uint64_t numbers[] = {0,    1,        2,          3,          4,          6,
                                       7,    11,       24,         8192,       8256,       8320,
                                       8384, 8448,     8512,       12224,      12288,      12352,
                                       9999, 1u << 31, 1ull << 32, 1ull << 62, 1ull << 63, -1ull};
    memcpy(edited, table, table_bytes);
    for (size_t i = 0; i + 3 <= n && i < 12; i += 3) {
        const size_t bytes = edits[i + 2] & 0x80 ? 8 : 4;
        const size_t at = (edits[i] | (size_t)edits[i + 1] << 8) % (table_bytes / bytes) * bytes;
        memcpy(edited + at, &numbers[(edits[i + 2] & 0x7f) % (sizeof numbers / 8)], bytes);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    gradd_train_state_t *state, *again;
    if (!n || n > MOST / 4) return 0;
    if (data[0] == FILE_BYTES) {
        the_file.n = n - 1;
        memcpy(the_file.bytes, data + 1, n - 1);
    } else if (data[0] == TABLE_BYTES) {
        make_file(data + 1, n - 1);
    } else {
        uint8_t edited[sizeof table];
        edit_table(edited, data + 1, n - 1);
        make_file(edited, table_bytes);
    }
    if (open_it(&state)) return 0;
    REQUIRE(gradd_train_commit(state) == GRADD_OK);
    REQUIRE(open_it(&again) == GRADD_OK);
    compare(state, again);
    gradd_train_state_destroy(again);
    gradd_train_state_destroy(state);
    return 0;
}

/* ---- seeds ----------------------------------------------------------------------------------- */

static void write_seed(const char *folder, int i, uint8_t kind, const uint8_t *bytes, size_t n) {
    char path[4096];
    snprintf(path, sizeof path, "%s/seed_%d", folder, i);
    FILE *file = fopen(path, "wb");
    REQUIRE(file && fputc(kind, file) == kind && fwrite(bytes, 1, n, file) == n &&
            fclose(file) == 0);
}

static void write_seeds(const char *folder) {
    gradd_train_state_t *state;
    static const uint8_t edits[12];
    write_seed(folder, 0, TABLE_BYTES, table, table_bytes);
    make_file(table, table_bytes);
    write_seed(folder, 1, FILE_BYTES, the_file.bytes, the_file.n);
    for (int i = 1; i < 5; i++)
        write_seed(folder, 1 + i, EDITS, edits, (size_t)i * 3);
    REQUIRE(open_it(&state) == GRADD_OK); /* it is one */
    gradd_train_state_destroy(state);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    const char *folder = getenv("GRADD_FUZZ_SEEDS");
    make_table();
    if (!folder) return 0;
    write_seeds(folder);
    exit(0);
}

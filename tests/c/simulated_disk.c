/* See simulated_disk.h. */
#include "tests/c/simulated_disk.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/test.h"

enum { SECTOR = 512, MOST_FILES = 64, MOST_NAME = 64 };

typedef enum operation_kind_e { CREATE, WRITE, KEEP, RENAME, KEEP_NAMES } operation_kind_t;

typedef struct operation_s {
    operation_kind_t kind;
    int file;
    uint64_t at;
    size_t n;
    char *data;           /* Owned: WRITE */
    char name[MOST_NAME]; /* CREATE, RENAME */
} operation_t;

struct disk_record_s {
    operation_t *operations; /* Owned */
    int n, room;
};

/* A file and its name, "" = it has none. What is mapped of it is what Linux makes of that. */
struct gradd_file_s {
    int fd;
    char name[MOST_NAME];
};

static gradd_file_t files[MOST_FILES];
static int n_files, n_keeps, failing = -1, killed = -1;
static disk_record_t *record;
static bool (*is_forgotten)(int number);

/* ---- records --------------------------------------------------------------------------------- */

static operation_t *recorded(operation_kind_t kind, const gradd_file_t *file) {
    if (!record) record = calloc(1, sizeof *record);
    if (record->n == record->room) {
        record->room = record->room * 2 + 64;
        record->operations =
            realloc(record->operations, sizeof record->operations[0] * (size_t)record->room);
    }
    operation_t *made = &record->operations[record->n++];
    *made = (operation_t){.kind = kind, .file = (int)(file - files)};
    return made;
}

int disk_operations(void) {
    return record ? record->n : 0;
}

disk_record_t *disk_take_record(void) {
    disk_record_t *taken = record;
    record = NULL;
    disk_format();
    return taken;
}

void disk_record_free(disk_record_t *r) {
    for (int i = 0; i < r->n; i++)
        free(r->operations[i].data);
    free(r->operations);
    free(r);
}

void disk_forget(bool (*function)(int number)) {
    is_forgotten = function;
}

void disk_kill(int operation) {
    killed = operation;
}

static gradd_status_t check_alive(void) {
    if (killed < 0 || disk_operations() < killed) return GRADD_OK;
    return GRADD_FAIL(IO, "the process is dead");
}

void disk_fail(int number) {
    failing = number;
}

/* ---- files ----------------------------------------------------------------------------------- */

static gradd_file_t *make_file(const char *name) {
    CHECK(n_files < MOST_FILES && strlen(name) < MOST_NAME);
    gradd_file_t *file = &files[n_files++];
    file->fd = memfd_create("disk", MFD_CLOEXEC);
    CHECK(file->fd >= 0);
    strcpy(file->name, name);
    return file;
}

void disk_format(void) {
    for (int i = 0; i < n_files; i++)
        close(files[i].fd);
    n_files = n_keeps = 0;
    if (record) disk_record_free(record);
    record = NULL;
}

static gradd_file_t *find_file(const char *name) {
    for (int i = 0; i < n_files; i++)
        if (!strcmp(files[i].name, name)) return &files[i];
    return NULL;
}

static gradd_file_t *named(const char *name, gradd_file_t *file) {
    gradd_file_t *old = find_file(name);
    if (old) old->name[0] = 0;
    strcpy(file->name, name);
    return file;
}

static gradd_status_t open_file(const char *path, bool fresh, gradd_file_t **out_file) {
    gradd_file_t *file = fresh ? NULL : find_file(path);
    GRADD_TRY(check_alive());
    if (fresh) {
        file = named(path, make_file(""));
        strcpy(recorded(CREATE, file)->name, path);
    } else if (file) {
        recorded(KEEP_NAMES, file);
    }
    *out_file = file;
    return GRADD_OK;
}

static void close_file(gradd_file_t *file, bool remove) {
    if (file && remove && !check_alive()) file->name[0] = 0;
}

static gradd_status_t file_bytes(gradd_file_t *file, uint64_t *out_bytes) {
    *out_bytes = (uint64_t)lseek(file->fd, 0, SEEK_END);
    return GRADD_OK;
}

static gradd_status_t read_at(gradd_file_t *file, uint64_t at, void *to, size_t n) {
    if (pread(file->fd, to, n, (off_t)at) == (ssize_t)n) return GRADD_OK;
    return GRADD_FAIL(IO, "'%s' ends before byte %llu", file->name, (unsigned long long)(at + n));
}

static gradd_status_t write_at(gradd_file_t *file, uint64_t at, const void *from, size_t n) {
    GRADD_TRY(check_alive());
    operation_t *o = recorded(WRITE, file);
    o->at = at;
    o->n = n;
    o->data = malloc(n + 1);
    memcpy(o->data, from, n);
    CHECK(pwrite(file->fd, from, n, (off_t)at) == (ssize_t)n);
    return GRADD_OK;
}

static gradd_status_t keep(gradd_file_t *file) {
    GRADD_TRY(check_alive());
    const int number = n_keeps++;
    if (number == failing) return GRADD_FAIL(IO, "the disk does not keep '%s'", file->name);
    if (!is_forgotten || !is_forgotten(number)) recorded(KEEP, file);
    return GRADD_OK;
}

static gradd_status_t keep_as(gradd_file_t *file, const char *path) {
    GRADD_TRY(check_alive());
    strcpy(recorded(RENAME, file)->name, path);
    named(path, file);
    GRADD_TRY(check_alive());
    recorded(KEEP_NAMES, file);
    return GRADD_OK;
}

static gradd_status_t map_file(gradd_file_t *file, size_t bytes, void **out_memory) {
    *out_memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file->fd, 0);
    CHECK(*out_memory != MAP_FAILED);
    return GRADD_OK;
}

static void unmap_file(void *memory, size_t bytes) {
    if (memory) munmap(memory, bytes);
}

static double seconds(void) {
    return 0;
}

const gradd_platform_t simulated_disk = {
    .name = "simulated",
    .seconds = seconds,
    .open_file = open_file,
    .close_file = close_file,
    .file_bytes = file_bytes,
    .read_at = read_at,
    .write_at = write_at,
    .keep = keep,
    .keep_as = keep_as,
    .map_file = map_file,
    .unmap_file = unmap_file,
};

/* ---- losses of power ------------------------------------------------------------------------- */

static unsigned state_of_draw;

static unsigned drawn(unsigned n) {
    state_of_draw = state_of_draw * 1664525u + 1013904223u;
    return (state_of_draw >> 8) % n;
}

/* In a draw that forgets most, half or a tenth. */
static bool survives(unsigned draw) {
    static const unsigned of_ten[] = {5, 1, 9};
    return draw == 1 || (draw > 1 && drawn(10) < of_ten[draw % 3]);
}

/* The sectors of a write that survive. */
static void write_sectors(const operation_t *o, unsigned draw, bool is_kept) {
    const uint64_t end = o->at + o->n;
    for (uint64_t at = o->at, next; at < end; at = next) {
        next = at / SECTOR * SECTOR + SECTOR;
        if (next > end) next = end;
        if (!is_kept && !survives(draw)) continue;
        const size_t n = (size_t)(next - at);
        CHECK(pwrite(files[o->file].fd, o->data + (at - o->at), n, (off_t)at) == (ssize_t)n);
    }
}

/* Whether operation i was kept before operation n. */
static bool is_kept(const disk_record_t *r, int i, int n) {
    const operation_t *o = &r->operations[i];
    for (int k = i + 1; k < n; k++) {
        const operation_t *later = &r->operations[k];
        if (o->kind == WRITE ? later->kind == KEEP && later->file == o->file
                             : later->kind == KEEP_NAMES)
            return true;
    }
    return false;
}

/* Names survive in their order. */
static void name_files(const disk_record_t *r, int n, unsigned draw) {
    for (int i = 0; i < n; i++) {
        const operation_t *o = &r->operations[i];
        if (o->kind != CREATE && o->kind != RENAME) continue;
        if (!is_kept(r, i, n) && !survives(draw)) return;
        named(o->name, &files[o->file]);
    }
}

void disk_lose_power(const disk_record_t *r, int n, unsigned draw) {
    disk_format();
    state_of_draw = draw * 977u + (unsigned)n;
    for (int i = 0; i < n; i++)
        if (r->operations[i].kind == CREATE) make_file("");
    name_files(r, n, draw);
    for (int i = 0; i <= n && i < r->n; i++)
        if (r->operations[i].kind == WRITE)
            write_sectors(&r->operations[i], draw, is_kept(r, i, n));
}

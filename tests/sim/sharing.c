/* Memory that processes share: files without a name, handles of 64 bytes, and memory that is
 * created apart from its addresses. See sim.h. */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/sim/internal.h"

/* ---- files ----------------------------------------------------------------------------------- */

int sim_file(const char *name, size_t bytes) {
    const int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd >= 0 && !ftruncate(fd, (off_t)bytes)) return fd;
    if (fd >= 0) close(fd);
    return -1;
}

void sim_name_file(int fd, int device, char *out) {
    struct stat st = {0};
    fstat(fd, &st);
    memset(out, 0, sizeof(cudaIpcMemHandle_t));
    snprintf(out, sizeof(cudaIpcMemHandle_t), "%d %d %llu %lld %d", (int)getpid(), fd,
             (unsigned long long)st.st_ino, (long long)st.st_size, device);
}

/* What a handle says. */
typedef struct sim_name_s {
    int pid, fd, device;
    unsigned long long inode;
} sim_name_t;

static bool parse(const char *text, sim_name_t *out) {
    return sscanf(text, "%d %d %llu %*d %d", &out->pid, &out->fd, &out->inode, &out->device) == 4;
}

int sim_open_file(const char *text, int *out_device) {
    char path[64];
    sim_name_t name;
    struct stat st;
    if (!parse(text, &name) || sim_device_of(name.device) < 0) return -1;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", name.pid, name.fd);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    *out_device = name.device;
    if (fd >= 0 && !fstat(fd, &st) && st.st_ino == name.inode) return fd;
    if (fd >= 0) close(fd);
    return -1;
}

/* ---- handles of memory ----------------------------------------------------------------------- */

enum { MOST_IMPORTERS = 32 };

/* The last page of a file: processes that have it open. */
typedef struct sim_importers_s {
    _Atomic pid_t pid[MOST_IMPORTERS]; /* 0 = none */
} sim_importers_t;

typedef struct sim_opened_s {
    struct sim_opened_s *next;
    cudaIpcMemHandle_t handle;
    void *at;
    sim_importers_t *importers;
    int count;
} sim_opened_t;

static sim_opened_t *opened; /* by one thread */

static sim_importers_t *importers_of(int fd) {
    struct stat st;
    if (fstat(fd, &st)) return NULL;
    void *page =
        mmap(NULL, SIM_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, st.st_size - (off_t)SIM_PAGE);
    return page == MAP_FAILED ? NULL : page;
}

static void enlist(sim_importers_t *importers, pid_t from, pid_t to) {
    for (int i = 0; i < MOST_IMPORTERS; i++) {
        pid_t expected = from;
        if (atomic_compare_exchange_strong(&importers->pid[i], &expected, to)) return;
    }
}

/* Not one that is dead and not waited for: its driver has closed what it had open. */
static bool lives(pid_t pid) {
    char path[64], text[512] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "re");
    if (!file) return false;
    const char *end = fgets(text, sizeof text, file) ? strrchr(text, ')') : NULL;
    fclose(file);
    return end && end[1] && end[2] != 'Z' && end[2] != 'X';
}

void sim_check_importers(const void *at) {
    sim_block_t b;
    if (!sim_memory_find(at, &b) || b.fd < 0) return;
    sim_importers_t *importers = importers_of(b.fd);
    for (int i = 0; importers && i < MOST_IMPORTERS; i++) {
        const pid_t pid = importers->pid[i];
        if (!pid || !lives(pid)) continue;
        fprintf(stderr, "CUDA's stand-in: memory is freed that process %d has open\n", (int)pid);
        abort();
    }
    if (importers) munmap(importers, SIM_PAGE);
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *out, void *memory) {
    sim_block_t b;
    SIM_CALL(cudaErrorMemoryAllocation);
    if (!sim_memory_find(memory, &b) || b.kind != SIM_TAKEN || b.fd < 0)
        return sim_failed(cudaErrorInvalidValue);
    sim_name_file(b.fd, b.device, out->reserved);
    return cudaSuccess;
}

static sim_opened_t *known(const cudaIpcMemHandle_t *handle) {
    sim_opened_t *o = opened;
    while (o && memcmp(&o->handle, handle, sizeof *handle))
        o = o->next;
    return o;
}

static cudaError_t open_first(const cudaIpcMemHandle_t *handle, void **out) {
    struct stat st;
    int device;
    const int fd = sim_open_file(handle->reserved, &device);
    if (fd < 0 || fstat(fd, &st)) return sim_failed(cudaErrorInvalidResourceHandle);
    const size_t bytes = (size_t)st.st_size - SIM_PAGE;
    sim_opened_t *o = malloc(sizeof *o);
    void *at = mmap(NULL, bytes, PROT_NONE, MAP_SHARED, fd, 0);
    if (!o || at == MAP_FAILED) abort();
    *o = (sim_opened_t){opened, *handle, at, importers_of(fd), 1};
    close(fd);
    if (!o->importers) abort();
    enlist(o->importers, 0, getpid());
    sim_memory_add(&(sim_block_t){at, bytes, bytes, SIM_OPENED, -1, device});
    opened = o;
    *out = at;
    return cudaSuccess;
}

/* A process cannot open its own handle. The same handle gives the same address, and is counted. */
cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t handle, unsigned flags) {
    sim_name_t name;
    SIM_CALL(cudaErrorInvalidResourceHandle);
    if (flags != cudaIpcMemLazyEnablePeerAccess || !parse(handle.reserved, &name))
        return sim_failed(cudaErrorInvalidValue);
    if (name.pid == getpid()) return sim_failed(cudaErrorDeviceUninitialized);
    sim_opened_t *o = known(&handle);
    if (!o) return open_first(&handle, out);
    o->count++;
    *out = o->at;
    return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void *memory) {
    sim_opened_t **link = &opened, *o;
    sim_block_t b;
    SIM_CALL(cudaErrorInvalidValue);
    while (*link && (*link)->at != memory)
        link = &(*link)->next;
    if (!(o = *link)) return sim_failed(cudaErrorInvalidValue);
    if (--o->count) return cudaSuccess;
    sim_wait_all();
    *link = o->next;
    if (sim_memory_remove(memory, SIM_OPENED, &b)) munmap(b.at, b.room);
    enlist(o->importers, getpid(), 0);
    munmap(o->importers, SIM_PAGE);
    free(o);
    return cudaSuccess;
}

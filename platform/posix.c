/* POSIX systems: Linux, Android, macOS, iOS. See platform.h. */
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "platform/files.h"

/* From here on memory comes straight from the kernel, with huge pages where there are any. */
#define MAP_FROM ((size_t)2 << 20)
#define ALIGN    ((size_t)64)

const gradd_discarder_t *gradd_discarder;

static void *map(size_t bytes) {
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

static void *take(size_t bytes) {
    if (bytes < MAP_FROM) return aligned_alloc(ALIGN, (bytes + ALIGN) / ALIGN * ALIGN);
    void *memory = map(bytes);
    if (memory == MAP_FAILED && gradd_discarder) {
        gradd_discarder->settle();
        memory = map(bytes);
    }
    if (memory == MAP_FAILED) return NULL;
#ifdef MADV_HUGEPAGE
    madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    return memory;
}

static void give_back(void *memory, size_t bytes) {
    if (!memory) return;
    if (bytes < MAP_FROM)
        free(memory);
    else if (gradd_discarder)
        gradd_discarder->discard(memory, bytes);
    else
        munmap(memory, bytes);
}

#ifdef MADV_POPULATE_WRITE /* Linux 5.14; what fails here fails, or not, where it is used */
static void touch(void *memory, size_t bytes, bool written) {
    madvise(memory, bytes, written ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
}
#else
#define touch NULL
#endif

static gradd_status_t map_file(gradd_file_t *file, size_t bytes, void **out_memory) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, disk_descriptor(file), 0);
    if (memory == MAP_FAILED) return GRADD_FAIL(IO, "cannot map %zu bytes of a file", bytes);
    *out_memory = memory;
    return GRADD_OK;
}

static void unmap_file(void *memory, size_t bytes) {
    if (memory) munmap(memory, bytes);
}

static double read_clock(clockid_t clock) {
    struct timespec t;
    if (clock_gettime(clock, &t)) return 0;
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double seconds(void) {
    return read_clock(CLOCK_MONOTONIC);
}

static double thread_seconds(void) {
    return read_clock(CLOCK_THREAD_CPUTIME_ID);
}

const gradd_platform_t gradd_platform = {
    .name = "posix",
    .take = take,
    .give_back = give_back,
    .touch = touch,
    .seconds = seconds,
    .thread_seconds = thread_seconds,
    .read_file = files_read,
    .write_file = files_write,
    .open_file = disk_open,
    .close_file = disk_close,
    .is_named = disk_is_named,
    .file_bytes = disk_bytes,
    .read_at = disk_read,
    .write_at = disk_write,
    .keep = disk_keep,
    .keep_as = disk_keep_as,
    .map_file = map_file,
    .unmap_file = unmap_file,
};

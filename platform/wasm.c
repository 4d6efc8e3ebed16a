/* WebAssembly by emscripten: linear memory, no pages to map, no clock of a thread. See platform.h.
 */
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include "platform/files.h"

#define ALIGN ((size_t)64)

static void *take(size_t bytes) {
    if (bytes > SIZE_MAX - ALIGN) return NULL;
    return aligned_alloc(ALIGN, (bytes + ALIGN) / ALIGN * ALIGN);
}

static void give_back(void *memory, size_t bytes) {
    (void)bytes;
    free(memory);
}

static double seconds(void) {
    struct timespec t;
    if (clock_gettime(CLOCK_MONOTONIC, &t)) return 0;
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

const gradd_platform_t gradd_platform = {
    .name = "wasm",
    .take = take,
    .give_back = give_back,
    .seconds = seconds,
    .thread_seconds = seconds,
    .read_file = files_read,
    .write_file = files_write,
    .open_file = disk_open,
    .close_file = disk_close,
    .file_bytes = disk_bytes,
    .read_at = disk_read,
    .write_at = disk_write,
    .keep = disk_keep,
    .keep_as = disk_keep_as,
};

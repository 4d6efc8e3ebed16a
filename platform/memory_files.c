/* Files where the system has none, as in a browser's tab: nothing can be read, and what is written
 * last is held in memory for the caller. In place of files.c. */
#include "platform/memory_files.h"

#include <stdlib.h>
#include <string.h>

#include "platform/files.h"

static memory_file_t held;

gradd_status_t files_read(const char *path, size_t most, void **out_bytes, size_t *out_n) {
    (void)most, (void)out_bytes, (void)out_n;
    return GRADD_FAIL(IO, "cannot open '%s': there are no files here, give its bytes", path);
}

gradd_status_t files_write(const char *path, const gradd_file_part_t *parts, int n) {
    size_t bytes = 0;
    memory_file_forget();
    for (int i = 0; i < n; i++)
        bytes += parts[i].n;
    char *at = held.data = malloc(bytes + 1);
    if (!at) return GRADD_FAIL(NOMEM, "no memory for '%s': %zu bytes", path, bytes);
    held.n = bytes;
    for (int i = 0; i < n; i++) {
        if (parts[i].n) memcpy(at, parts[i].data, parts[i].n);
        at += parts[i].n;
    }
    return GRADD_OK;
}

const memory_file_t *memory_file(void) {
    return &held;
}

void memory_file_forget(void) {
    free(held.data);
    held = (memory_file_t){0};
}

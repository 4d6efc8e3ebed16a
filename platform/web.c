/* WebAssembly that imports a clock alone, as in a browser's tab: there are no files. Nothing can be
 * read, and what is written is held in memory for the caller. See platform.h. */
#include "platform/web.h"

#include <string.h>

#include "platform/linear.h"
#include "platform/platform.h"

static web_file_t held;

static gradd_status_t read_file(const char *path, size_t most, void **out_bytes, size_t *out_n) {
    (void)most, (void)out_bytes, (void)out_n;
    return GRADD_FAIL(IO, "cannot open '%s': there are no files here, give its bytes", path);
}

static gradd_status_t write_file(const char *path, const gradd_file_part_t *parts, int n) {
    size_t bytes = 0;
    web_file_forget();
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

const web_file_t *web_file(void) {
    return &held;
}

void web_file_forget(void) {
    free(held.data);
    held = (web_file_t){0};
}

const gradd_platform_t gradd_platform = {
    .name = "web",
    .take = linear_take,
    .give_back = linear_give_back,
    .seconds = linear_seconds,
    .thread_seconds = linear_seconds,
    .read_file = read_file,
    .write_file = write_file,
};
